"""On random inputs the derived rule equals each preset written out, and no legal chunk is longer than the plan's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scheduler.checkpoint_policy import MANY, Capability, Chunk, Policy, Prefill, Retention
from tests.scheduler.policy_driver import PRESETS, build

GRID = 16
BLOCKS = st.sampled_from([16, 48, 64, 160, 512])


class Outcome(NamedTuple):
    """End of a chunk, states exported inside, boundaries that others find after its commit, the private one."""

    end: int
    exports: list[int]
    findable: list[int]
    rolling: int | None = None


@dataclass(frozen=True)
class Case:
    start: int
    room: int
    largest: int
    prompt: int
    known: int
    junctions: tuple[int, ...]
    block: int

    @property
    def finish(self) -> int:
        return max(self.prompt, self.known - 1)

    @property
    def farthest(self) -> int:
        return self.start + min(self.room, self.known - self.start)

    def floor(self, position: int) -> int:
        return max(position, 0) // self.block * self.block

    def inside(self, points: Sequence[int], end: int) -> list[int]:
        return sorted({m for m in points if m > 0 and self.start < m < end})

    def findable(self, points: Sequence[int], exports: Sequence[int], end: int) -> list[int]:
        return sorted({m for m in points if m > self.start and m in (*exports, end)})


@st.composite
def cases(draw: st.DrawFn, scale: int = 3000) -> Case:
    block = draw(BLOCKS)
    prompt = draw(st.integers(1, scale))
    known = prompt + draw(st.sampled_from([0, 0, 1, 2, 80, scale // 4]))
    finish = max(prompt, known - 1)
    start = draw(st.one_of(st.integers(0, finish), st.integers(0, finish // GRID).map(lambda n: n * GRID)))
    largest = draw(st.one_of(st.integers(GRID, scale), st.sampled_from([64, scale // 4])))
    room = draw(st.one_of(st.just(largest), st.integers(0, largest)))
    limit = (known - 1) // block
    junctions = draw(st.lists(st.integers(1, limit).map(lambda n: n * block), max_size=2)) if limit else []
    return Case(start, room, largest, prompt, known, tuple(junctions), block)


def floored(case: Case) -> int:
    end, start = case.farthest, case.start
    if end < case.finish and (case.floor(end) > start or case.block <= case.largest):
        end = case.floor(end)
    return min(end, case.floor(start) + case.block) if start % case.block else end


def generic(case: Case, dropped: int) -> Outcome:
    end, last = floored(case), case.floor(case.known) - dropped
    end = last if case.start < last < end else end
    return Outcome(end, [], [end] if end % case.block == 0 else [])


def seed(case: Case, dropped: int) -> Outcome:
    if case.start % case.block:
        return generic(case, dropped)
    end = floored(case)
    export = case.floor(end)
    if end % case.block and export > case.start:
        return Outcome(end, [export], [export])
    return Outcome(end, [], [end] if end % case.block == 0 else [])


def vllm_033(case: Case, dropped: int) -> Outcome:
    end, last, exports = floored(case), case.floor(case.known - 1) - dropped, []
    end = min([*case.inside(case.junctions, end), end])
    if last > 0 and case.start < last < end:
        on_grid = (last - case.start) % GRID == 0
        if end >= case.finish and on_grid and last not in case.junctions:
            exports = [last]
        else:
            end = last
    kept = [case.floor(case.prompt - 1) - dropped, *case.junctions]
    return Outcome(end, exports, case.findable(kept, exports, end))


def ours(case: Case, dropped: int) -> Outcome:
    end = case.farthest
    if end < case.finish:
        end = end // GRID * GRID
    fixed = [case.floor(case.prompt - 1), case.floor(case.prompt), *case.junctions]

    def moving(end: int) -> list[int]:
        return [case.floor(end)] if end < case.finish or end > case.prompt else []

    if case.start % GRID:
        end = min([*case.inside([*fixed, *moving(end)], end), end])
    exports = case.inside([*fixed, *moving(end)], end)
    private = [m for m in moving(end) if m > case.start and m not in fixed]
    return Outcome(end, exports, case.findable(fixed, exports, end), private[0] if private else None)


def none(case: Case, dropped: int) -> Outcome:
    return Outcome(case.farthest, [], [])


WRITTEN_OUT = {"generic": generic, "seed": seed, "vllm-0.33": vllm_033, "ours": ours, "none": none}


def plan(policy: Policy, case: Case) -> Chunk:
    request = Prefill(case.prompt, case.known, case.junctions)
    return policy.chunk(case.start, case.room, request, case.largest)


@settings(max_examples=250, deadline=None)
@given(cases(), st.booleans())
def test_every_preset_equals_its_rules_written_out(case: Case, drafting: bool) -> None:
    for preset, rule in WRITTEN_OUT.items():
        policy = build(preset, block=case.block) if drafting else build(preset, block=case.block, draft=None)
        chunk = plan(policy, case)
        got = Outcome(chunk.end, list(chunk.exports), list(chunk.publishes), chunk.rolling)
        if case.start >= case.finish:
            assert got == Outcome(case.farthest, [], []), preset
            continue
        expected = rule(case, case.block if drafting and preset in ("generic", "seed") else 0)
        if expected.end <= case.start:
            expected = Outcome(case.start, [], [])
        assert got == expected, preset


RETAINED: list[Retention] = ["resend", "extend", "junction", "chunk-ends", "crossed", "all"]


@st.composite
def policies(draw: st.DrawFn, block: int) -> Policy:
    """Any retention under any capability and filing, bypassing the presets' own."""
    rolling: list[Retention] = draw(st.sampled_from([[], ["progress", "decode"]]))
    retain = draw(st.lists(st.sampled_from(RETAINED), unique=True)) + rolling
    filing = draw(st.sampled_from(["token", "drop", "key", "tag", "off"]))
    capability = Capability(
        exports=draw(st.sampled_from([0, 1, 2, MANY])), free_chunk_ends=draw(st.booleans())
    )
    return build("ours", capability=capability, block=block, retain=retain, filing=filing)


def deserving(policy: Policy, case: Case, end: int) -> list[int]:
    """Boundaries in (start, end] that a retention names, from its definition."""
    dropped = case.block if policy.filing == "drop" else 0
    ahead = 1 if policy.filing in ("key", "tag") else 0
    points: set[int] = set()
    if "resend" in policy.retain:
        points.add(case.floor(case.prompt - 1) - dropped)
    if "extend" in policy.retain:
        points.add(case.floor(case.prompt - ahead) - dropped)
    if "junction" in policy.retain:
        points.update(case.junctions)
    if "all" in policy.retain:
        points.update(range(0, end + 1, case.block))
    if "chunk-ends" in policy.retain and not policy.capability.exports:
        points.add(case.floor(case.known) - dropped)
    moving: Retention | None = "progress" if end < case.finish else "decode" if end > case.prompt else None
    if {moving, "crossed"} & policy.retain:
        points.add(case.floor(end))
    return sorted(m for m in points if case.start < m <= end)


def legal(policy: Policy, case: Case, end: int) -> bool:
    """May a chunk end here, and is every retained boundary inside of it exported?"""
    unit = GRID if policy.capability.free_chunk_ends else case.block
    crossed_in_pieces = case.farthest // unit * unit <= case.start and unit > case.largest
    if end < case.finish and end % unit and not crossed_in_pieces:
        return False
    aligned = policy.capability.free_chunk_ends or case.start % case.block == 0
    if not aligned and end > case.floor(case.start) + case.block:
        return False
    inside = [m for m in deserving(policy, case, end) if m < end]
    return len(inside) <= policy.capability.exports and all((m - case.start) % GRID == 0 for m in inside)


@settings(max_examples=200, deadline=None)
@given(st.data(), cases(500))
def test_no_longer_chunk_exports_all_that_is_retained_inside(data: st.DataObject, case: Case) -> None:
    policy = data.draw(policies(case.block))
    # With one generated token known, the whole chunk wants a decode boundary and one token less wants none.
    assume(case.start < case.finish and policy.retain and case.known != case.prompt + 1)
    chunk = plan(policy, case)
    ends = range(chunk.end + 1, case.farthest + 1)
    assert not [end for end in ends if legal(policy, case, end)]
    if chunk.end > case.start:
        assert legal(policy, case, chunk.end)
        assert list(chunk.exports) == [m for m in deserving(policy, case, chunk.end) if m < chunk.end]


@settings(max_examples=100, deadline=None)
@given(st.data(), cases())
def test_what_is_published_or_rolling_was_written(data: st.DataObject, case: Case) -> None:
    policy = data.draw(
        st.one_of(
            policies(case.block), st.sampled_from(PRESETS).map(lambda name: build(name, block=case.block))
        )
    )
    chunk = plan(policy, case)
    kept = {*chunk.publishes, *([] if chunk.rolling is None else [chunk.rolling])}
    assert kept <= {*chunk.exports, chunk.end}
    assert all(m % policy.block_size == 0 and m > case.start for m in kept)
    assert chunk.rolling not in chunk.publishes
    assert len(chunk.exports) <= policy.capability.exports


@settings(max_examples=100, deadline=None)
@given(cases(), st.sampled_from([*PRESETS, "none"]))
def test_a_chunk_advances_or_waits_and_waiting_helps(case: Case, preset: str) -> None:
    policy, request = build(preset, block=case.block), Prefill(case.prompt, case.known, case.junctions)
    chunk = policy.chunk(case.start, case.room, request, case.largest)
    if chunk.end == case.start < case.known:
        assert case.room < case.largest
        assert not (chunk.exports or chunk.publishes or chunk.rolling)
        assert policy.chunk(case.start, case.largest, request, case.largest).end > case.start
    assert case.start <= chunk.end <= case.farthest


@settings(max_examples=200, deadline=None)
@given(st.data(), cases(), st.sampled_from(PRESETS))
def test_a_boundary_without_a_slot_is_struck_before_the_end_is_derived(
    data: st.DataObject, case: Case, preset: str
) -> None:
    policy, request = build(preset, block=case.block), Prefill(case.prompt, case.known, case.junctions)
    full = policy.chunk(case.start, case.room, request, case.largest)
    denied = {m for m in (*full.exports, *full.publishes) if data.draw(st.booleans())}
    chunk = policy.chunk(case.start, case.room, request, case.largest, denied)
    assert not denied & {*chunk.exports, *chunk.publishes, chunk.rolling}
    assert chunk.end >= full.end, "a boundary that gets no slot stops nothing"
