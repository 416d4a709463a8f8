"""Who cannot enter a step changes nothing and is told why: no eviction, no reference, no age, and always a reason."""

from collections.abc import Callable

import pytest

from scheduler.checkpoint_policy import Reuse
from scheduler.plan import StepPlan
from scheduler.request import Request
from tests.scheduler.simulation import Simulation, engine, prompt, reference, sizes


def loop(budget: int = 256, pages: int = 32, slots: int = 12, **options: object) -> Simulation:
    return Simulation(engine("ours", 16, budget, pages=pages, slots=slots, **options))  # type: ignore[arg-type]


def places(run: Simulation) -> list[object]:
    """All that an operation could change: what is free, idle (oldest first), referenced and keyed, by pool."""
    blocks = run.blocks
    return [
        [[*pool._free], [*pool._idle], dict(pool._references), dict(pool._key_of), pool.num_evictions]
        for pool in (*blocks.groups, blocks.slots, blocks.companions)
        if pool is not None
    ]


def lacking_pages() -> tuple[Simulation, list[int]]:
    """The newcomer hits 32 tokens and needs 4 pages more; there are 3, all of them cached."""
    run = loop(pages=12)
    run.run(prompt(33)), run.run(prompt(40, 1))
    run.add(prompt(100, 2), 12)
    run.step()
    return run, [*prompt(32), *prompt(64, 3)]


def lacking_slots() -> tuple[Simulation, list[int]]:
    """The hit's checkpoint is the only slot that is not in use, and the copy needs one more."""
    run = loop(slots=3)
    run.run(prompt(33))
    for seed in (1, 2):
        run.add(prompt(3, seed), 9)
    run.step()
    return run, prompt(40)


def lacking_tokens() -> tuple[Simulation, list[int]]:
    """What the prompt before it leaves is less than a step of the export grid."""
    run = loop(budget=40)
    run.run(prompt(33))
    run.add(prompt(28, 1), 9)
    return run, prompt(60)


@pytest.mark.parametrize("lacking", [lacking_pages, lacking_slots, lacking_tokens])
def test_a_failed_admission_changes_nothing(lacking: Callable[[], tuple[Simulation, list[int]]]) -> None:
    """Compared with the same step without the newcomer."""
    (run, tokens), (alone, _) = lacking(), lacking()
    newcomer = run.add(tokens, 2)
    plan = run.schedule()
    assert newcomer.request_id in plan.waits
    assert plan.chunks == alone.schedule().chunks
    assert places(run) == places(alone)
    assert (newcomer.tables, newcomer.recurrent_slot, newcomer.num_computed_tokens) == ([], None, 0)
    run.commit(plan)
    run.drain()
    assert newcomer.status == "finished"


@pytest.mark.parametrize("slots", [3, 4, 5])
def test_private_checkpoints_of_others_keep_nobody_waiting(slots: int) -> None:
    """Three may run, and each would hold a rolling checkpoint while it generates."""
    run = loop(slots=slots, running=3, budget=64)
    for seed in range(3):
        run.add(prompt(20, seed), 100)
        for _ in range(20):
            run.step()
        assert len(run.scheduler.running) == seed + 1
    requests = run.scheduler.running
    assert [bool(r.rolling) for r in requests] == [rank < slots - 3 for rank in range(3)]
    run.drain()
    assert all(r.output == reference(r.prompt, 100) for r in run.requests.values())


def test_a_free_slot_is_taken_before_a_private_checkpoint() -> None:
    run = loop(slots=4, running=3, budget=64)
    holder = run.add(prompt(20), 60)
    for _ in range(20):
        run.step()
    kept = holder.rolling
    run.add(prompt(20, 1), 5)
    run.step()
    assert len(run.scheduler.running) == 2 and holder.rolling is kept is not None
    run.drain()


def test_exactly_enough_pages_are_enough() -> None:
    run = loop(pages=2, slots=2)
    request = run.add(prompt(31), 1)
    run.step()
    assert request.status == "finished"


def test_reused_tokens_cost_no_budget() -> None:
    run = loop(budget=64)
    run.add(prompt(60), 1)
    run.drain()
    again, other = run.add(prompt(60), 1), run.add(prompt(50, 1), 1)
    assert sizes(run.step()) == {again.request_id: 12, other.request_id: 50}


def test_who_lacks_pages_takes_no_private_checkpoint_away() -> None:
    run = loop(slots=2, pages=5, budget=64)
    holder = run.add(prompt(20), 60)
    for _ in range(20):
        run.step()
    run.add(prompt(70, 1), 1)
    assert run.step().waits == {1: "waits for pages"} and holder.rolling is not None
    run.drain()


def test_a_hit_counts_its_own_idle_places_as_taken() -> None:
    """Pages and the checkpoint that a hit shares can't at the same time be given to it."""
    run = loop(pages=4, slots=2)
    run.run(prompt(33))
    waiting = Request(9, prompt(40), 2)
    reuse = run.blocks.lookup(waiting)
    assert reuse == Reuse(32, 32)
    assert run.blocks.spare(waiting) == (2, 4)
    assert run.blocks.spare(waiting, reuse) == (0, 2)
    assert run.blocks.spare(waiting, Reuse(0, 32)) == (1, 2)


def test_a_boundary_is_struck_for_lack_of_a_slot_also_beside_the_slot_that_is_read() -> None:
    run = loop(slots=2)
    run.run(prompt(33))
    run.add(prompt(60), 1)
    (chunk,) = run.step().chunks
    assert (chunk.start, chunk.exports) == (32, ())
    assert chunk.reason == "end of prompt; no slot for 48: 2 of 2 in use"


@pytest.mark.parametrize("preset", ["generic", "ours"])
def test_a_key_that_no_token_completed_is_not_published(preset: str) -> None:
    """Keys that look one token ahead, and an answer that ends with a stop token just on a boundary."""
    run = Simulation(engine(preset, 16, 64, pages=16, filing="key", retain=["all", "decode"]))
    request = run.add(prompt(32), 8, stop_ids=frozenset(range(1_000_003)))
    run.drain()
    assert (request.output, request.status) == ([], "finished")
    assert run.blocks.checkpoints(Request(9, prompt(60), 1)) == [16]


class TestReasons:
    """Every known request runs or has a reason."""

    @staticmethod
    def complete(run: Simulation, plan: StepPlan) -> bool:
        known = {r.request_id for r in (*run.scheduler.running, *run.scheduler.waiting)}
        return plan.waits.keys() == known - sizes(plan).keys()

    def test_decodes_and_prefills_beyond_the_budget_and_those_behind_the_head(self) -> None:
        run = loop(budget=3, retain=[])
        for seed in range(2):
            run.add(prompt(1, seed), 9)
        run.step()
        run.add(prompt(20, 2), 1)
        run.step()
        for seed in (3, 4, 5):
            run.add(prompt(1, seed), 9)
        plans = [run.schedule()]
        assert sizes(plans[0]) == {0: 1, 1: 1, 2: 1}
        no_tokens = "waits: no tokens left in this step"
        assert plans[0].waits == {3: no_tokens, 4: "waits behind request 3", 5: "waits behind request 3"}
        run.commit(plans[0])
        while run.scheduler.has_work:
            plans.append(run.schedule())
            assert self.complete(run, plans[-1])
            run.commit(plans[-1])

    def test_decodes_without_a_row(self) -> None:
        run = loop(budget=4)
        for seed in range(4):
            run.add(prompt(1, seed), 9)
        run.step()
        run.scheduler.max_batched_tokens = 2
        assert run.schedule().waits == dict.fromkeys((2, 3), "waits: no tokens left in this step")

    def test_whoever_was_preempted_for_another(self) -> None:
        run = loop(budget=64, pages=4)
        run.add(prompt(30, 0), 18), run.add(prompt(15, 1), 10)
        run.step()
        run.add(prompt(40, 2), 1), run.add(prompt(4, 3), 1)
        waits: list[dict[int, str]] = []
        while run.scheduler.has_work:
            plan = run.schedule()
            assert self.complete(run, plan)
            waits.append(dict(plan.waits))
            run.commit(plan)
        assert {
            1: "preempted: request 0 needs its pages",
            2: "waits behind request 1",
            3: "waits behind request 1",
        } in waits


@pytest.mark.parametrize("after", [1, 2, 3])
def test_cached_tokens_are_those_of_the_first_admission(after: int) -> None:
    """A prefill that is preempted before it has answered finds its own checkpoints, which nobody saved it."""
    run = loop(budget=16)
    run.run(prompt(33))
    request = run.add(prompt(100), 2)
    for _ in range(after):
        run.step()
    assert request.output == []
    run.preempt(request)
    plan = run.step()
    assert plan.chunks[0].start == 32 + 16 * after
    run.drain()
    assert request.num_cached_tokens == 32
