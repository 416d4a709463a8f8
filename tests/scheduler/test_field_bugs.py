"""One-token and fully cached prompts, labels, phantom hits and company in a step: as users of other engines saw it."""

import pytest

from tests.scheduler.simulation import Simulation, engine, prompt, reference

PUBLIC = ("generic", "seed", "vllm-0.33", "ours")


def loop(preset: str = "ours", budget: int = 4096, *, pages: int = 64, **options: object) -> Simulation:
    return Simulation(engine(preset, 16, budget, pages=pages, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", PUBLIC)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_d1_a_fully_cached_prompt_crashes_or_repeats(preset: str, length: int) -> None:
    run = loop(preset)
    outputs = [run.run(prompt(length), 4).output for _ in range(3)]
    assert outputs == [reference(prompt(length), 4)] * 3
    if preset == "ours":
        assert run.requests[2].num_cached_tokens == (length - 1) // 16 * 16


@pytest.mark.parametrize("preset", PUBLIC)
@pytest.mark.parametrize("free_chunk_ends", [False, True])
def test_d2_a_checkpoint_is_labelled_with_the_wrong_token_count(preset: str, free_chunk_ends: bool) -> None:
    run = loop(preset, budget=16, free_chunk_ends=free_chunk_ends)
    for _ in range(2):
        requests = [run.add(prompt(length, length), 4) for length in (50, 57, 61)]
        run.drain()
        assert [r.output for r in requests] == [reference(r.prompt, 4) for r in requests]


@pytest.mark.parametrize("filing", ["token", "drop", "key", "tag", "off"])
def test_d4_phantom_hits_after_eviction(filing: str) -> None:
    run = loop(pages=20, slots=6, filing=filing)
    for seed in range(5):
        for tokens in (prompt(192), prompt(200), prompt(288, seed + 1), [*prompt(100), 3, 3]):
            assert run.run(tokens, 3).output == reference(tokens, 3)
    assert run.blocks.groups[0].num_evictions and run.blocks.slots.num_evictions


@pytest.mark.parametrize("limit", [8, 16, 32])
@pytest.mark.parametrize("decoder_first", [False, True])
def test_d6_decoding_next_to_someone_elses_long_prefill(limit: int, decoder_first: bool) -> None:
    run = loop(budget=200, mixed=limit)
    long, short = prompt(limit * 10), prompt(3, 1)
    for tokens, count in sorted(
        [(short, 40), (long, 2)], key=lambda pair: len(pair[0]), reverse=not decoder_first
    ):
        run.add(tokens, count)
        if decoder_first:
            run.step()
    run.drain()
    assert all(r.output == reference(r.prompt, r.max_tokens) for r in run.requests.values())
