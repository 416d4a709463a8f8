"""Beside decodes, prefill takes its cap and no more, shares it, and starves nobody."""

import pytest

from tests.scheduler.simulation import Simulation, assert_right, engine, prompt, sizes


def loop(budget: int = 16, pages: int = 32, slots: int = 12, **options: object) -> Simulation:
    """Blocks of 16, and by default more slots than anybody wants."""
    return Simulation(engine("ours", 16, budget, pages=pages, slots=slots, **options))  # type: ignore[arg-type]


class TestMixed:
    """What prefill may take beside a decode."""

    def decoding(self, *lengths: int, **options: object) -> Simulation:
        """One request decodes; the others arrive after that."""
        run = loop(budget=256, pages=100, **options)
        run.add(prompt(4), 50)
        run.step()
        for seed, length in enumerate(lengths, 1):
            run.add(prompt(length, seed), 1)
        return run

    def test_one_prompt_takes_the_cap(self) -> None:
        run = self.decoding(200, mixed=64)
        assert [sizes(run.step())[1] for _ in range(4)] == [64, 64, 64, 8]

    def test_no_cap_at_zero_or_without_a_decode(self) -> None:
        assert sizes(self.decoding(200, mixed=0).step()) == {0: 1, 1: 200}
        run = loop(budget=256, mixed=64)
        run.add(prompt(200), 1)
        assert sizes(run.step()) == {0: 200}

    def test_no_prompt_takes_more_than_half_while_another_waits(self) -> None:
        run = self.decoding(200, 200, mixed=64)
        assert sizes(run.step()) == {0: 1, 1: 32, 2: 32}

    def test_what_a_short_prompt_leaves_goes_on(self) -> None:
        run = self.decoding(8, 200, 8, mixed=64)
        assert sizes(run.step()) == {0: 1, 1: 8, 2: 16, 3: 8}

    def test_a_running_prompt_shares_with_one_that_arrives(self) -> None:
        run = self.decoding(200, mixed=64)
        assert sizes(run.step()) == {0: 1, 1: 64}
        run.add(prompt(200, 7), 1)
        assert sizes(run.step()) == {0: 1, 1: 32, 2: 32}

    @pytest.mark.parametrize("mixed", [1, 2, 3, 15, 16, 17])
    def test_a_cap_below_the_grid_or_the_block_starves_nobody(self, mixed: int) -> None:
        run = self.decoding(50, 50, mixed=mixed)
        run.drain()
        assert_right(run)

    @pytest.mark.parametrize("preset", ["generic", "seed", "vllm-0.33", "ours"])
    @pytest.mark.parametrize(("budget", "mixed"), [(7, 0), (33, 0), (33, 9), (100, 40), (1000, 24)])
    def test_budgets_off_the_grid_and_blocks_wider_than_the_budget(
        self, preset: str, budget: int, mixed: int
    ) -> None:
        run = Simulation(engine(preset, 48, budget, pages=40, slots=20, mixed=mixed))
        requests = [run.add(prompt(length, seed), 30) for seed, length in enumerate((5, 100, 96, 97))]
        run.drain()
        assert all(len(request.output) == 30 for request in requests)
        assert_right(run)
