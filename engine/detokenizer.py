"""From token ids to the text a user sees, piece by piece: characters, stop strings, reasoning.

Each class turns a stream of deltas into a stream of deltas, holds back only what may still change, and gives
up what it holds in `finish()`. Joined deltas do not depend on how the stream was cut: one token at a time and
four at a time read the same. Chained in this order:

    token ids -> Detokenizer -> StopMatcher -> ReasoningSplitter -> (reasoning, answer)
"""

import codecs
from collections.abc import Sequence

from engine.text import THINK_END, Tokenizer


class Detokenizer:
    """Token ids to text, never splitting a character; joined deltas equal `Tokenizer.decode` of all ids.

    Holds at most 3 bytes: the beginning of a UTF-8 character. A character that the end of the stream cuts
    becomes one U+FFFD in `finish()`; bytes that can never form a character become U+FFFD at once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these ids; may be empty."""
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def finish(self) -> str:
        """What is left: "" or one U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Ends the text right before the stop string that is completed first (the longer of two ending together).

    Holds back the longest end of the text that begins a stop string: at most len(stop) - 1 characters.
    After a stop nothing more is shown; `rest` is what followed it in the same piece.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops, self._held, self._stopped, self.rest = stops, "", False, ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text to show, whether a stop string was completed)."""
        if self._stopped:
            return "", True
        text, self._held = self._held + text, ""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self._stopped, self.rest = True, text[end:]
            return text[:start], True
        first = max(len(text) - max(map(len, self._stops), default=0), 0)
        cuts = (i for i in range(first, len(text)) if any(stop.startswith(text[i:]) for stop in self._stops))
        cut = next(cuts, len(text))
        self._held = text[cut:]
        return text[:cut], False

    def finish(self) -> str:
        """The held text, which turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


class ReasoningSplitter:
    """Splits an output into what precedes `</think>` and what follows; the tag itself belongs to neither.

    `thinking` says where the stream stands. It starts as given (see `text.ends_in_thinking`) because the
    opening tag is part of the prompt, and is still True at the end of an output cut before `</think>`.
    """

    def __init__(self, thinking: bool) -> None:
        self.thinking, self._tag = thinking, StopMatcher((THINK_END,))
        self.finish = self._tag.finish  # the held beginning of a tag that never came: reasoning

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning delta, answer delta)."""
        if not self.thinking:
            return "", text
        reasoning, ended = self._tag.push(text)
        self.thinking = not ended
        return reasoning, self._tag.rest
