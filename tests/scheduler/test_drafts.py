"""A step verifies the drafts that fit, takes their tokens in order, and publishes nothing rejected or missing."""

import pytest

from scheduler.plan import StepPlan, StepResult
from scheduler.request import Request
from tests.scheduler.simulation import (
    DRAFTER,
    Simulation,
    assert_right,
    engine,
    prompt,
    published,
    reference,
    sizes,
)

DEPTH, BLOCK = 3, 16


def loop(preset: str = "ours", budget: int = 256, *, right: int = DEPTH, **options: object) -> Simulation:
    """Of every DEPTH drafts `right` are accepted."""
    settings = {"drafts": DEPTH, "scratch": DEPTH, "pages": 64, **options}
    run = Simulation(engine(preset, BLOCK, budget, **settings))  # type: ignore[arg-type]
    run.num_right = lambda _: right
    return run


def decoding(run: Simulation, length: int, tokens: int = 40, seed: int = 0, **fields: object) -> Request:
    """A request whose prompt has just been run."""
    request = run.add(prompt(length, seed), tokens, **fields)
    while not request.output:
        run.step()
    return request


def num_drafts(plans: list[StepPlan]) -> list[int]:
    return [chunk.num_drafts for plan in plans for chunk in plan.chunks if chunk.decodes]


class TestBudget:
    """Drafts take what all decode rows leave, in order of arrival; prefills take what is left of that."""

    @pytest.mark.parametrize(
        ("budget", "rows"),
        [
            (3, [1, 1, 1]),
            (4, [2, 1, 1]),
            (8, [4, 3, 1]),
            (12, [4, 4, 4]),
            (2, [1, 1]),
        ],
    )
    def test_what_does_not_fit_is_cut_from_the_drafts(self, budget: int, rows: list[int]) -> None:
        run = loop()
        requests = [run.add(prompt(5, seed), 20) for seed in range(3)]
        run.step()
        run.scheduler.max_batched_tokens = budget
        plan = run.schedule()
        assert [*sizes(plan).values()] == rows
        reasons = [f"decode, {row - 1} of 3 drafts: no room" if row < 4 else "decode" for row in rows]
        assert [chunk.reason for chunk in plan.chunks] == reasons
        run.commit(plan)
        assert [len(request.output) for request in requests[: len(rows)]] == [1 + row for row in rows]
        run.drain()
        assert_right(run)

    def test_prefills_get_what_drafts_leave_and_know_the_most_they_could_get(self) -> None:
        """Of 24 tokens 4 are the decode's: one step of the grid is left; of 18 none is, and it is crossed in pieces."""
        run = loop(budget=24)
        decoding(run, 5)
        run.add(prompt(60, 1), 2)
        assert sizes(run.step()) == {0: 4, 1: 16}
        run.scheduler.max_batched_tokens = 18
        assert sizes(run.step()) == {0: 4, 1: 14}
        run.drain()
        assert_right(run)

    def test_the_mixed_cap_is_for_prefills_alone(self) -> None:
        run = loop(mixed=16)
        decoding(run, 5)
        run.add(prompt(60, 1), 2)
        assert sizes(run.step()) == {0: 4, 1: 16}

    def test_a_deeper_drafter_is_cut_to_the_depth(self) -> None:
        run = loop()
        request = run.add(prompt(5), 40)
        plan = run.schedule()
        run.scheduler.commit(plan, StepResult({0: (7,)}, drafts={0: (1, 2, 3, 4, 5)}, num_drafted={0: 6}))
        assert request.drafts == (1, 2, 3)


@pytest.mark.parametrize("right", range(DEPTH + 1))
@pytest.mark.parametrize("tokens", range(1, 10))
def test_drafts_shrink_towards_the_last_token(tokens: int, right: int) -> None:
    run = loop(right=right)
    request = run.add(prompt(20), tokens)
    steps = num_drafts(run.drain())
    assert len(request.output) == tokens and request.max_known_tokens == 20 + tokens
    left, expected = tokens - 1, []
    while left:
        expected.append(min(DEPTH, left - 1))
        left -= min(right, expected[-1]) + 1
    assert steps == expected
    assert_right(run)


@pytest.mark.parametrize("limit", [64, 61])
@pytest.mark.parametrize("right", [0, 2, 3])
@pytest.mark.parametrize("length", range(57, 65))
def test_e8_nothing_reaches_beyond_the_context(limit: int, right: int, length: int) -> None:
    """Field bug E8: accesses beyond the last block within the last few tokens. The pool ends exactly at the limit, and
    the content model fails on any row that has no page."""
    run = loop(pages=4, context=limit, right=right)
    if length >= limit:
        with pytest.raises(ValueError, match=f"holds {limit}"):
            run.add(prompt(length), 99)
        assert not run.scheduler.has_work
        return
    request = run.add(prompt(length), 99)
    plans = run.drain()
    assert all(chunk.end < limit == chunk.limit for plan in plans for chunk in plan.chunks)
    assert length + len(request.output) == limit
    assert_right(run)


@pytest.mark.parametrize("scratch", [1, 3])
def test_a_sampling_chunk_has_pages_for_what_drafting_writes(scratch: int) -> None:
    run = loop(scratch=scratch)
    request = decoding(run, BLOCK - 1)
    assert [len(table) for table in request.tables] == ([1, 1] if scratch == 1 else [2, 2])
    run.finish(request)
    run.add(prompt(BLOCK - 1, 1), 1)
    (chunk,) = run.step().chunks
    assert chunk.limit == BLOCK and [len(pages) for pages in chunk.new_blocks] == [1, 1]


@pytest.mark.parametrize("preset", ["ours", "generic", "seed"])
@pytest.mark.parametrize("retain_all", [False, True])
@pytest.mark.parametrize("right", range(DEPTH + 1))
@pytest.mark.parametrize("offset", range(DEPTH + 2))
def test_a_boundary_anywhere_in_a_run(preset: str, retain_all: bool, right: int, offset: int) -> None:
    """The first verified row lies `offset` tokens below the boundary; it is kept if and only if verified tokens reach
    it."""
    boundary = 3 * BLOCK
    run = loop(preset, right=right, retain=["all"] if retain_all else None)
    request = decoding(run, boundary - offset)
    before = published(run, request)
    (chunk,) = run.step().chunks
    wanted = 1 <= offset <= 1 + DEPTH
    assert [export.position for export in chunk.exports] == [boundary] * wanted
    reached = wanted and offset <= 1 + right
    private = preset == "ours" and not retain_all
    assert set(published(run, request)) - set(before) == ({boundary} if reached and not private else set())
    assert (request.rolling.position if request.rolling else None) == (
        boundary if reached and private else None
    )
    assert request.reserved == []
    run.finish(request)
    if reached:
        assert boundary in published(run, request)
    else:
        assert offset == 0 or boundary not in published(run, request)
    run.blocks.check([])


def test_a_rejected_boundary_leaves_the_rolling_checkpoint_of_before() -> None:
    run = loop(right=DEPTH)
    request = decoding(run, 20)
    while request.num_computed_tokens < 40:
        run.step()
    before = request.rolling
    assert before is not None and before.position == 32
    run.num_right = lambda _: 0
    run.step()
    (chunk,) = run.step().chunks
    assert [export.position for export in chunk.exports] == [48] and request.num_computed_tokens == 45
    assert request.rolling == before
    run.finish(request)
    assert published(run, request) == [16, 32]


@pytest.mark.parametrize("offset", range(1, DEPTH + 2))
@pytest.mark.parametrize("position", range(1, DEPTH + 2))
@pytest.mark.parametrize("filing", ["token", "drop", "key", "tag"])
def test_a_stop_inside_an_accepted_run(offset: int, position: int, filing: str) -> None:
    """Field bug E4: text after the end token. The last prompt's token lies `offset` below a boundary, and the stop is
    the run's token of this position; what follows it is neither delivered nor published."""
    length = 3 * BLOCK - offset
    stop = reference(prompt(length), 1 + position)[-1]
    run = loop(filing=filing)
    request = decoding(run, length, stop_ids=frozenset({stop}))
    assert request.status == "running"
    (advance,) = run.commit(run.schedule())
    assert (advance.tokens, advance.finish_reason) == (tuple(request.output[1:]), "stop")
    assert request.output == reference(prompt(length), position)
    known = length + position
    assert all(boundary <= known for boundary in published(run, request))
    again = run.run([*request.prompt, *request.output, 7], 3)
    kept = run.policy.publishable(known, known)
    assert again.num_cached_tokens in ([kept] if filing == "token" else range(kept + 1))
    assert again.output == reference(again.prompt, 3)


def test_e4_a_stop_comes_before_a_limit_at_the_same_token_and_a_draft_is_no_stop() -> None:
    answer = reference(prompt(20), 8)
    for limit, stop, reason in ((8, 3, "stop"), (3, 3, "length"), (4, 3, "stop"), (8, 8, "length")):
        run = loop()
        stop_ids = frozenset(answer[stop : stop + 1])
        request = run.add(prompt(20), limit, stop_ids=stop_ids)
        reasons = []
        while run.scheduler.has_work:
            reasons += [advance.finish_reason for advance in run.commit(run.schedule())]
        assert reasons[-1] == reason and len(request.output) == min(limit, stop)
    run = loop(right=0)
    request = run.add(prompt(20), 8, stop_ids=frozenset({answer[1] + 1}))  # what the drafter proposes wrongly
    run.drain()
    assert request.output == answer


def test_29_all_drafts_rejected_still_yields_a_token_a_step() -> None:
    run = loop(right=0)
    request = run.add(prompt(30), 40)
    plans = run.drain()
    assert len(plans) == 40 and request.output == reference(prompt(30), 40)
    assert max(num_drafts(plans)) == DEPTH


class TestDraftWatermark:
    """A draft page whose rows were not made is not published; the target's pages do not wait for it."""

    def test_a_prompt_alone_leaves_all_of_its_pages(self) -> None:
        run = loop()
        request = run.run(prompt(3 * BLOCK), 1)
        found = [group.num_found(request.keys or ()) for group in run.blocks.groups]
        assert found == [3, 3]

    @pytest.mark.parametrize("filing", ["token", "drop", "key", "tag"])
    def test_tokens_of_a_last_step_may_lack_their_rows(self, filing: str) -> None:
        """The last step crosses a boundary: with the rows it is found, without them the hit is lower by a block, and
        target pages and state are there all the same."""
        hits, target = [], []
        for lagging in (False, True):
            run = loop(filing=filing)
            run.lagging = lagging
            request = run.run(prompt(3 * BLOCK - 3), 5)
            assert request.output == reference(request.prompt, 5)
            keys = request.keys or ()
            target.append(run.blocks.groups[0].num_found(keys))
            assert run.blocks.groups[1].num_found(keys) == 3 - lagging
            assert run.blocks.slots.find(run.blocks._keys(request).at(48)) is not None
            assert (run.blocks.companions.find(run.blocks._keys(request).at(48)) is None) == lagging  # type: ignore[union-attr]
            hits.append(run.run([*request.prompt, *request.output, *prompt(20, 9)], 2).num_cached_tokens)
        assert target == [3, 3]
        assert hits[0] - hits[1] == (0 if filing == "drop" else BLOCK)
        assert hits[0] == (16 if filing == "drop" else 48)


def test_21_resends_at_once_are_all_admitted_and_draft_after_their_first_token() -> None:
    run = loop()
    run.run(prompt(100), 4)
    requests = [run.add(prompt(100), 12) for _ in range(8)]
    first, second = run.step(), run.schedule()
    assert sizes(first) == dict.fromkeys(range(1, 9), 4)
    assert [chunk.num_drafts for chunk in second.chunks] == [DEPTH] * 8
    run.commit(second)
    run.drain()
    assert all(request.output == reference(prompt(100), 12) for request in requests)


@pytest.mark.parametrize(("filing", "lost"), [("token", 0), ("drop", BLOCK)])
@pytest.mark.parametrize("length", [40, 48, 49, 64, 100])
def test_drafting_costs_a_hit_what_its_filing_drops_and_nothing_else(
    filing: str, lost: int, length: int
) -> None:
    hits = []
    for drafter, drafts in ((None, 0), (DRAFTER, DEPTH)):
        run = loop(filing=filing, drafter=drafter, drafts=drafts, scratch=drafts, retain=["all"])
        run.run(prompt(length), 9)
        hits.append(run.run(prompt(length), 9).num_cached_tokens)
        assert_right(run)
    assert hits[0] - hits[1] == lost


@pytest.mark.parametrize("how", ["preempt", "finish"])
@pytest.mark.parametrize("launched", [False, True])
def test_whoever_leaves_takes_its_drafts_along(how: str, launched: bool) -> None:
    """Known bug 31, field bug D5: results belong to requests, not to rows; the one in the middle leaves."""
    run = loop()
    requests = [decoding(run, 20, seed=seed) for seed in range(3)]
    plan = run.schedule() if launched else None
    known = requests[1].num_known_tokens
    getattr(run, how)(requests[1])
    assert (requests[1].drafts, requests[1].num_drafted_tokens) == ((), 0)
    if plan is not None:
        assert [advance.request for advance in run.commit(plan)] == [requests[0], requests[2]]
    assert requests[1].num_known_tokens == known
    late = run.add(prompt(11, 7), 9)
    run.drain()
    for request in (*requests, late):
        assert request.output == reference(request.prompt, len(request.output))
    assert len(requests[1].output) == (40 if how == "preempt" else known - 20)


def test_under_pressure_everybody_ends() -> None:
    """Pages for the drafts of one request at a time: the youngest gives way, and nobody waits for ever."""
    for right in range(DEPTH + 1):
        run = loop(pages=5, right=right, slots=4)
        for seed in range(3):
            run.add(prompt(12, seed), 60)
        run.drain(2_000)
        assert run.scheduler.num_preemptions
        assert_right(run)


@pytest.mark.parametrize(("drafts", "length"), [(3, 29), (1, 31)])
def test_drafts_make_room_before_anybody_has_to_leave(drafts: int, length: int) -> None:
    """Both prompts fill all pages but for a few tokens; the drafts would need one more page."""
    run = loop(pages=4, scratch=0, right=0, drafts=drafts)
    run.add(prompt(length), 8)
    run.add(prompt(length, 1), 3 if drafts > 1 else 2)
    reasons = [chunk.reason for plan in run.drain() for chunk in plan.chunks if chunk.request_id == 0]
    assert reasons[1].startswith("decode") and reasons[1].endswith(f"0 of {drafts} drafts: no room")
    assert run.scheduler.num_preemptions == 0
    assert_right(run)
