"""A key stands for exactly the salt, the tokens it covers and, where asked, the token after them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.keys import KEY_BYTES, KeyChain

TOKENS = list(range(100, 140))


def keys(
    tokens: list[int], block: int = 4, ahead: int = 0, salt: bytes = b"", split: int | None = None
) -> list[bytes]:
    chain = KeyChain(block, ahead, salt)
    chain.extend(tokens[:split], [] if split is None else tokens[split:])
    return list(chain)


def test_a_slice_of_a_chain_has_the_boundaries_above_its_start_up_to_its_end() -> None:
    chain = KeyChain(4, 0)
    chain.extend(TOKENS, [])
    assert chain.between(0, 40) == list(chain)
    assert chain.between(8, 16) == [chain.at(12), chain.at(16)]
    assert chain.between(16, 16) == []


def test_keys_have_at_least_128_bits() -> None:
    assert KEY_BYTES * 8 >= 128
    assert {len(key) for key in keys(TOKENS)} == {KEY_BYTES}


def test_every_key_of_a_chain_differs_also_over_equal_blocks() -> None:
    chain = keys([7] * 4000)
    assert len(set(chain)) == len(chain) == 1000


@pytest.mark.parametrize("position", [0, 3, 4, 17, 39])
def test_one_other_token_changes_its_key_and_all_later_ones(position: int) -> None:
    other = [*TOKENS]
    other[position] += 1
    equal = [a == b for a, b in zip(keys(TOKENS), keys(other), strict=True)]
    assert equal == [True] * (position // 4) + [False] * (10 - position // 4)


def test_a_block_key_depends_on_all_tokens_before_it() -> None:
    assert keys([1, 2, 3, 4, 9, 9, 9, 9])[1] != keys([1, 2, 3, 5, 9, 9, 9, 9])[1]


@pytest.mark.parametrize("other", [b"b", b"", b"a\0", b"\0a", b"aa"])
def test_other_salts_never_share_a_key(other: bytes) -> None:
    assert not set(keys(TOKENS, salt=b"a")) & set(keys(TOKENS, salt=other))


def test_large_token_ids_are_told_apart() -> None:
    assert keys([1, 2, 3, 4]) != keys([1, 2, 3, 4 + (1 << 32)])
    assert keys([1 << 8, 0, 0, 0]) != keys([1, 0, 0, 0])


@pytest.mark.parametrize(
    ("num_tokens", "plain", "ahead"), [(3, 0, 0), (4, 1, 0), (5, 1, 1), (8, 2, 1), (9, 2, 2)]
)
def test_a_key_is_known_with_its_last_token_and_one_later_when_it_looks_ahead(
    num_tokens: int, plain: int, ahead: int
) -> None:
    assert len(keys(TOKENS[:num_tokens])) == plain
    assert len(keys(TOKENS[:num_tokens], ahead=1)) == ahead


def test_a_key_that_looks_ahead_covers_the_next_token_and_no_further() -> None:
    base, next_differs, later_differs = [*range(9)], [*range(8), 50], [*range(9), 50]
    assert keys(base, ahead=1)[:1] == keys(next_differs, ahead=1)[:1]
    assert keys(base, ahead=1)[1] != keys(next_differs, ahead=1)[1]
    assert keys(base, ahead=1) == keys(later_differs, ahead=1)
    assert keys(base)[1] == keys(next_differs)[1]


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(1, 7),
    st.integers(0, 1),
    st.lists(st.integers(0, 40), max_size=6),
)
def test_a_chain_grown_token_by_token_equals_one_made_at_once(
    tokens: list[int], block: int, ahead: int, stops: list[int]
) -> None:
    """Wherever the prompt ends and the output begins, and however often it is asked in between."""
    split = min(stops, default=len(tokens))
    chain = KeyChain(block, ahead)
    for stop in sorted(stops):
        chain.extend(tokens[:split], tokens[split : max(stop, split)])
    chain.extend(tokens[:split], tokens[split:])
    assert list(chain) == keys(tokens, block, ahead)
    assert len(chain) == max(len(tokens) - ahead, 0) // block
    assert all(chain.at((i + 1) * block) == key for i, key in enumerate(chain))


@given(st.lists(st.integers(0, 1), max_size=24), st.lists(st.integers(0, 1), max_size=24), st.integers(0, 1))
def test_equal_keys_mean_equal_covered_tokens(left: list[int], right: list[int], ahead: int) -> None:
    for i, (a, b) in enumerate(zip(keys(left, 3, ahead), keys(right, 3, ahead), strict=False)):
        end = (i + 1) * 3 + ahead
        assert (a == b) == (left[:end] == right[:end])
