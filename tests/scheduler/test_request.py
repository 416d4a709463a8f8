"""A request's known tokens are its prompt followed by its output, wherever a slice of them is cut."""

import pytest

from scheduler.request import Request


@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("end", range(6))
def test_a_slice_may_cross_from_the_prompt_into_the_output(start: int, end: int) -> None:
    request = Request(0, [10, 11, 12], max_tokens=4, output=[20, 21])
    assert request.tokens(start, end) == (10, 11, 12, 20, 21)[start:end]


def test_limits_count_prompt_and_output() -> None:
    request = Request(0, [10, 11, 12], max_tokens=4, output=[20])
    assert (request.num_known_tokens, request.max_known_tokens) == (4, 7)
