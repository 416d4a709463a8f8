"""Tokenizer, chat template and stop ids of one checkpoint directory.

Invariants:

- encoding adds nothing: a raw prompt gets no preamble, a rendered chat prompt keeps the template's only one;
- one token's bytes do not depend on its neighbours (byte-level BPE), so text can be decoded as it comes;
- special tokens such as `<think>` decode to their text, ids the tokenizer does not know (a padded vocabulary)
  to nothing. Stop ids are dropped by the engine before they get here;
- a template is only given what it knows: a reasoning effort it would misread is refused, tool-call arguments
  always reach it as a mapping, a null content as an empty string.

`tokenizers` and `jinja2` are used directly: importing `transformers` takes longer than loading a small model.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model.config import read_json, token_ids

REASONING_EFFORTS = ("low", "high", "max")
ASSISTANT, THINK_START, THINK_END = "<|assistant|>", "<think>", "</think>"

Message = Mapping[str, Any]


class TextError(ValueError):
    """A prompt, message or tokenizer file that can't be used; says what was found, expected, what to do."""


class Tokenizer:
    """The tokenizer files of one checkpoint; `eos_token_id` is None if tokenizer_config.json names none."""

    def __init__(self, directory: Path) -> None:
        path, config_path = directory / "tokenizer.json", directory / "tokenizer_config.json"
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TextError(f"{path} is not a readable tokenizer ({error}); download it again") from None
        decoder = type(self._tokenizer.decoder).__name__
        if decoder != "ByteLevel":
            raise TextError(f"{path}: decoder is {decoder}; only ByteLevel (byte-level BPE) is implemented")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = read_json(config_path) if config_path.exists() else {}
        self._special_tokens, self._template = _special_tokens(config), _read_template(directory, config)
        self._bytes_of: dict[int, bytes] = {}
        self.eos_token_id = self.token_id(self._special_tokens.get("eos_token", ""))

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
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of all ids at once; bytes that form no character become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text, empty for an unknown id."""
        if token_id not in self._bytes_of:
            token: str = self._tokenizer.id_to_token(token_id) or ""
            spelled = all(character in BYTE_ALPHABET for character in token)  # else an added token, as it is
            self._bytes_of[token_id] = bytes(BYTE_ALPHABET[c] for c in token) if spelled else token.encode()
        return self._bytes_of[token_id]

    def token_id(self, text: str) -> int | None:
        """The id of the token written exactly so, for instance `<think>`."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def chat(
        self,
        messages: Sequence[Message],
        *,
        reasoning_effort: str | None = None,
        tools: Sequence[Message] | None = None,
    ) -> str:
        """Render messages with the checkpoint's template up to the beginning of the assistant's turn.

        Raises TextError without a template, for an effort other than low, high, max or one the template
        ignores, for tool-call arguments that are no JSON object, and for what the template itself refuses.
        """
        if self._template is None:
            raise TextError("the model has no chat_template.jinja and no chat_template; give a plain prompt")
        effort = reasoning_effort
        if effort not in (None, *REASONING_EFFORTS):
            raise TextError(f"reasoning effort is {effort!r}, expected one of {', '.join(REASONING_EFFORTS)}")
        if effort and "reasoning_effort" not in self._template:
            raise TextError(
                f"reasoning effort {effort!r}: this model's chat template knows none; leave it out"
            )
        variables = {"tools": tools, **self._special_tokens} | (
            {"reasoning_effort": effort} if effort else {}
        )
        normalised = [_normalised(message, index) for index, message in enumerate(messages)]
        try:
            template = JINJA.from_string(self._template)
            return str(template.render(messages=normalised, add_generation_prompt=True, **variables))
        except (jinja2.TemplateError, TypeError, ValueError) as error:
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


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """`eos_token` and its like by name; files spell them as text or as an object with `content`."""
    texts = [(name, v.get("content") if isinstance(v, dict) else v) for name, v in config.items()]
    return {name: text for name, text in texts if name.endswith("_token") and isinstance(text, str)}


def _read_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the field of tokenizer_config.json (text or a list with a `default`)."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    field = config.get("chat_template")
    if isinstance(field, list):
        field = {entry["name"]: entry["template"] for entry in field}.get("default")
    return field


def _normalised(message: Message, index: int) -> dict[str, Any]:
    result = dict(message)
    if result.get("content") is None:
        result["content"] = ""
    if result.get("tool_calls"):
        result["tool_calls"] = [_normalised_call(call, f"messages[{index}]") for call in result["tool_calls"]]
    return result


def _normalised_call(call: Message, where: str) -> dict[str, Any]:
    """The call with `arguments` as a mapping; it stands in `function`, or bare in the call itself."""
    if "function" in call:
        return {**call, "function": _normalised_call(call["function"], where)}
    arguments, which = call.get("arguments") or {}, f"{where}: arguments of {call.get('name')!r}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise TextError(f"{which} are not valid JSON ({error})") from None
    if not isinstance(arguments, Mapping):
        raise TextError(f"{which} are a {type(arguments).__name__}, expected a JSON object")
    return {**call, "arguments": arguments}


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


# Jinja as chat templates expect it: sandboxed, block lines leave no trace, JSON is not escaped.
JINJA: Any = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
)
JINJA.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
JINJA.globals["raise_exception"] = _raise_exception
