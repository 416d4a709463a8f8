"""Drafts after a hit, a chunk end or a resume are those of a cold run, position by position, under every filing;
only `drop` and `off` meet draft rows of another continuation, and they cost acceptance, never a token.
"""

from collections.abc import Sequence
from itertools import product

import pytest

from tests.engine.drafting import BLOCK, DEPTH, TOLERANCE, VOCAB, Probe, answer, scripted
from tests.tiny import token_ids

TEXT = token_ids(81, seed=1, vocab_size=VOCAB)
A, B = token_ids(23, seed=2, vocab_size=VOCAB), token_ids(23, seed=3, vocab_size=VOCAB)
FILINGS = ("token", "drop", "key", "tag", "off")
# Every filing, and index sharing on and off, without their product.
WAYS = [*product(FILINGS, [True]), ("token", False), ("key", False)]
ways = pytest.mark.parametrize(("filing", "share"), WAYS)


def probe(filing: str = "token", share: bool = True, **options: object) -> Probe:
    return Probe(filing, index_share=share, **options)


def assert_all_cold(used: Probe) -> None:
    for request in used.requests:
        used.assert_cold(request.request_id)


@ways
def test_prompt_hits(filing: str, share: bool) -> None:
    """A prompt, again, and as the beginning of the next turn."""
    used = probe(filing, share)
    turn = [*TEXT, *answer(TEXT, 6), *A]
    hits = [used.run((prompt, 6))[0].cached_tokens for prompt in (TEXT, TEXT, turn)]
    dropped = BLOCK if filing == "drop" else 0
    assert hits == [0, 80 - dropped, 80 - dropped]
    assert used.samplers[0].logits.keys() == used.samplers[1].logits.keys()
    assert_all_cold(used)


@ways
def test_boundaries_that_decode_left(filing: str, share: bool) -> None:
    """Accepted runs of 3, 2, 1 and 0 drafts cross boundaries; later prompts begin with what was generated."""
    used = probe(filing, share, retain="all", max_running_requests=1)
    prompt, generated = TEXT[:29], answer(TEXT[:29], 40)
    used.run((prompt, 40), script=scripted(prompt, 44, lambda known: known % (DEPTH + 1)))
    assert set(used.samplers[0].num_accepted) == set(range(DEPTH + 1))
    for length in (20, 38):
        assert used.run(([*prompt, *generated[:length], *A[:4]], 4))[0].cached_tokens >= 32
    assert_all_cold(used)


@ways
def test_resumed_after_preemption(filing: str, share: bool) -> None:
    """Preempted in prefill and in decode, beside another request."""
    used = probe(filing, share, max_batched_tokens=40)
    scripts = [scripted(prompt, 16, lambda known: known % 3) for prompt in (TEXT, A)]
    ids = [used.add(prompt, 12, script) for prompt, script in zip((TEXT, A), scripts, strict=True)]
    stages = [(0, 32), (0, 80), (4, 0), (8, 0)]  # generated, computed
    while used.llm.has_work:
        used.step()
        request = used.requests[ids[0]]
        if stages and request.status == "running":
            generated, computed = stages[0]
            if len(request.output) >= generated and request.num_computed_tokens >= computed:
                used.llm.scheduler.preempt(request)
                stages.pop(0)
    assert not stages and used.requests[ids[0]].num_preemptions == 4
    assert_all_cold(used)


@ways
def test_first_requests_that_never_draft(filing: str, share: bool) -> None:
    """I37: after `max_tokens` 1 the prompt's draft pages are all there: hits are those without a drafter."""
    used, plain = probe(filing, share), Probe(filing, draft_tokens=0)
    for length in (81, 80):
        hits = [[each.run((TEXT[:length], n))[0].cached_tokens for n in (1, 8)] for each in (used, plain)]
        expected = hits[1] if filing != "drop" else [max(hit - BLOCK, 0) for hit in hits[1]]
        assert hits[0] == expected and expected[1] > 0
        used.llm.scheduler.blocks.reset_cache([])
        plain.llm.scheduler.blocks.reset_cache([])
    assert not used.samplers[0].logits
    for request_id in (1, 3):
        used.assert_cold(request_id)


def branching_pair(used: Probe, shared: Sequence[int]) -> list[dict[int, float]]:
    """A = X + a.., then B = X + b.. twice, X ending on a boundary: errors of the drafts of each."""
    for prompt in ([*shared, *A], [*shared, *B], [*shared, *B]):
        used.run((prompt, 10))
    return [used.errors(request_id) for request_id in range(3)]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("filing", ["token", "key", "tag"])
@pytest.mark.parametrize("num_shared", [16, 32])
def test_33_the_boundary_row_of_the_draft_cache_belongs_to_another_continuation(
    filing: str, share: bool, num_shared: int
) -> None:
    """`token` alone lets B hit all of X that A left, and its second run all of its own prompt."""
    used = probe(filing, share, retain="all")
    errors = branching_pair(used, TEXT[:num_shared])
    assert all(max(each.values()) <= TOLERANCE for each in errors)
    first = num_shared if filing == "token" else num_shared - BLOCK
    hits = [used.llm.result(i).cached_tokens for i in range(3)]
    assert hits == [0, first, (num_shared + len(B) - 1) // BLOCK * BLOCK]


@pytest.mark.parametrize(("filing", "wrong"), [("drop", [False, False, True]), ("off", [False, True, True])])
def test_33_drop_and_off_draft_from_the_other_continuation(filing: str, wrong: list[bool]) -> None:
    """Tokens are right all the same (`errors` looks). Under `drop` only the second run of B meets A's page."""
    used = probe(filing, retain="all")
    errors = branching_pair(used, TEXT[:BLOCK])
    assert [max(each.values()) > 100 * TOLERANCE for each in errors] == wrong


@pytest.mark.parametrize("share", [True, False])
def test_i36_restoring_is_going_on_after_a_chunk_that_ended_there(share: bool) -> None:
    """Tokens, drafts and published set of one run whose chunk ends at 48, and of one that is resumed there."""
    runs = []
    for interrupted in (False, True):
        used = probe(share=share, max_batched_tokens=48)
        request_id = used.add(TEXT, 10)
        used.step()
        if interrupted:
            used.llm.scheduler.preempt(used.requests[request_id])
        while used.llm.has_work:
            used.step()
        request = used.requests[request_id]
        assert request.num_preemptions == interrupted
        pages = [len(group._place_of) for group in used.blocks.groups]
        runs.append((request.output, used.samplers[0].drafts, used.blocks.checkpoints(request), pages))
        used.assert_cold(request_id)
    # The resumed run alone kept the checkpoint that it was resumed from.
    assert runs[0][:2] == runs[1][:2] and runs[0][3] == runs[1][3]
    assert set(runs[1][2]) - set(runs[0][2]) == {48}


def test_d3_prefix_hits_with_mtp_on_zero_or_poisoned() -> None:
    """80 tokens twice: a hit both ways, and the same text and acceptance counts as cold."""
    script = scripted(TEXT[:80], 20, lambda known: known % 4)
    used, plain = probe(), Probe(draft_tokens=0)
    for each in (used, plain):
        results = [each.run((TEXT[:80], 16), script=script)[0] for _ in range(2)]
        assert results[1].cached_tokens == 64
        assert results[0].token_ids == results[1].token_ids == answer(TEXT[:80], 16)
    assert used.samplers[0].num_accepted == used.samplers[1].num_accepted
    assert_all_cold(used)
