"""`eval` reports the model's own loss on a text, whatever the token budget of a step."""

from pathlib import Path

import pytest
import torch

from engine.llm import EMBEDDED_MODEL
from engine.text import Tokenizer
from tests import driver
from tests.command import run_cli

TEXT = (
    "Emma Woodhouse, handsome, clever, and rich, with a comfortable home and happy disposition, seemed to"
    " unite some of the best blessings of existence; “and had lived nearly twenty-one years in the world”"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def direct_losses(window: int) -> list[torch.Tensor]:
    """Nats of every predicted token per window, each window through the model at once."""
    tokenizer, model = Tokenizer.load(EMBEDDED_MODEL), driver.load_model(EMBEDDED_MODEL)[0]
    assert tokenizer is not None
    losses = []
    for ids in driver.chunked(tokenizer.encode(TEXT), window):
        log_probs = driver.logits(model, ids).log_softmax(-1)[:-1]
        losses.append(-log_probs.gather(1, torch.tensor(ids[1:], dtype=torch.int64).unsqueeze(1)))
    return losses


@pytest.mark.parametrize("budget", [16, 4096])
@pytest.mark.parametrize("window", [20, 1024])
def test_numbers_are_the_models(
    capsys: pytest.CaptureFixture[str], file: Path, window: int, budget: int
) -> None:
    options = ("--window", window, "--max-batched-tokens", budget, "--dtype", "float32")
    report = run_cli(capsys, "eval", file, *options, "--json").document
    windows = direct_losses(window)
    losses, num_bytes = torch.cat(windows), len(TEXT.encode())
    assert (report["model"], report["tokens"], report["bytes"]) == (
        str(EMBEDDED_MODEL),
        len(losses),
        num_bytes,
    )
    # float32 sums in another order, averaged.
    assert report["nats_per_token"] == pytest.approx(float(losses.mean()), abs=1e-4)
    per_byte = float(losses.mean()) * (len(losses) + len(windows)) / num_bytes
    assert report["nats_per_byte"] == pytest.approx(per_byte, abs=1e-4)
    assert report["tokens_per_s"] > 0


def test_the_line_for_people_rounds_the_document(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    report = run_cli(capsys, "eval", file, "--json").document
    line = run_cli(capsys, "eval", file).out
    assert line.startswith(
        f"{report['nats_per_token']:.4f} nats per token, {report['nats_per_byte']:.4f} per"
    )
    assert f"({report['tokens']} tokens in windows of 1024," in line
