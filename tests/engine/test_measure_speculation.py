"""The measured parts of a step, speeds and the ceiling follow from each other."""

import pytest
import torch
from torch import Tensor

from model.glm5_next import Glm5Next
from tests.measure_speculation import PARTS, Timed, measure
from tests.scripted import TINY


def test_figures_follow_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trunk and draft layer agree on one token for ever: seven decode tokens a prompt, in seven steps or in two."""

    def logits(self: Glm5Next, hidden: Tensor) -> Tensor:
        return torch.eye(self.config.vocab_size)[70].expand(len(hidden), -1)

    monkeypatch.setattr(Glm5Next, "logits", logits)
    found = measure([Timed(TINY, 0), Timed(TINY, 3)], [[5, 9, 33], [7] * 20], 8, temperature=0.0)
    assert (found["acceptance"], found["mean_accepted_length"]) == ([1, 1, 1], 3.5)
    plain, drafting = found["ms_per_step"]["depth 0"], found["ms_per_step"]["depth 3"]
    # What a prompt took is in neither: parts that held it would leave less than nothing for the rest.
    assert min(drafting.values()) > 0 and plain["other"] > 0
    assert [name for name, ms in plain.items() if not ms] == ["catch_up", "draft"]
    ceiling = 3.5 * (plain["verify"] + plain["accept"]) / sum(drafting[name] for name in PARTS)
    assert found["ceiling"] == pytest.approx(ceiling)
    assert found["ratio"] == pytest.approx(found["tokens_per_s"][1] / found["tokens_per_s"][0])
    assert found["ratio_over_ceiling"] == pytest.approx(found["ratio"] / ceiling)
    steps_ms = [sum(costs.values()) for costs in (plain, drafting)]
    assert found["tokens_per_s"] == pytest.approx([1e3 / steps_ms[0], 3.5e3 / steps_ms[1]])
