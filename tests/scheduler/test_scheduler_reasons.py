"""What happens on the way is explained and counted: rows of a step, those who wait, those who were preempted."""

from scheduler.block_manager import BlockManager
from scheduler.checkpoint_policy import Capability, make_policy
from scheduler.plan import StepResult
from scheduler.request import Advance, Request
from scheduler.scheduler import Scheduler
from tests.scheduler.simulation import Simulation, assert_right, engine, prompt, sizes


def loop(budget: int = 64, pages: int = 32, **options: object) -> Simulation:
    return Simulation(engine("ours", 16, budget, pages=pages, **options))  # type: ignore[arg-type]


def test_every_decode_row_says_that_it_is_one() -> None:
    run = loop()
    run.add(prompt(20), 40)
    first, *rest = run.drain()
    assert [chunk.reason for chunk in first.chunks] == ["tail joined"]
    assert [(c.reason, c.decodes) for plan in rest for c in plan.chunks] == [("decode", True)] * 39


def test_a_running_prompt_that_gets_too_few_tokens_is_told_so() -> None:
    run = loop(mixed=64, budget=200, pages=100)
    for seed, length in enumerate((4, 300, 300)):
        run.add(prompt(length, seed), 50)
    run.step()
    run.scheduler.mixed_prefill_tokens, run.scheduler.max_batched_tokens = 32, 200
    assert sizes(run.step()) == {0: 1, 1: 16, 2: 16}
    run.scheduler.mixed_prefill_tokens, run.scheduler.max_batched_tokens = 0, 41
    plan = run.step()
    assert (sizes(plan), plan.waits) == ({0: 1, 1: 32}, {2: "waits: 8 tokens are less than one step of 16"})


def test_a_row_that_was_planned_leaves_the_step_with_its_request() -> None:
    """The younger request has its decode row when the older one's last chunk takes its page."""
    run = loop(budget=40, pages=4)
    run.add(prompt(62, 0), 1)
    young = run.add(prompt(8, 1), 4)
    assert sizes(run.step()) == {0: 32, 1: 8}
    plan = run.step()
    assert (sizes(plan), plan.waits) == ({0: 30}, {1: "preempted: request 0 needs its pages"})
    assert (young.status, young.num_preemptions) == ("waiting", 1)
    run.drain()
    assert_right(run)


def test_preemptions_are_counted_and_the_preempted_can_be_cancelled() -> None:
    run = loop()
    requests = [run.add(prompt(20, seed), 9) for seed in range(2)]
    for _ in range(2):
        run.step()
        run.preempt(requests[1])
    assert ([r.num_preemptions for r in requests], run.scheduler.num_preemptions) == ([0, 2], 2)
    run.preempt(requests[0])
    assert run.scheduler.num_preemptions == 3
    assert [r.status for r in requests] == ["waiting", "waiting"]
    run.finish(requests[1])
    assert [*run.scheduler.waiting] == [requests[0]]
    run.drain()
    assert_right(run)


def test_a_prompt_that_cannot_enter_with_what_is_left_is_told_so() -> None:
    """Half of 24 is less than a step, and other steps offer it half of 40."""
    run = loop(mixed=40, budget=200, pages=100)
    run.add(prompt(4), 9)
    run.step()
    for seed in (1, 2, 3):
        run.add(prompt(300, seed), 1)
    plan = run.step()
    assert sizes(plan) == {0: 1, 1: 16}
    assert plan.waits == {2: "waits: 12 tokens are less than one step of 16", 3: "waits behind request 2"}


def test_a_cap_of_one_token_is_kept() -> None:
    run = loop(mixed=1, retain=[])
    run.add(prompt(4), 9)
    run.step()
    run.add(prompt(5, 1), 1), run.add(prompt(5, 2), 1)
    assert sizes(run.step()) == {0: 1, 1: 1}


def test_a_scored_prompt_runs_from_its_first_token() -> None:
    """Every row has to yield a log-probability, so a hit would lose those below it."""
    run = loop()
    run.run(prompt(40))
    run.add(prompt(40), 0, score_prompt=True)
    (chunk,) = run.step().chunks
    assert (chunk.start, chunk.targets) == (0, tuple(prompt(40)[1:]))


def test_a_commit_says_whose_token_it_is_and_how_it_ended() -> None:
    policy = make_policy("ours", Capability(), draft_architecture=None, block_size=16)
    scheduler = Scheduler(
        BlockManager(policy, 64, 16), max_batched_tokens=128, context_limit=999, max_running_requests=8
    )
    going, last, stopped, broken, long = (
        Request(number, [number] * (20 + 80 * (number == 4)), 1 if number == 1 else 5, frozenset({9}))
        for number in range(5)
    )
    for request in (going, last, stopped, broken, long):
        scheduler.add(request)
    result = StepResult({0: (7,), 1: (8,), 2: (9,)}, errors={3: "no finite logit"})
    assert scheduler.commit(scheduler.schedule(), result) == [
        Advance(going, (7,)),
        Advance(last, (8,), "length"),
        Advance(stopped, finish_reason="stop"),
        Advance(broken, finish_reason="error", message="no finite logit"),
        Advance(long),
    ]
    assert scheduler.running == [going, long]
