"""Every step progresses within the budget, in order of arrival; what a request held comes back at its end."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from scheduler.block_manager import BlockManager
from scheduler.plan import StepPlan, StepResult
from scheduler.request import FinishReason, Request
from scheduler.scheduler import Advance, RequestRefused, Scheduler

STOP = 99


class Loop:
    """A scheduler under a model that samples 100, 101, ... per request; every step is checked."""

    def __init__(self, budget: int = 16, num_blocks: int = 16, slots: int = 3, context: int = 256) -> None:
        self.blocks = BlockManager(num_blocks, 16, slots)
        self.scheduler = Scheduler(self.blocks, budget, context)
        self.requests: list[Request] = []
        self.pages: dict[int, int] = {}
        self.ended: list[int] = []

    def add(self, prompt_tokens: int, max_tokens: int, stop_ids: Sequence[int] = ()) -> Request:
        prompt = list(range(prompt_tokens))
        request = Request(len(self.requests), prompt, max_tokens, frozenset(stop_ids))
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def schedule(self) -> StepPlan:
        """One plan, every chunk checked against the request's own account."""
        had_work = self.scheduler.has_work
        plan = self.scheduler.schedule()
        assert bool(plan.chunks) == had_work
        assert plan.num_tokens <= self.scheduler.max_batched_tokens
        for chunk in plan.chunks:
            request = self.requests[chunk.request_id]
            assert chunk.start == request.num_computed_tokens < chunk.end
            assert chunk.token_ids == request.tokens(chunk.start, chunk.end)
            assert chunk.samples == (chunk.end == request.num_known_tokens)
            self.pages[chunk.request_id] = self.pages.get(chunk.request_id, 0) + len(chunk.new_blocks)
            assert chunk.end <= 16 * self.pages[chunk.request_id]
        slots = [chunk.recurrent_slot for chunk in plan.chunks]
        assert len(set(slots)) == len(slots)
        return plan

    def commit(self, plan: StepPlan, errors: dict[int, str] | None = None) -> list[Advance]:
        tokens = {
            c.request_id: 100 + len(self.requests[c.request_id].output) for c in plan.chunks if c.samples
        }
        advances = self.scheduler.commit(plan, StepResult(tokens, errors or {}))
        self.ended += [a.request.request_id for a in advances if a.finish_reason]
        self.blocks.check(self.scheduler.running)
        return advances

    def step(self) -> StepPlan:
        plan = self.schedule()
        self.commit(plan)
        return plan

    def drain(self) -> list[StepPlan]:
        plans = []
        while self.scheduler.has_work:
            plans.append(self.step())
        return plans

    def assert_all_free(self) -> None:
        assert self.blocks.num_free_blocks == self.blocks.num_blocks
        assert self.blocks.num_free_slots == self.blocks.num_slots
        self.blocks.check([])


def sizes(plan: StepPlan) -> dict[int, int]:
    """Tokens of the step by request."""
    return {chunk.request_id: len(chunk.token_ids) for chunk in plan.chunks}


def test_decode_rows_and_prefill_chunks_share_the_budget() -> None:
    """Three requests, unequal lengths, several chunks, one finishing early; the order is that of arrival."""
    loop = Loop()
    loop.add(10, 3), loop.add(40, 2), loop.add(5, 4)
    plans = loop.drain()
    assert [sizes(plan) for plan in plans] == [
        {0: 10, 1: 6},
        {0: 1, 1: 15},
        {0: 1, 1: 15},
        {1: 4, 2: 5},
        {1: 1, 2: 1},
        {2: 1},
        {2: 1},
    ]
    assert [(r.output, r.finish_reason) for r in loop.requests] == [
        ([100, 101, 102], "length"),
        ([100, 101], "length"),
        ([100, 101, 102, 103], "length"),
    ]
    loop.assert_all_free()


def test_a_small_request_does_not_overtake_one_that_waits_for_pages() -> None:
    loop = Loop(budget=64, num_blocks=4)
    loop.add(40, 8), loop.add(20, 8), loop.add(2, 2)
    steps = [sizes(plan) for plan in loop.drain()]
    assert steps[0] == {0: 40}  # 3 of 4 pages; the second needs 2, the third would fit
    assert not any(0 in step and 2 in step for step in steps)
    assert loop.ended == [0, 2, 1]
    loop.assert_all_free()


def test_more_requests_than_slots_wait_their_turn() -> None:
    loop = Loop(slots=2)
    for _ in range(5):
        loop.add(3, 2)
    loop.drain()
    assert loop.ended == [0, 1, 2, 3, 4]


def test_more_requests_than_tokens_in_a_step_still_end() -> None:
    loop = Loop(budget=2)
    for _ in range(3):
        loop.add(1, 6)
    loop.drain()
    assert sorted(loop.ended) == [0, 1, 2]


def test_a_stop_id_ends_a_request_and_is_not_delivered() -> None:
    loop = Loop()
    request = loop.add(4, 8, stop_ids=[102, STOP])
    loop.drain()
    assert (request.output, request.finish_reason) == ([100, 101], "stop")


def test_an_error_ends_one_request_and_the_others_go_on() -> None:
    loop = Loop()
    bad, good = loop.add(4, 3), loop.add(4, 3)
    advances = loop.commit(loop.schedule(), errors={bad.request_id: "broken"})
    assert [(a.finish_reason, a.message) for a in advances] == [("error", "broken"), (None, None)]
    loop.drain()
    assert (bad.output, bad.finish_reason, good.output) == ([], "error", [100, 101, 102])
    loop.assert_all_free()


def test_a_plan_names_the_requests_that_left() -> None:
    loop = Loop()
    loop.add(4, 1), loop.add(4, 3)
    assert loop.step().released == ()
    assert loop.step().released == (0,)
    assert loop.step().released == ()


class TestRefusedAtAdmission:
    """What can never run is refused with its numbers, and leaves nothing behind."""

    @pytest.mark.parametrize(
        ("prompt_tokens", "max_tokens", "numbers"),
        [
            (0, 4, ["empty", "at least one"]),
            (64, 1, ["64 tokens", "holds 64", "shorten"]),
            (100, 1, ["100 tokens", "holds 64", "shorten"]),
            (40, 20, ["60 tokens", "4 blocks of 16", "has 3", "larger cache"]),
        ],
    )
    def test_with_numbers(self, prompt_tokens: int, max_tokens: int, numbers: list[str]) -> None:
        loop = Loop(num_blocks=3, context=64)
        with pytest.raises(RequestRefused) as refusal:
            loop.add(prompt_tokens, max_tokens)
        assert all(number in str(refusal.value) for number in numbers)
        assert not loop.scheduler.has_work
        loop.assert_all_free()

    def test_a_pool_for_exactly_one_request(self) -> None:
        loop = Loop(num_blocks=3)
        loop.add(40, 8), loop.add(40, 8)
        with pytest.raises(RequestRefused):
            loop.add(40, 9)
        loop.drain()
        assert loop.ended == [0, 1]


@pytest.mark.parametrize("limit", [61, 64])
@pytest.mark.parametrize("prompt_tokens", range(57, 65))
def test_prompt_and_output_end_exactly_at_the_context_limit(limit: int, prompt_tokens: int) -> None:
    """Field bug E8, without drafts: the pool ends where the context ends."""
    loop = Loop(num_blocks=4, context=limit)
    if prompt_tokens >= limit:
        with pytest.raises(RequestRefused):
            loop.add(prompt_tokens, 1000)
        return
    request = loop.add(prompt_tokens, 1000)
    plans = loop.drain()
    assert (request.finish_reason, request.num_known_tokens) == ("length", limit)
    assert max(chunk.end for plan in plans for chunk in plan.chunks) < limit  # the last token is never run


class TestCancel:
    """Field bug G1: cancelled at any moment, everything is free again and no token follows."""

    @pytest.mark.parametrize(
        "steps", [0, 1, 3, 4, 6], ids=["waiting", "chunk 1 of 4", "chunk 3", "last", "decode"]
    )
    def test_between_steps(self, steps: int) -> None:
        loop = Loop()
        request = loop.add(60, 8)
        for _ in range(steps):
            loop.step()
        self.cancel_and_drain(loop, request)
        assert request.finish_reason == "cancelled"

    @pytest.mark.parametrize("step", [1, 4, 6], ids=["chunk 1 of 4", "last chunk", "decode"])
    def test_between_launch_and_commit(self, step: int) -> None:
        loop = Loop()
        request, other = loop.add(60, 8), loop.add(4, 2)
        for _ in range(step - 1):
            loop.step()
        plan, known = loop.schedule(), request.num_known_tokens
        loop.scheduler.finish(request, "cancelled")
        assert all(advance.request is not request for advance in loop.commit(plan))
        assert request.num_known_tokens == known
        self.cancel_and_drain(loop, request)
        assert (request.finish_reason, other.finish_reason) == ("cancelled", "length")

    def test_after_the_end_the_first_reason_stays(self) -> None:
        loop = Loop()
        request = loop.add(4, 2)
        loop.drain()
        self.cancel_and_drain(loop, request)
        assert request.finish_reason == "length"

    @staticmethod
    def cancel_and_drain(loop: Loop, request: Request) -> None:
        """Cancel twice; afterwards nothing runs for the request and nothing is held."""
        for _ in range(2):
            loop.scheduler.finish(request, "cancelled")
        loop.blocks.check(loop.scheduler.running)
        assert all(request.request_id not in sizes(plan) for plan in loop.drain())
        loop.assert_all_free()


def test_a_scored_prompt_gets_a_target_for_every_row_but_the_last_and_samples_nothing() -> None:
    loop = Loop()
    request = Request(0, list(range(20)), 0, score_prompt=True)
    loop.scheduler.add(request)
    plans = []
    while loop.scheduler.has_work:
        plans.append(loop.scheduler.schedule())
        loop.scheduler.commit(plans[-1], StepResult())
    assert [chunk.targets for plan in plans for chunk in plan.chunks] == [tuple(range(1, 17)), (17, 18, 19)]
    assert not any(chunk.samples for plan in plans for chunk in plan.chunks)
    assert request.finish_reason == "length"


class Machine(RuleBasedStateMachine):
    """Any order of additions, steps and endings keeps the accounts, and every request ends."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = Loop(budget=8, num_blocks=5, slots=2, context=64)

    @rule(
        prompt_tokens=st.integers(0, 70),
        max_tokens=st.integers(1, 20),
        stop=st.sampled_from([100, 103, STOP]),
    )
    def add(self, prompt_tokens: int, max_tokens: int, stop: int) -> None:
        try:
            self.loop.add(prompt_tokens, max_tokens, [stop])
        except RequestRefused:
            assert prompt_tokens == 0 or prompt_tokens >= 64

    @rule()
    def step(self) -> None:
        self.loop.step()

    @rule(data=st.data(), reason=st.sampled_from(["cancelled", "stop", "error"]))
    def end(self, data: st.DataObject, reason: FinishReason) -> None:
        if self.loop.requests:
            self.loop.scheduler.finish(data.draw(st.sampled_from(self.loop.requests)), reason)

    @rule(data=st.data())
    def end_during_a_step(self, data: st.DataObject) -> None:
        plan = self.loop.schedule()
        self.end(data, "cancelled")
        self.loop.commit(plan)

    @invariant()
    def accounts_hold(self) -> None:
        self.loop.blocks.check(self.loop.scheduler.running)

    def teardown(self) -> None:
        plans = self.loop.drain()
        # Each step runs at least one token, and no token twice.
        assert len(plans) <= sum(r.max_known_tokens for r in self.loop.requests)
        assert all(request.status == "finished" for request in self.loop.requests)
        self.loop.assert_all_free()


TestMachine: Callable[..., object] = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)  # type: ignore[attr-defined]
