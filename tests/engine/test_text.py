"""A prompt becomes exactly the ids its template means, and every source that ends a turn is heard (F4-F7)."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders

from engine.text import TextError, Tokenizer, ends_in_thinking, stop_token_ids
from tests.glm_tokenizer import SPECIAL_IDS, write_tokenizer

PREAMBLE = [SPECIAL_IDS["[gMASK]"], SPECIAL_IDS["<sop>"]]
USER = [{"role": "user", "content": "Grüße"}]


def _load(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path)
    return _load(tmp_path)


@pytest.mark.parametrize("id_", [154820, 154827, 154829])
@pytest.mark.parametrize("source", ["config", "generation_config", "generation_config list"])
def test_each_source_ends_a_turn(tokenizer: Tokenizer, id_: int, source: str) -> None:
    config = (id_,) if source == "config" else ()
    generation = {"config": {}, "generation_config": {"eos_token_id": id_}}.get(
        source, {"eos_token_id": [id_]}
    )
    assert id_ in stop_token_ids(config, generation, None)
    assert stop_token_ids(config, generation, tokenizer) == tuple(sorted({id_, 154820}))


def test_stop_ids_are_the_union_of_all_sources(tmp_path: Path) -> None:
    eos_token = {"__type": "AddedToken", "content": "<|observation|>", "special": True}
    write_tokenizer(tmp_path, eos_token=eos_token)
    sources = ((154820,), {"eos_token_id": [154827, 154820]}, _load(tmp_path))
    assert stop_token_ids(*sources) == (154820, 154827, 154829)
    assert stop_token_ids((), {"eos_token_id": None}, None) == ()


@pytest.mark.parametrize("eos_token", [None, "<|not a token|>"])
def test_a_tokenizer_that_names_no_usable_eos_ends_no_turn_at_its_tokens(
    tmp_path: Path, eos_token: str | None
) -> None:
    write_tokenizer(tmp_path, eos_token=eos_token)
    library = LibraryTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    stops = stop_token_ids((), {}, _load(tmp_path))
    assert [id_ for id_ in stops if library.id_to_token(id_) is not None] == []
    assert eos_token or not stops


@pytest.mark.parametrize(
    ("effort", "line"), [("low", "Low"), ("high", "High"), ("max", "Max"), (None, "Max")]
)
def test_reasoning_effort_reaches_the_template(tokenizer: Tokenizer, effort: str | None, line: str) -> None:
    prompt = tokenizer.chat(USER, reasoning_effort=effort)
    assert prompt == f"[gMASK]<sop><|system|>Reasoning Effort: {line}<|user|>Grüße<|assistant|><think>"


@pytest.mark.parametrize("effort", ["none", "minimal", "medium", "Low", ""])
def test_an_effort_the_template_would_turn_into_max_is_refused(tokenizer: Tokenizer, effort: str) -> None:
    with pytest.raises(TextError, match="low, high, max"):
        tokenizer.chat(USER, reasoning_effort=effort)


def test_an_effort_the_template_ignores_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(TextError, match="leave it out"):
        _load(tmp_path).chat(USER, reasoning_effort="low")


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|user|>hi<|assistant|><think>", True),
        ("<|user|>hi<|assistant|><think>\nOkay, ", True),
        ("<|user|>hi<|assistant|><think></think>", False),
        ("<|user|>hi<|assistant|>", False),
        ("<|user|>what is <think>?<|assistant|>", False),
        ("<|assistant|><think>a</think>b<|user|>c<|assistant|><think>", True),
        ("no chat at all", False),
    ],
)
def test_a_prompt_ends_in_thinking_only_after_an_open_tag_of_the_last_turn(prompt: str, inside: bool) -> None:
    assert ends_in_thinking(prompt) is inside


def _history(*arguments: object, content: str | None = None) -> list[dict[str, Any]]:
    calls = [{"type": "function", "function": {"name": "find", "arguments": value}} for value in arguments]
    turn = {"role": "assistant", "content": content, "tool_calls": calls}
    return [*USER, turn, {"role": "tool", "content": "ok"}, {"role": "tool", "content": "done"}]


@pytest.mark.parametrize("mapping", [{"city": "Zürich 😀", "days": 3, "exact": True, "tags": ["é"]}, {}])
def test_tool_call_arguments_as_json_text_and_as_mapping_render_alike(
    tokenizer: Tokenizer, mapping: dict[str, object]
) -> None:
    as_text = tokenizer.chat(_history(json.dumps(mapping), json.dumps(mapping, ensure_ascii=False)))
    assert tokenizer.encode(as_text) == tokenizer.encode(tokenizer.chat(_history(mapping, mapping)))
    values = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{text}</arg_value>"
        for key, text in {"city": "Zürich 😀", "days": "3", "exact": "true", "tags": '["é"]'}.items()
    )
    call = f"<tool_call>find{values if mapping else ''}</tool_call>"
    results = "<|observation|><tool_response>ok</tool_response><tool_response>done</tool_response>"
    assert f"<|assistant|><think></think>{call}{call}{results}<|assistant|><think>" in as_text


@pytest.mark.parametrize("nothing", ["", "{}", {}, None])
def test_no_tool_call_arguments_in_any_spelling(tokenizer: Tokenizer, nothing: object) -> None:
    assert "<tool_call>find</tool_call>" in tokenizer.chat(_history(nothing))


@pytest.mark.parametrize("bad", ['{"city": ', "Zürich", "[1]", '"text"', 3])
def test_tool_call_arguments_that_are_no_json_object_are_refused(tokenizer: Tokenizer, bad: object) -> None:
    with pytest.raises(TextError, match=r"messages\[1\]: arguments of 'find' are"):
        tokenizer.chat(_history({}, bad))


def test_rendering_leaves_the_history_as_it_was(tokenizer: Tokenizer) -> None:
    history = _history('{"a": 1}')
    before = json.dumps(history)
    tokenizer.chat(history)
    assert json.dumps(history) == before


def test_tools_are_rendered_without_ascii_escapes(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.chat(USER, tools=[{"name": "größe"}, {"name": "later", "defer_loading": True}])
    assert '<tools>\n{"name": "größe"}\n</tools><|user|>' in prompt


def test_the_preamble_appears_once_on_the_chat_path_and_never_on_the_raw_path(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(tokenizer.chat(USER))
    assert ids[:2] == PREAMBLE
    assert [id_ for id_ in ids if id_ in PREAMBLE] == PREAMBLE
    assert ids[-2:] == [SPECIAL_IDS["<|assistant|>"], SPECIAL_IDS["<think>"]]
    assert not set(tokenizer.encode("Grüße")) & set(PREAMBLE)


def test_template_file_comes_before_the_config_field(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text("from the file, {{ eos_token }}")
    named = [{"name": "rag", "template": "wrong"}, {"name": "default", "template": "from the list"}]
    config = {"eos_token": "<|endoftext|>", "chat_template": "from the field"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert _load(tmp_path).chat(USER) == "from the file, <|endoftext|>"
    template.unlink()
    assert _load(tmp_path).chat(USER) == "from the field"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert _load(tmp_path).chat(USER) == "from the list"
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(TextError, match="no chat_template"):
        _load(tmp_path).chat(USER)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% if %}",
        "{{ messages.nothing.at_all }}",
        "{{ 1 + messages }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
    ],
)
def test_a_template_that_fails_is_a_user_error(tmp_path: Path, template: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(TextError, match="chat template refused"):
        _load(tmp_path).chat(USER)


def test_block_lines_leave_no_trace_and_loops_can_break(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    lines = [
        "  {% for n in [1, 2] %}",
        "{{ n }}",
        "    {% if n == 1 %}",
        "    {% break %}",
        "    {% endif %}",
    ]
    (tmp_path / "chat_template.jinja").write_text("\n".join([*lines, "  {% endfor %}", "end"]))
    assert _load(tmp_path).chat(USER) == "1\nend"


def test_an_added_token_outside_the_byte_alphabet_keeps_its_spelling(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = str(tmp_path / "tokenizer.json")
    library = LibraryTokenizer.from_file(path)
    library.add_tokens(["<two words 한>"])
    library.save(path)
    tokenizer = _load(tmp_path)
    ids = tokenizer.encode("é<two words 한>é")
    assert len(ids) == 5
    assert tokenizer.decode(ids) == "é<two words 한>é"


def test_unknown_ids_decode_to_nothing_and_special_tokens_to_their_text(tokenizer: Tokenizer) -> None:
    a = tokenizer.encode("a")
    assert tokenizer.decode([*a, 154879, 154841, 154821, *a]) == "a<think>a"
    assert tokenizer.token_id("<think>") == 154841
    assert tokenizer.token_id("<nothing>") is None


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = str(tmp_path / "tokenizer.json")
    library = LibraryTokenizer.from_file(path)
    library.enable_truncation(4)
    library.enable_padding(length=8)
    library.save(path)
    tokenizer = _load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("abcdef")) == "abcdef"
    assert len(tokenizer.encode("a")) == 1


def test_unusable_tokenizer_files_are_user_errors(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None
    path = tmp_path / "tokenizer.json"
    path.write_text("{")
    with pytest.raises(TextError, match="not a readable tokenizer"):
        Tokenizer.load(tmp_path)
    write_tokenizer(tmp_path)
    library = LibraryTokenizer.from_file(str(path))
    library.decoder = decoders.WordPiece()
    library.save(str(path))
    with pytest.raises(TextError, match="WordPiece; only ByteLevel"):
        Tokenizer.load(tmp_path)


def test_a_prompt_that_is_no_utf8_is_a_user_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(TextError, match="not valid UTF-8 at character 2"):
        tokenizer.encode("ab\udcff")
