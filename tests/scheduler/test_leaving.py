"""Whoever leaves, at whatever moment and for whatever reason, leaves its newest checkpoint and nothing else."""

import pytest

from scheduler.request import Request
from tests.scheduler.simulation import DRAFTER, Simulation, engine, published, reference, sizes

PROMPT = list(range(100))


def loop(
    preset: str = "ours", budget: int = 16, pages: int = 64, slots: int = 12, **options: object
) -> Simulation:
    return Simulation(engine(preset, 16, budget, pages=pages, slots=slots, **options))  # type: ignore[arg-type]


def in_use(run: Simulation) -> list[int]:
    """Places that somebody holds, by pool."""
    pools = (*run.blocks.groups, run.blocks.slots, run.blocks.companions)
    return [pool.size - pool.num_available for pool in pools if pool is not None]


class TestCancel:
    """Field bug G1: a leaked chunk and three leaked slots, a token after the cancel, later requests that stall."""

    @pytest.mark.parametrize("drafter", [DRAFTER, None])
    @pytest.mark.parametrize("steps", [0, 1, 3, 6, 7, 9], ids=str)
    def test_between_steps(self, steps: int, drafter: str | None) -> None:
        """While waiting, in prefill, at its end, in decode."""
        run = loop(drafter=drafter)
        request = run.add(PROMPT, 8)
        for _ in range(steps):
            run.step()
        self.cancel_twice_and_drain(run)
        assert in_use(run) == [0] * len(in_use(run))
        assert run.run(PROMPT, 8).output == reference(PROMPT, 8)
        assert request.output == reference(PROMPT, 8)[: len(request.output)]

    @pytest.mark.parametrize("step", range(1, 12))
    @pytest.mark.parametrize("again", ["finish", "preempt"])
    def test_between_launch_and_commit(self, step: int, again: str) -> None:
        run = loop(budget=32)
        request, other = run.add(PROMPT, 8), run.add(PROMPT[:50], 20)
        for _ in range(step - 1):
            run.step()
        plan, known, computed = run.schedule(), request.num_known_tokens, request.num_computed_tokens
        held = set(run.blocks.slots._place_of)
        getattr(run, again)(request)
        if again == "finish":
            run.finish(request)
        assert all(advance.request is not request for advance in run.commit(plan))
        assert request.num_known_tokens == known
        new = set(run.blocks.slots._place_of) - held
        own = {key: (i + 1) * 16 for i, key in enumerate(request.keys or ())}
        assert all(own.get(key, 0) <= computed for key in new)  # nothing of the forward that was under way
        run.drain()
        assert in_use(run) == [0, 0, 0, 0]
        assert other.output == reference(PROMPT[:50], 20)
        if again == "preempt":
            assert request.output == reference(PROMPT, 8)

    def test_after_its_end(self) -> None:
        run = loop()
        run.run(PROMPT, 2)
        self.cancel_twice_and_drain(run)

    def test_shared_blocks_stay_with_the_other(self) -> None:
        run = loop(budget=128)
        run.run(PROMPT)
        first, second = run.add([*PROMPT, 1], 9), run.add([*PROMPT, 2], 9)
        run.step(), run.step()
        assert first.tables[0][:6] == second.tables[0][:6]
        run.finish(first)
        run.drain()
        assert second.output == reference([*PROMPT, 2], 9)

    @staticmethod
    def cancel_twice_and_drain(run: Simulation) -> None:
        for _ in range(2):
            run.finish(run.requests[0])
        assert all(0 not in sizes(plan) for plan in run.drain())


@pytest.mark.parametrize("how", ["preempt", "finish"])
@pytest.mark.parametrize("computed", [16, 32, 48, 96, 100, 103, 112, 115, 130])
def test_the_newest_boundary_is_left_behind(how: str, computed: int) -> None:
    """In prefill, at its end, and in decode; under `ours` less than a block is lost."""
    run = loop()
    request = run.add(PROMPT, 64)
    while request.num_computed_tokens < computed:
        run.step()
    known = request.num_known_tokens
    getattr(run, how)(request)
    if how == "finish":
        run.add([*request.prompt, *request.output], 1)
    start = run.step().chunks[0].start
    assert start == min(computed, known - 1) // 16 * 16


def test_a_rolling_checkpoint_is_found_by_nobody_while_its_owner_runs() -> None:
    run = loop()
    request = run.add(PROMPT, 64)
    for _ in range(3):
        run.step()
    assert request.rolling is not None and request.rolling.position == 48
    assert published(run, request) == []
    for _ in range(4):
        run.step()
    assert (request.rolling, published(run, request)) == (None, [96])
    while request.num_computed_tokens < 112:
        assert request.rolling is None
        run.step()
    assert (request.rolling.position, published(run, request)) == (112, [96])


def test_without_a_slot_for_the_next_a_rolling_checkpoint_stays_where_it_was() -> None:
    run = loop(slots=2)
    request = run.add(PROMPT, 8)
    reasons = [run.step().chunks[0].reason for _ in range(3)]
    assert reasons == ["budget", *(f"budget; no slot for {m}: 2 of 2 in use" for m in (32, 48))]
    assert request.rolling is not None and request.rolling.position == 16
    run.finish(request)
    assert published(run, request) == [16, 48]  # the running slot itself is the checkpoint at 48


@pytest.mark.parametrize("known", range(128, 147))
def test_a_replay_keeps_the_boundary_above_the_prompt_when_it_completes(known: int) -> None:
    """The replay's last chunk may end in the block in which the one before it ended."""
    run = loop(budget=64)
    request = run.add(PROMPT[:20], 200)
    while request.num_known_tokens < known:
        run.step()
    run.preempt(request)
    run.blocks.reset_cache(run.scheduler.running)
    while request.num_known_tokens == known:
        run.step()
    assert request.rolling is not None and request.rolling.position == known // 16 * 16
    run.finish(request)
    assert run.run([*request.prompt, *request.output]).num_cached_tokens == known // 16 * 16


@pytest.mark.parametrize("preset", ["generic", "seed", "vllm-0.33", "ours", "none"])
@pytest.mark.parametrize("after", [0, 2, 5, 8, 12])
@pytest.mark.parametrize("in_flight", [False, True])
def test_clearing_the_cache_changes_no_token(preset: str, after: int, in_flight: bool) -> None:
    """In prefill and in decode, with a hit whose copy is not made yet, and between launch and commit."""
    run = loop(preset)
    run.run(PROMPT)
    requests = [run.add([*PROMPT, 7], 20), run.add(PROMPT[:40], 20)]
    for _ in range(after):
        run.step()
    plan = run.schedule() if in_flight else None
    run.blocks.reset_cache(run.scheduler.running)
    assert all(request.rolling is None for request in requests)
    if plan is not None:
        run.commit(plan)
    run.drain()
    assert [r.output for r in requests] == [reference(r.prompt, 20) for r in requests]
    assert in_use(run) == [0, 0, 0, 0]


class TestSiblings:
    """What a step has yet to write is not there."""

    @pytest.mark.parametrize("preset", ["generic", "seed", "vllm-0.33", "ours"])
    def test_equal_prompts_in_one_step_all_run_cold(self, preset: str) -> None:
        run = loop(preset, budget=512)
        requests = [run.add(PROMPT, 4) for _ in range(4)]
        run.drain()
        assert [request.num_cached_tokens for request in requests] == [0] * 4
        assert all(request.output == reference(PROMPT, 4) for request in requests)
        assert run.blocks.groups[0].num_duplicate_publications >= 3 * 5

    def test_one_step_later_they_hit(self) -> None:
        run = loop(budget=100)
        requests = [run.add(PROMPT, 4) for _ in range(4)]
        run.drain()
        assert [request.num_cached_tokens for request in requests] == [0, 96, 96, 96]

    def test_two_hits_of_one_checkpoint_diverge_without_influence(self) -> None:
        run = loop(budget=512)
        run.run(PROMPT)
        prompts = [[*PROMPT, seed, seed, seed] for seed in (1, 2, 3)]
        requests = [run.add(prompt, 20) for prompt in prompts]
        run.drain()
        assert [request.num_cached_tokens for request in requests] == [96] * 3
        assert [request.output for request in requests] == [reference(prompt, 20) for prompt in prompts]


def test_other_salts_share_nothing_though_their_tokens_are_equal() -> None:
    run = loop(budget=512)
    assert [run.run(PROMPT, 2, salt=salt).num_cached_tokens for salt in (b"a", b"b", b"a", b"")] == [
        0,
        0,
        96,
        0,
    ]
    assert run.requests[1].output == reference(PROMPT, 2, b"b")


def test_a_failed_forward_publishes_nothing_and_earlier_ones_stay() -> None:
    """Logits that cannot be sampled may come from a state that nobody should find."""
    run = loop(budget=64)
    request = run.add(PROMPT, 4)
    run.step()
    run.errors = {request.request_id: "not a number"}
    (advance,) = run.commit(run.schedule())
    assert advance.finish_reason == "error" and in_use(run) == [0, 0, 0, 0]
    assert published(run, request) == [64]
    assert run.run(PROMPT).num_cached_tokens == 64


def crowded(**options: object) -> tuple[Simulation, Request]:
    """Two requests and two slots: none is left for a checkpoint."""
    run = loop(budget=17, slots=2, **options)
    run.add([7], 200)
    run.step()
    return run, run.add(PROMPT, 64)


@pytest.mark.parametrize("how", ["preempt", "finish"])
@pytest.mark.parametrize("steps", [1, 3, 6, 7, 19, 20, 35])
def test_a_running_slot_on_a_boundary_is_handed_over_without_a_copy(how: str, steps: int) -> None:
    """In prefill and in decode, when no slot was free for a checkpoint."""
    run, request = crowded()
    for _ in range(steps):
        run.step()
    computed, slot = request.num_computed_tokens, request.recurrent_slot
    assert request.rolling is None and slot is not None
    getattr(run, how)(request)
    assert published(run, request) == ([computed] if computed % 16 == 0 else [])
    assert [*run.blocks.slots._idle] == ([slot] if computed % 16 == 0 else [])
    if how == "preempt":
        run.finish(run.requests[0])  # a resume reads one slot and writes another
        assert run.step().chunks[0].start == (computed if computed % 16 == 0 else 0)
    run.drain()
    assert all(r.output == reference(r.prompt, len(r.output)) for r in run.requests.values())


@pytest.mark.parametrize(("retain", "handed"), [("progress", [32]), ("decode", []), ("resend", []), ("", [])])
def test_a_running_slot_is_handed_over_only_as_retention_promises(retain: str, handed: list[int]) -> None:
    run, request = crowded(retain=[retain] if retain else [])
    run.step(), run.step()
    run.preempt(request)
    assert published(run, request) == handed


@pytest.mark.parametrize("fails", [False, True])
def test_a_running_slot_that_a_forward_may_have_written_is_nobodys(fails: bool) -> None:
    """Cancelled between launch and commit, or failed: the slot is at another position, or broken."""
    run, request = crowded()
    run.step(), run.step()
    plan = run.schedule()
    if fails:
        run.errors = {request.request_id: "broken"}
        run.commit(plan)
    else:
        run.finish(request)
    assert published(run, request) == []
    run.blocks.check(run.scheduler.running)


def test_a_pool_of_one_slot_hands_nothing_over() -> None:
    """A hit would have to read the slot and write it, and wait for another for ever."""
    run = loop(slots=1)
    request = run.add(PROMPT, 8)
    run.step()
    run.preempt(request)
    run.drain()
    assert request.output == reference(PROMPT, 8)


@pytest.mark.parametrize("filing", ["token", "drop", "key", "tag", "off"])
def test_after_a_reset_later_blocks_are_findable_again(filing: str) -> None:
    run = loop(filing=filing)
    request = run.add(PROMPT, 8)
    for _ in range(3):
        run.step()
    run.blocks.reset_cache(run.scheduler.running)
    assert run.blocks.groups[0].num_keyed == 0
    run.drain()
    assert request.output == reference(PROMPT, 8)
    longer = run.run([*PROMPT, *request.output, 5], 4)
    assert longer.num_cached_tokens == (80 if filing == "drop" else 96)


@pytest.mark.parametrize("stop", [48, 96, 144])
def test_a_resume_is_a_chunk_boundary(stop: int) -> None:
    """Preempted at a boundary: tokens, chunks and published boundaries of a run whose chunk ended there."""
    outcomes = []
    for preempted in (False, True):
        run = loop(budget=48)
        request, chunks = run.add(list(range(200)), 4), []
        while run.scheduler.has_work:
            chunks += [(chunk.start, chunk.end, chunk.publishes) for chunk in run.step().chunks]
            if preempted and request.num_computed_tokens == stop:
                run.preempt(request)
                preempted = False
        outcomes.append((request.output, chunks, set(published(run, request)) - {stop}))
    assert outcomes[0] == outcomes[1]
