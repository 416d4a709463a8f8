"""Failures that public engines had in this area, as their users saw them; none of them may be seen here.

Elsewhere: state copied backwards, windows, rings and verification (11, 27, 28, 30, 32) belong to the engine's
`test_roll_back` and the model's `test_kda_verification`; draft rows of a hit (33, 34, 35) also to the engine's
`test_draft_reuse`, `test_draft_rows` and `test_companions`; all drafts rejected (29) and resends that draft (21) to
`test_drafts`; rows that write what others own (12) to the engine's `test_field_bugs`; the final state of a short
kernel chunk (9) to the kernels; the policy's own arithmetic (4, 10, 14, 16) to its tests; cancelled in flight (31),
cleared caches (26) and cancels (G1) to `test_leaving`; the branching pair (33) to `test_scheduler_tables`; pools of
one to eight slots (37) to `test_scheduler`.

Two cannot occur: a chunk grid taken from the wrong group (24), and a resumed column computed with another group's
block size (25). There is one block size for keys, pages and boundaries, and no column: a state is found by its key.
"""

import pytest

from scheduler.checkpoint_policy import Reuse
from scheduler.pool import Pool
from scheduler.request import Request
from tests.scheduler.simulation import DRAFTER, Simulation, engine, prompt, published, reference, sizes

PUBLIC = ("generic", "seed", "vllm-0.33", "ours")
FILINGS = ("token", "drop", "key", "tag", "off")


def loop(
    preset: str = "ours", block: int = 16, budget: int = 4096, *, content: bool = True, **options: object
) -> Simulation:
    pages = 128 if content else 4096
    return Simulation(engine(preset, block, budget, **{"pages": pages, **options}), content=content)  # type: ignore[arg-type]


def key_at(run: Simulation, position: int) -> bytes:
    """The key of the first request's boundary."""
    return run.blocks._keys(run.requests[0]).at(position)


def lookup(run: Simulation, tokens: list[int]) -> Reuse:
    return run.blocks.lookup(Request(99, tokens, 1))


def evict(pool: Pool | None, key: bytes) -> None:
    """Take the one place under a key away."""
    assert pool is not None
    place = pool._place_of.pop(key)
    del pool._key_of[place], pool._idle[place]
    pool._free.append(place)


# A. Wrong state under a right key. The content model compares every published state with its key at every step.


@pytest.mark.parametrize(
    ("preset", "hit"), [("generic", 0), ("seed", 0), ("vllm-0.33", 1600), ("ours", 1600)]
)
@pytest.mark.parametrize("neighbour", [1684, 1000, 0])
def test_1_a_chunk_that_ends_inside_a_block_poisons_its_slot(preset: str, hit: int, neighbour: int) -> None:
    run = loop(preset, 1600, 2048, pages=8)
    if neighbour:
        run.add(prompt(neighbour, 1))
    run.add(prompt(2002))
    run.drain()
    again = run.run([*prompt(2002), 7, 7], 3)
    assert again.num_cached_tokens == hit
    assert again.output == reference(again.prompt, 3)


@pytest.mark.parametrize("budget", [1866, 1160, 700])
def test_2_every_boundary_publishes_blocks_that_no_kernel_finished(budget: int) -> None:
    run = loop(block=2048, budget=budget, pages=8, retain=["all"], exports=0)
    request = run.add(prompt(3026))
    assert 2048 in [chunk.end for plan in run.drain() for chunk in plan.chunks]
    assert published(run, request) == [2048]


def test_5_a_state_in_use_as_a_running_state_is_also_in_the_cache() -> None:
    run = loop("generic", budget=64)
    first = run.add(prompt(150), 8)
    run.step()
    slot = run.blocks.slots.find(key_at(run, 64))
    assert slot is not None and slot != first.recurrent_slot
    before = run.slots[slot]
    others = [run.add([*prompt(80), seed, *prompt(60, seed)], 8) for seed in (1, 2)]
    run.drain()
    assert [request.num_cached_tokens for request in others] == [64, 64]
    assert run.slots[slot] == before
    assert all(r.output == reference(r.prompt, 8) for r in (first, *others))


def test_6_a_hit_is_granted_but_nothing_restores_the_state() -> None:
    run = loop(block=64)
    run.run(prompt(600)), run.run(prompt(300, 1), 5), run.run(prompt(300, 2), 5)
    hit = run.run([*prompt(520), 1, 2, 3], 6)
    again = run.run([*prompt(520), 1, 2, 3], 6)
    assert (hit.num_cached_tokens, again.num_cached_tokens) == (0, 512)
    assert hit.output == again.output == reference(hit.prompt, 6)


@pytest.mark.parametrize("budget", [1, 2, 16])
def test_7_8_d1_a_first_chunk_of_one_token_continues_a_strangers_text(budget: int) -> None:
    run = loop(budget=budget, slots=1)
    for length, seed in ((40, 1), (1, 2), (1, 3), (33, 4)):
        request = run.add(prompt(length, seed), 4)
        first = run.step().chunks[0]
        assert first.admitted and not first.decodes and first.restore_from is None
        run.drain()
        assert request.output == reference(request.prompt, 4)


# B. Hits that disappear.


def full_chain(filing: str, drafter: str | None = DRAFTER) -> Simulation:
    """Every boundary of 130 tokens is published."""
    run = loop(filing=filing, drafter=drafter, retain=["all"])
    run.run(prompt(130))
    return run


def test_3_the_recurrent_lookup_goes_beyond_the_attention_match() -> None:
    assert lookup(full_chain("drop"), prompt(65)) == Reuse(48, 48)
    assert lookup(full_chain("token"), prompt(65)) == Reuse(64, 64)


@pytest.mark.parametrize(
    ("length", "block", "filing", "hit"),
    [
        (8901, 2304, "drop", 4608),
        (11_910, 1600, "drop", 9600),
        (8901, 2304, "token", 6912),
        (11_910, 1600, "token", 11_200),
        (16_897, 512, "drop", 16_384),
    ],
)
def test_13_retention_keeps_the_boundary_that_no_lookup_can_reach(
    length: int, block: int, filing: str, hit: int
) -> None:
    run = loop("ours", block, content=False, filing=filing, retain=["resend"])
    run.run(prompt(length))
    assert run.run(prompt(length)).num_cached_tokens == hit


@pytest.mark.parametrize("length", [10, 16, 31, 32, 33, 130])
@pytest.mark.parametrize("filing", FILINGS)
def test_15_speculation_silently_lowers_or_disables_hits(length: int, filing: str) -> None:
    with_drafts, without = (lookup(full_chain(filing, d), prompt(length)).state_at for d in (DRAFTER, None))
    assert without == (length - 1) // 16 * 16
    assert with_drafts == max(without - (16 if filing == "drop" else 0), 0)


@pytest.mark.parametrize("block", [0, 3, 5, 7])
def test_17_the_drop_is_applied_again_and_again(block: int) -> None:
    """The draft group covers less than the target group; one block is dropped, once."""
    run = full_chain("drop")
    evict(run.blocks.groups[1], key_at(run, block * 16 + 16))
    hit = max(block * 16 - 16, 0)
    assert lookup(run, prompt(130)) == Reuse(hit, hit)


def test_18_a_scratch_group_vetoes_every_hit() -> None:
    run = loop(block=64)
    run.run(prompt(2000))
    assert len(run.blocks.groups) == 2
    assert run.run(prompt(2000)).num_cached_tokens == 1984


@pytest.mark.parametrize("length", [17, 32, 33, 47, 48, 49])
def test_19_a_lookup_one_below_the_end_finds_no_state(length: int) -> None:
    run = loop()
    run.run(prompt(length))
    assert run.run(prompt(length)).num_cached_tokens == (length - 1) // 16 * 16


def test_20_shallow_checkpoints_are_evicted_first() -> None:
    """A fork whose pages are all resident may find no state, once: `junction` keeps the next one from it."""
    run = loop(slots=48, pages=200, retain=["all", "junction"])
    for seed in (1, 2, 3):
        run.run(prompt(512, seed))
    fork = [*prompt(128, 2), *prompt(30, 9)]
    assert lookup(run, fork) == Reuse(0, 128)
    assert lookup(run, prompt(512, 3)) == Reuse(496, 496)
    run.run(fork)
    assert lookup(run, [*fork[:128], 5, 5]) == Reuse(128, 128)


@pytest.mark.parametrize("preset", ["vllm-0.33", "ours"])
def test_21_hits_are_served_one_at_a_time(preset: str) -> None:
    run = loop(preset, slots=40)
    run.run(prompt(100))
    for _ in range(8):
        run.add(prompt(100), 2)
    assert sizes(run.step()) == dict.fromkeys(range(1, 9), 4)


# C. Plans that stall.


@pytest.mark.parametrize("preset", ["generic", "seed", "vllm-0.33"])
def test_22_a_block_wider_than_the_budget_hangs(preset: str) -> None:
    run = loop(preset, 2304, 1024, content=False)
    run.add(prompt(5000))
    chunks = [sizes(plan)[0] for plan in run.drain()]
    assert chunks == [1024, 1024, 256, 1024, 1024, 256, 392]


@pytest.mark.parametrize("preset", PUBLIC)
@pytest.mark.parametrize("mixed", [0, 1024, 2000])
@pytest.mark.parametrize("decoder", [False, True])
def test_23_starvation_by_alignment(preset: str, mixed: int, decoder: bool) -> None:
    """While a prompt is not done, every step runs a part of one."""
    run = loop(preset, 1600, 2048, content=False, mixed=mixed)
    if decoder:
        run.add(prompt(1, 3), 100)
        run.step()
    requests = [run.add(prompt(9_000, seed)) for seed in (1, 2)]
    while any(request.status != "finished" for request in requests):
        assert any(not chunk.decodes for chunk in run.step().chunks)


# E, F. Draft rows, and accounts.


@pytest.mark.parametrize("filing", ["token", "key", "tag"])
def test_34_stale_draft_rows_after_a_rewind(filing: str) -> None:
    run = loop(budget=48, filing=filing)
    request = run.add(prompt(100), 20)
    for _ in range(6):
        run.step()
    run.preempt(request)
    run.drain()
    for length in (50, 33, 32, 99):
        run.run(prompt(length), 4)
    assert run.wrong_draft_rows == []


@pytest.mark.parametrize("part", ["target", "draft", "state", "companion"])
def test_35_restored_prefixes_lack_a_part(part: str) -> None:
    run = full_chain("token")
    blocks, key = run.blocks, key_at(run, 112)
    pools = {"target": blocks.groups[0], "draft": blocks.groups[1], "state": blocks.slots}
    evict(pools.get(part, blocks.companions), key)
    matched = 128 if part in ("state", "companion") else 96
    assert lookup(run, prompt(128)) == Reuse(96, min(matched, 112))
    assert lookup(run, prompt(113)) == Reuse(96, min(matched, 112))


def test_36_a_failed_admission_leaks_its_copy_slot() -> None:
    run = loop(slots=3, budget=128)
    run.run(prompt(40))
    running = [run.add(prompt(3, seed), 9) for seed in (1, 2)]
    run.step()
    assert run.blocks.slots.num_available == 1
    waiting = run.add(prompt(40), 2)
    assert lookup(run, prompt(40)) == Reuse(32, 32)
    for _ in range(3):
        assert run.step().waits == {waiting.request_id: "waits for a slot: 3 of 3 in use"}
        assert run.blocks.slots.num_available == 1 and lookup(run, prompt(40)) == Reuse(32, 32)
    run.drain()
    assert waiting.num_cached_tokens == 32 and all(len(r.output) == 9 for r in running)


@pytest.mark.parametrize(("pages", "fit"), [(9, 3), (11, 3), (12, 4)])
def test_38_two_kinds_of_memory_in_one_budget(pages: int, fit: int) -> None:
    """As many requests run at once as their pages allow, whatever a state weighs."""
    run = loop(pages=pages, slots=100, budget=256)
    for seed in range(6):
        run.add(prompt(33, seed), 15)
    assert len(run.step().chunks) == fit
    run.drain()
