"""Every step progresses within the budget, in order of arrival; what a request held comes back at its end."""

import pytest

from scheduler.plan import StepResult
from scheduler.request import Request
from scheduler.scheduler import RequestRefused
from tests.scheduler.simulation import Simulation, assert_right, engine, prompt, reference, sizes


def loop(budget: int = 16, pages: int = 32, slots: int = 12, **options: object) -> Simulation:
    """Blocks of 16, and by default more slots than anybody wants."""
    return Simulation(engine("ours", 16, budget, pages=pages, slots=slots, **options))  # type: ignore[arg-type]


class TestOrder:
    """Decodes, then running prefills, then arrivals, in order."""

    def test_decode_rows_and_prefill_chunks_share_the_budget(self) -> None:
        run = loop(budget=32)
        for seed, (length, tokens) in enumerate([(20, 3), (80, 2), (10, 4)]):
            run.add(prompt(length, seed), tokens)
        steps = [sizes(plan) for plan in run.drain()]
        assert steps == [
            {0: 20},  # 12 tokens are less than one step of the export grid
            {0: 1, 1: 16, 2: 10},
            {0: 1, 2: 1, 1: 16},
            {2: 1, 1: 16},
            {2: 1, 1: 16},
            {1: 16},
            {1: 1},
        ]
        assert [len(request.output) for request in run.requests.values()] == [3, 2, 4]
        assert_right(run)

    def test_a_small_request_does_not_overtake_one_that_waits_for_pages(self) -> None:
        run = loop(budget=64, pages=4)
        for seed, length in enumerate((40, 20, 2)):
            run.add(prompt(length, seed), 8)
        plan = run.step()
        assert sizes(plan) == {0: 40}
        assert plan.waits == {1: "waits for pages", 2: "waits behind request 1"}
        assert not any(2 in step and 1 not in step and 0 in step for step in map(sizes, run.drain()))
        assert_right(run)

    def test_more_requests_than_may_run_wait_their_turn_with_a_reason(self) -> None:
        run = loop(running=2)
        for seed in range(3):
            run.add(prompt(3, seed), 2)
        plan = run.step()
        assert sizes(plan) == {0: 3, 1: 3} and plan.waits == {2: "waits: 2 of 2 are running"}
        assert [sizes(p) for p in run.drain()] == [{0: 1, 1: 1}, {2: 3}, {2: 1}]

    def test_a_request_waits_for_a_slot_with_a_reason(self) -> None:
        run = loop(slots=2)
        for seed in range(3):
            run.add(prompt(3, seed), 2)
        assert run.step().waits == {2: "waits for a slot: 2 of 2 in use"}
        run.drain()
        assert_right(run)

    def test_more_decodes_than_tokens_in_a_step_still_end(self) -> None:
        run = loop(budget=2)
        for seed in range(4):
            run.add(prompt(1, seed), 6)
        run.drain()
        assert_right(run)

    def test_a_boundary_without_a_slot_is_struck_and_the_reason_says_so(self) -> None:
        run = loop(budget=64, slots=1)
        run.add(prompt(40), 1)
        (chunk,) = run.step().chunks
        assert chunk.exports == () and chunk.reason == "end of prompt; no slot for 32: 1 of 1 in use"

    def test_an_exported_prompt_says_that_the_tail_joined(self) -> None:
        run = loop(budget=64)
        run.add(prompt(40), 1)
        (chunk,) = run.step().chunks
        assert (chunk.reason, [m for m, *_ in chunk.exports], chunk.publishes) == ("tail joined", [32], (32,))


class TestPreemption:
    """The youngest goes first, to the front of the queue, and loses nothing that was promised."""

    def test_the_youngest_makes_room_and_comes_back_first(self) -> None:
        run = loop(budget=64, pages=6)
        for seed in range(3):
            run.add(prompt(30, seed), 40 if seed == 0 else 6)
        run.add(prompt(4, 4), 6)
        while not run.scheduler.num_preemptions:
            run.step()
        assert [r.request_id for r in run.scheduler.running] == [0, 1]
        assert [r.request_id for r in run.scheduler.waiting] == [2, 3]
        run.drain()
        assert_right(run)

    def test_two_that_are_preempted_at_once_keep_their_order(self) -> None:
        run = loop(budget=256, pages=5)
        old = run.add(prompt(14), 64)
        for seed in (1, 2):
            run.add(prompt(30, seed), 2)
        run.step()
        assert len(run.scheduler.running) == 3
        for request in (*run.scheduler.running[:0:-1],):
            run.preempt(request)
        assert [r.request_id for r in run.scheduler.waiting] == [1, 2]
        run.drain()
        assert len(old.output) == 64
        assert_right(run)

    def test_the_youngest_itself_waits_when_it_is_the_one_without_pages(self) -> None:
        run = loop(budget=64, pages=4)
        run.add(prompt(30, 0), 18), run.add(prompt(31, 1), 10)
        for _ in range(3):
            plan = run.step()
        assert sizes(plan) == {0: 1} and plan.waits == {1: "waits for pages"}
        assert run.scheduler.waiting[0].request_id == 1
        run.drain()
        assert_right(run)

    @pytest.mark.parametrize("after", range(15))
    def test_any_step_is_a_good_moment(self, after: int) -> None:
        run = loop(budget=16)
        request = run.add(prompt(90), 8)
        for _ in range(after):
            run.step()
        reached = request.num_computed_tokens
        if request.status == "running":
            run.preempt(request)
            plan = run.step()
            assert plan.chunks[0].start == reached // 16 * 16
            assert not any(
                chunk.samples and chunk.end < request.num_known_tokens - 1 for chunk in plan.chunks
            )
        run.drain()
        assert request.output == reference(prompt(90), 8)

    def test_a_step_that_preempts_admits_nobody(self) -> None:
        run = loop(budget=64, pages=4)
        run.add(prompt(30, 0), 18), run.add(prompt(31, 1), 10), run.add(prompt(1, 2), 1)
        before = run.scheduler.num_preemptions
        while run.scheduler.num_preemptions == before:
            plan = run.step()
        assert not any(chunk.admitted for chunk in plan.chunks)


class TestRefusedAtAdmission:
    """What can never run is refused with its numbers, and leaves nothing behind."""

    @pytest.mark.parametrize(
        ("length", "tokens", "numbers"),
        [
            (0, 4, ["empty", "at least one"]),
            (64, 1, ["64 tokens", "holds 64", "shorten"]),
            (100, 1, ["100 tokens", "holds 64", "shorten"]),
            (40, 20, ["60 tokens", "4 blocks of 16", "has 3", "larger cache"]),
        ],
    )
    def test_with_numbers(self, length: int, tokens: int, numbers: list[str]) -> None:
        run = loop(pages=3, context=64)
        with pytest.raises(RequestRefused) as refusal:
            run.add(prompt(length), tokens)
        assert all(number in str(refusal.value) for number in numbers)
        assert not run.scheduler.has_work

    def test_a_pool_for_exactly_one_request(self) -> None:
        run = loop(pages=3)
        run.add(prompt(40), 8), run.add(prompt(40, 1), 8)
        with pytest.raises(RequestRefused):
            run.add(prompt(40), 9)
        run.drain()
        assert_right(run)

    def test_a_scored_prompt_may_fill_the_context(self) -> None:
        run = loop(context=64, budget=40)
        request = run.add(prompt(64), 4, score_prompt=True)
        assert request.max_tokens == 0
        targets = [chunk.targets for plan in run.drain() for chunk in plan.chunks]
        assert targets == [tuple(range(1, 33)), tuple(range(33, 64))]
        assert request.output == [] and request.status == "finished"


@pytest.mark.parametrize("slots", range(1, 9))
@pytest.mark.parametrize("shared", [0, 40])
def test_every_pool_of_slots_serves_everybody(slots: int, shared: int) -> None:
    run = loop(budget=48, slots=slots, pages=60)
    for seed in range(5):
        run.add([*prompt(shared), *prompt(60, seed + 1)], 20)
    run.drain()
    run.add(prompt(60, 1), 20)
    run.drain()
    assert_right(run)


@pytest.mark.parametrize("reason", ["stop", "length", "error"])
def test_a_request_ends_for_each_reason_and_the_others_go_on(reason: str) -> None:
    run = loop()
    stop_ids = frozenset(reference(prompt(4), 3)[2:] if reason == "stop" else [])
    request = run.add(prompt(4), 3 if reason == "length" else 8, stop_ids=stop_ids)
    other = run.add([9], 9)
    run.step()
    if reason == "error":
        run.errors = {request.request_id: "broken"}
        advances = run.commit(run.schedule())
        assert [(a.finish_reason, a.message) for a in advances] == [("error", "broken"), (None, None)]
    run.drain()
    assert len(request.output) == {"stop": 2, "length": 3, "error": 1}[reason]
    assert (request.status, other.output) == ("finished", reference([9], 9))
    assert_right(run)


def test_a_plan_names_the_requests_that_left() -> None:
    run = loop()
    run.add(prompt(4), 1), run.add(prompt(4, 1), 3)
    assert run.step().released == ()
    assert [run.step().released for _ in range(2)] == [(0,), ()]
    assert run.scheduler.schedule().released == (1,)


@pytest.mark.parametrize("debug", [False, True])
def test_debug_checks_the_accounts_after_every_commit(debug: bool) -> None:
    scheduler = engine("ours", 16)
    scheduler.debug = debug
    scheduler.add(Request(0, prompt(20), 4))
    plan = scheduler.schedule()
    scheduler.blocks.slots.allocate()  # lost
    if debug:
        with pytest.raises(AssertionError):
            scheduler.commit(plan, StepResult({0: (1,)}))
    else:
        scheduler.commit(plan, StepResult({0: (1,)}))


def test_a_commit_passes_over_what_left_since() -> None:
    run = loop()
    request = run.add(prompt(4), 3)
    plan = run.schedule()
    run.preempt(request)
    assert run.scheduler.commit(plan, StepResult({0: (1,)})) == [] and request.output == []
    run.drain()
    assert isinstance(request, Request) and request.output == reference(prompt(4), 3)


def test_a_step_that_was_never_committed_is_taken_back() -> None:
    """Its forward raised after it had written: no place stays reserved, and the order of arrival is kept."""
    run = loop()
    requests = [run.add(prompt(50, seed), 3) for seed in range(3)]
    run.step(), run.step()
    for _ in range(3):
        plan = run.schedule()
        for chunk in plan.chunks:
            run.forward(requests[chunk.request_id], chunk)
    assert sum(len(r.reserved) for r in requests) == sum(len(chunk.exports) for chunk in plan.chunks)
    assert [r.request_id for r in (*run.scheduler.running, *run.scheduler.waiting)] == [0, 1, 2]
    run.commit(plan)
    run.drain()
    assert [request.output for request in requests] == [reference(r.prompt, 3) for r in requests]
