"""However a token stream is cut, its text, stop position and reasoning split are the same (F2, F3, F5)."""

from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer

from engine.detokenizer import Detokenizer, ReasoningSplitter, StopMatcher
from engine.text import Tokenizer
from tests.glm_tokenizer import SPECIAL_IDS, write_tokenizer

Whole = TypeVar("Whole", str, list[int])
CHARACTERS = {
    "emoji": "a😀b",
    "two bytes": "é",
    "hangul": "한글",
    "family": "👨‍👩‍👧‍👦!",
    "genuine": "x\ufffdy",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    loaded = Tokenizer.load(directory)
    assert loaded is not None
    return loaded


def _pieces(whole: Whole, sizes: list[int]) -> list[Whole]:
    """Cut `whole` into pieces of the given sizes, repeated as often as needed."""
    borders = [0]
    while borders[-1] < len(whole):
        borders.append(borders[-1] + sizes[(len(borders) - 1) % len(sizes)])
    return [whole[start:end] for start, end in pairwise(borders)]


def _stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*[detokenizer.push(piece) for piece in _pieces(ids, sizes)], detokenizer.finish()]


@pytest.mark.parametrize("sizes", [[1], [1, 2, 3, 4], [4]], ids=str)
@pytest.mark.parametrize("text", CHARACTERS.values(), ids=CHARACTERS.keys())
def test_streaming_never_splits_a_character(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    deltas = _stream(tokenizer, ids, sizes)
    assert "".join(deltas) == tokenizer.decode(ids) == text
    assert "\ufffd" not in "".join(deltas).replace(text, "")
    assert deltas[-1] == ""


@pytest.mark.parametrize("text", CHARACTERS.values(), ids=CHARACTERS.keys())
def test_a_character_cut_by_the_token_limit_becomes_one_mark_at_the_end(
    tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)
    for limit in range(len(ids)):
        whole = text.encode()[:limit].decode(errors="ignore")
        *deltas, last = _stream(tokenizer, ids[:limit], [1])
        assert "".join(deltas) == whole
        assert last == ("" if len(whole.encode()) == limit else "\ufffd")
        assert whole + last == tokenizer.decode(ids[:limit])


@given(
    st.lists(st.integers(0, 256) | st.sampled_from([*SPECIAL_IDS.values(), 154879]), max_size=40),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
@settings(deadline=None)
def test_joined_deltas_equal_the_decode_of_any_tokens(
    directory: Path, tokenizer: Tokenizer, ids: list[int], sizes: list[int]
) -> None:
    library = LibraryTokenizer.from_file(str(directory / "tokenizer.json"))
    once = tokenizer.decode(ids)
    assert "".join(_stream(tokenizer, ids, sizes)) == once
    assert once == library.decode(ids, skip_special_tokens=False)


@given(st.text(max_size=30))
def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def _match(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    pushed = [matcher.push(piece) for piece in pieces]
    return [*[shown for shown, _ in pushed], matcher.finish()], any(stopped for _, stopped in pushed)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "stopped"),
    [
        (("DEFGHIJ",), ["abc", "DEF", "G", "HI", "J", "klm"], ["abc", "", "", "", "", "", ""], True),
        (("DEFGHIJ",), ["DEF", "X"], ["", "DEFX", ""], False),
        (("DEFGHIJ",), ["DEF"], ["", "DEF"], False),
        (("aab",), ["a", "a", "a", "b"], ["", "", "a", "", ""], True),
        (("end", "ending"), ["the ", "end", "ing"], ["the ", "", "", ""], True),
        (("ending", "end"), ["the ending"], ["the ", ""], True),
        (("bc", "abc"), ["xab", "c"], ["x", "", ""], True),
        (("!",), ["ok! and on"], ["ok", ""], True),
        (("끝😀",), ["한", "끝", "😀글"], ["한", "", "", ""], True),
        ((), ["abc", "def"], ["abc", "def", ""], False),
    ],
)
def test_stop_string_across_tokens(
    stops: tuple[str, ...], pieces: list[str], shown: list[str], stopped: bool
) -> None:
    assert _match(stops, pieces) == (shown, stopped)


def test_the_token_that_completes_the_stop_is_the_one_that_reports_it(tokenizer: Tokenizer) -> None:
    detokenizer, matcher = Detokenizer(tokenizer), StopMatcher(("끝",))
    ids = tokenizer.encode("a끝bc")
    stopped_at = next(i for i, token in enumerate(ids) if matcher.push(detokenizer.push([token]))[1])
    assert tokenizer.decode(ids[: stopped_at + 1]) == "a끝"


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
def test_stops_do_not_depend_on_the_cuts_and_hold_back_no_more_than_needed(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    # the slowest honest way: look at every prefix for a stop string that ends it
    ends = [(end, end - len(s)) for end in range(len(text) + 1) for s in stops if text[:end].endswith(s)]
    deltas, stopped = _match(tuple(stops), _pieces(text, sizes))
    assert ("".join(deltas), stopped) == (text[: min(ends)[1]] if ends else text, bool(ends))
    assert stopped or len(deltas[-1]) <= max((len(s) - 1 for s in stops), default=0)


def _split(thinking: bool, pieces: list[str]) -> tuple[str, str, bool]:
    splitter = ReasoningSplitter(thinking)
    reasoning, answer = zip(*[splitter.push(piece) for piece in pieces], strict=True)
    return "".join(reasoning) + splitter.finish(), "".join(answer), splitter.thinking


@pytest.mark.parametrize("sizes", [[1], [3], [5], [99]], ids=str)
@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        (True, "abc</think>def", ("abc", "def", False)),
        (True, "a</thin</think>b</think>c", ("a</thin", "b</think>c", False)),
        (True, "cut inside", ("cut inside", "", True)),
        (True, "cut inside</thi", ("cut inside</thi", "", True)),
        (False, "abc</think>def", ("", "abc</think>def", False)),
    ],
)
def test_reasoning_ends_at_its_closing_tag(
    thinking: bool, text: str, expected: tuple[str, str, bool], sizes: list[int]
) -> None:
    assert _split(thinking, _pieces(text, sizes)) == expected
