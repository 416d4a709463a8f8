"""After every step a request holds what its accepted tokens alone would have left: bit for bit whatever the rejected
tokens were, and but for rounding what a run without drafts holds at the same count.
"""

from itertools import accumulate, product

import pytest
import torch

from scheduler.plan import StepPlan
from scheduler.request import Request
from tests import driver
from tests.engine.rounds import BLOCK, DEPTH, POOL, Contents, Plain, Rounds, models, plain

RELATIVE_NORM = 1e-4  # float32; products of four rows and of one sum in another order


def same_bits(one: Contents, other: Contents) -> list[str]:
    """Names of the tensors that differ in a bit."""
    return [n for n in one if not torch.equal(one[n].view(torch.int32), other[n].view(torch.int32))]


def far_off(found: Contents, expected: Contents) -> list[str]:
    """Names of the tensors that differ by more than rounding."""
    return [n for n in found if not (found[n] - expected[n]).norm() <= RELATIVE_NORM * expected[n].norm()]


def check(one: Rounds, other: Rounds, request: Request, known: Plain) -> None:
    """A decoding request of two runs that differ in the rejected tokens only."""
    twin = other.requests[request.request_id]
    computed, drafted = request.num_computed_tokens, request.num_drafted_tokens
    where = f"request {request.request_id} at {computed}, accepted {one.accepted[request.request_id][-2:]}"
    assert [*request.prompt, *request.output] == known.text[: computed + 1], where
    assert (twin.num_computed_tokens, twin.num_drafted_tokens) == (computed, drafted), where
    found = one.running(request) | one.pages(request, computed, drafted)
    assert not same_bits(found, other.running(twin) | other.pages(twin, computed, drafted)), where
    assert not far_off(found, known.states[computed] | known.pages(computed, drafted)), where


def check_checkpoints(one: Rounds, other: Rounds, plan: StepPlan) -> set[tuple[int, int]]:
    """Checkpoints that a step had planned; (tokens into the step, accepted drafts) of those that stand."""
    standing = set()
    for chunk in plan.chunks:
        request = one.requests[chunk.request_id]
        for c in chunk.exports if chunk.num_drafts else ():
            left = one.carried(c, c.position)
            if c.position <= request.num_computed_tokens:
                assert not same_bits(left, other.carried(c, c.position))
                assert not far_off(left, plain()[chunk.request_id].checkpoint(c.position))
                standing.add((c.position - chunk.start, one.accepted[chunk.request_id][-1]))
            else:
                assert not same_bits(left, one.before[c]), "a rejected token left a state"
                assert not one.scheduler.blocks.slots.is_keyed(c.slot)
    return standing


def every_pair() -> list[int]:
    """Counts of accepted drafts, from a multiple of BLOCK on: each two in a row occur once at each position in it."""
    left = {node: [*range(DEPTH + 1)] for node in product(range(BLOCK), range(DEPTH + 1))}
    trail, circuit = [(1, 0)], []  # nodes: a position, and the count that led there
    while trail:
        position, _ = node = trail[-1]
        if left[node]:
            count = left[node].pop()
            trail.append(((position + count + 1) % BLOCK, count))
        else:
            circuit.append(trail.pop()[1])
    return circuit[::-1]


def two_runs(index_share: bool = True) -> list[Rounds]:
    """Runs whose wrong drafts are others."""
    return [Rounds(wrong=wrong, index_share=index_share) for wrong in (1, 77)]


def test_all_pairs_of_counts_at_all_positions() -> None:
    """Known bugs 27, 28 and 32, field bug E3: stretches of the circuit run beside each other, each in its own text."""
    counts, runs = every_pair(), two_runs()
    starts = list(accumulate((count + 1 for count in counts), initial=BLOCK))
    length = len(counts) // len(plain())
    for begin, known in zip(range(0, len(counts), length), plain(), strict=False):
        for run in runs:
            run.add(known.text, BLOCK + starts[begin] % BLOCK, 400, counts[begin : begin + length + 1])
    pairs, offsets = set(), set()
    positions = [len(request.prompt) for request in runs[0].requests]
    for step in range(length + 2):
        before = [request.num_computed_tokens for request in runs[0].requests]
        plans = [run.step() for run in runs]
        for i, request in enumerate(runs[0].requests):
            check(*runs, request, plain()[i])
            if step > 1:
                pairs.add((positions[i] % BLOCK, *runs[0].accepted[i][-2:]))
        offsets |= check_checkpoints(*runs, plans[0])
        positions = before
    assert pairs == set(product(range(BLOCK), range(DEPTH + 1), range(DEPTH + 1)))
    assert offsets == {(offset, count) for count in range(DEPTH + 1) for offset in range(1, count + 2)}


@pytest.mark.parametrize("index_share", [True, False])
def test_rejected_drafts_in_the_ring_of_the_pool_under_way(index_share: bool) -> None:
    """Field bug C2: at 10, drafts 11..13 are refused, and the next step completes the pool 8..11. All prompts modulo 4,
    all counts twice in a row; the draft layer's ring too, into which its own passes write without index sharing."""
    runs = two_runs(index_share)
    pairs = [pair for pair in product(range(DEPTH + 1), repeat=2) for _ in range(POOL)]
    for i, pair in enumerate(pairs):
        for run in runs:
            run.add(plain()[0].text, 10 + i % POOL, 24, pair)
    for _ in range(4):
        for run in runs:
            run.step()
        for request in runs[0].requests:
            check(*runs, request, plain()[0])
    assert [tuple(found[:2]) for found in runs[0].accepted] == pairs


def test_the_batch_is_another_after_every_step() -> None:
    """Requests end before, between and after others; rows and replay rows move, counts stay with their request."""
    runs = two_runs()
    for i, new_tokens in enumerate([4, 40, 7, 13, 40, 10, 22, 40]):
        for run in runs:
            run.add(plain()[i % 2].text, 6 + 3 * i, new_tokens, (i % 4, (i + 2) % 4, 3, 0))
    orders = set()
    while len(runs[0].scheduler.running) > 2 or not orders:
        plans = [run.step() for run in runs]
        orders.add(tuple(chunk.request_id for chunk in plans[0].chunks))
        for request in runs[0].decoding():
            check(*runs, request, plain()[request.request_id % 2])
    assert len(orders) >= 5


def test_a_drafter_that_is_always_wrong() -> None:
    """Known bug 29: nothing accepted is one new token, and the state of a plain step."""
    runs = two_runs()
    for run in runs:
        run.add(plain()[1].text, 9, 40, (0,))
    for step in range(20):
        for run in runs:
            run.step()
        assert len(runs[0].requests[0].output) == step + 1
        check(*runs, runs[0].requests[0], plain()[1])


def test_acceptance_of_a_verifier_that_never_rolls_back() -> None:
    """Known bug 30: a verifier whose states went wrong may agree with a drafter that follows it."""
    run, trunk = Rounds(), models()[0]
    request = run.add(plain()[1].text, 9, 60, (3, 0, 2, 1, 1, 3))
    run.step()
    for _ in range(12):
        known = [*request.prompt, *request.output]
        chunk = run.step().chunks[0]
        drafts = chunk.token_ids[1:]
        choices = driver.logits(trunk, [*known, *drafts])[len(known) - 1 :].argmax(1).tolist()
        refused = (i for i, draft in enumerate(drafts) if draft != choices[i])
        num_accepted_drafts = next(refused, len(drafts))
        assert run.accepted[0][-1] == num_accepted_drafts
        assert request.output[len(known) - 9 :] == choices[: num_accepted_drafts + 1]


@pytest.mark.parametrize("preempted", [False, True])
def test_a_request_leaves_between_forward_and_commit(preempted: bool) -> None:
    """Known bug 31: in that step and later only places of requests that run change, and those hold what they should,
    also where a newcomer takes a place over."""
    runs = two_runs()
    for run in runs:
        for i in range(3):
            run.add(plain()[i % 2].text, 11 + 7 * i, 40, (2, 0, 3))
        for _ in range(3):
            run.step()
        run.step(leaving=run.requests[1], preempted=preempted)
        run.add(plain()[1].text, 20, 40, (1, 3))
    for _ in range(5):
        before = {pool: [part.clone() for part in parts] for pool, parts in runs[0].places().items()}
        plans = [run.step() for run in runs]
        for pool, owned in runs[0].owned(plans[0]).items():
            for old, new in zip(before[pool], runs[0].places()[pool], strict=True):
                differs = (old.view(torch.int32) != new.view(torch.int32)).flatten(1).any(1)
                assert set(differs.nonzero().flatten().tolist()) <= owned, pool
        for request in runs[0].decoding():
            check(*runs, request, plain()[request.request_id % 2])
    assert runs[0].requests[1].status == ("running" if preempted else "finished")
