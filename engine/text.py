"""Tokenizer, chat template and stop ids of one checkpoint directory, read and rendered by transformers.

- Encoding adds nothing: a raw prompt gets no preamble, a rendered chat prompt keeps the template's only one.
- One token's bytes do not depend on its neighbours (byte-level BPE), so text can be decoded as it comes.
- Special tokens such as `<think>` decode to their text, unknown ids (a padded vocabulary) to nothing.
- A template is only given what it knows: a reasoning effort it would misread is refused, tool-call arguments
  always reach it as a mapping, a null content as an empty string.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from model.config import token_ids

REASONING_EFFORTS = ("low", "high", "max")
ASSISTANT, THINK_START, THINK_END = "<|assistant|>", "<think>", "</think>"
Messages = Sequence[Mapping[str, Any]]


class TextError(ValueError):
    """A prompt, message or tokenizer file that can't be used; says what was found, expected, what to do."""


class Tokenizer:
    """The tokenizer files of one checkpoint; `eos_token_id` is None if tokenizer_config.json names none."""

    def __init__(self, directory: Path) -> None:
        from transformers import PreTrainedTokenizerFast  # slow to import, needless without a tokenizer
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        try:
            self._fast: Any = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # the library raises bare Exception
            raise TextError(f"{directory}: not a readable tokenizer ({error}); download it again") from None
        if (decoder := type(self._fast.decoder).__name__) != "ByteLevel":
            raise TextError(f"{directory}: decoder {decoder}; only ByteLevel (byte-level BPE) is implemented")
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        self.eos_token_id: int | None = self._fast.eos_token_id
        # the id of the token written exactly so, for instance `<think>`
        self.token_id: Callable[[str], int | None] = self._fast.convert_tokens_to_ids

    @staticmethod
    def load(directory: Path) -> "Tokenizer | None":
        """Read tokenizer.json, tokenizer_config.json and the chat template; None without the first."""
        return Tokenizer(directory) if (directory / "tokenizer.json").exists() else None

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens written in it become their ids, none are added."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TextError(f"the text is not valid UTF-8 at character {error.start}; re-encode it") from None
        return list(self._fast.encode(text, add_special_tokens=False, verbose=False))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of all ids at once; bytes that form no character become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text, empty for an unknown id."""
        token: str = self._fast.convert_ids_to_tokens(token_id) or ""
        spelled = all(character in self._byte_of for character in token)  # else an added token, as it is
        return bytes(self._byte_of[character] for character in token) if spelled else token.encode()

    def chat(
        self, messages: Messages, *, reasoning_effort: str | None = None, tools: Messages | None = None
    ) -> str:
        """Render messages with the checkpoint's template up to the beginning of the assistant's turn.

        Raises TextError without a template, for an effort other than low, high, max or one the template
        ignores, for tool-call arguments that are no JSON object, and for what the template itself refuses.
        """
        effort, template = reasoning_effort, self._fast.chat_template
        if template is None:
            raise TextError("the model has no chat_template.jinja and no chat_template; give a plain prompt")
        if effort not in (None, *REASONING_EFFORTS):
            raise TextError(f"reasoning effort is {effort!r}, expected one of {', '.join(REASONING_EFFORTS)}")
        if effort and "reasoning_effort" not in str(template):  # one text, or several by name
            raise TextError(f"reasoning effort {effort!r}: the chat template knows none; leave it out")
        options: dict[str, Any] = {"reasoning_effort": effort} if effort else {}
        options |= {"tools": tools, "add_generation_prompt": True, "tokenize": False}
        history = [_normalised(message, f"messages[{index}]") for index, message in enumerate(messages)]
        try:
            return str(self._fast.apply_chat_template(history, **options))
        except Exception as error:  # whatever a template may raise
            raise TextError(f"the chat template refused the messages: {error}") from None


def ends_in_thinking(prompt_text: str) -> bool:
    """Whether a rendered prompt ends inside `<think>`; what stands before the last turn does not count."""
    turn = prompt_text.rpartition(ASSISTANT)[2]
    return turn.rfind(THINK_START) > turn.rfind(THINK_END)


def stop_token_ids(
    config_ids: Iterable[int], generation_config: Mapping[str, Any], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Ids that end a turn, ascending: the union of config.json, generation_config.json and tokenizer eos."""
    named = None if tokenizer is None else tokenizer.eos_token_id
    return tuple(sorted({*config_ids, *token_ids(generation_config.get("eos_token_id")), *token_ids(named)}))


def _normalised(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    result = {"content": ""} | {key: value for key, value in message.items() if value is not None}
    if calls := result.get("tool_calls"):
        result["tool_calls"] = [_with_mapping(call, where) for call in calls]
    return result


def _with_mapping(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The call with `arguments` as a mapping; it stands in `function`, or bare in the call itself."""
    if "function" in call:
        return {**call, "function": _with_mapping(call["function"], where)}
    given = call.get("arguments") or {}
    try:
        return {**call, "arguments": {**(json.loads(given) if isinstance(given, str) else given)}}
    except (TypeError, ValueError) as error:
        which = f"{where}: arguments of {call.get('name')!r}"
        raise TextError(f"{which} are not valid ({error}); expected a JSON object or its text") from None
