"""A conversation as a growing prompt: user turns and answers, in the checkpoint's template or as plain text.

Each prompt begins with the whole of the one before and its answer, which is what a prefix cache lives on.
"""

from collections.abc import Mapping

from engine.output import Result
from engine.text import TextError, Tokenizer


class Conversation:
    """`templated`: turns go through the chat template; else texts are joined as they are."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        templated: bool,
        system: str | None = None,
        reasoning_effort: str | None = None,
    ) -> None:
        if tokenizer is None:
            raise TextError("a conversation needs the model's tokenizer.json, and there is none")
        self._tokenizer, self.templated, self._effort = tokenizer, templated, reasoning_effort
        self._messages: list[Mapping[str, str | None]] = []
        if system is not None:
            self._messages.append({"role": "system", "content": system})
        self._text = self._asked = ""

    def ask(self, text: str) -> str:
        """The prompt of the user's next turn; part of the history once it is answered."""
        self._asked = text
        if not self.templated:
            return self._text + text
        messages = [*self._messages, {"role": "user", "content": text}]
        return self._tokenizer.chat(messages, reasoning_effort=self._effort)

    def answered(self, result: Result) -> None:
        """Append the turn and its answer to the history."""
        answer = result.text or ""
        self._text += self._asked + answer
        # Reasoning that is None will be no part of the message.
        message = {"role": "assistant", "content": answer, "reasoning_content": result.reasoning}
        self._messages += [{"role": "user", "content": self._asked}, message]
