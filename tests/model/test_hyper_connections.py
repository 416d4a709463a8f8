"""An mHC site does what its definition says in float64: count, order, transpose, epsilons, float32."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from model.batch import Batch, Segment
from model.hyper_connections import HyperConnection
from model.norms import rms_norm
from tests import tiny
from tests.driver import Sequencer

N, HIDDEN, PREFIX = tiny.TINY.hc_mult, tiny.TINY.hidden_size, "layers.1.hc_ffn"
# A site's float32 sums of 256 terms of order 1 against float64; measured: 2e-6.
TOLERANCE = 1e-5


def site(fn: Tensor, base: Tensor, scale: Tensor) -> HyperConnection:
    overrides = {f"{PREFIX}_fn": fn, f"{PREFIX}_base": base, f"{PREFIX}_scale": scale}
    return HyperConnection(tiny.tree(overrides).at("layers.1"), "hc_ffn", tiny.TINY)


def random_site(std: float = 1.0) -> tuple[HyperConnection, "Oracle"]:
    """A site whose mapping has logits of about this standard deviation, and the same in float64."""
    fn = std * tiny.normal(N * (N + 2), N * HIDDEN) * (N * HIDDEN) ** -0.5
    base, scale = 0.1 * tiny.normal(N * (N + 2), seed=1), torch.tensor([0.8, 1.2, 1.0])
    return site(fn, base, scale), Oracle(fn.double(), base.double(), scale.double())


@dataclass(frozen=True)
class Oracle:
    """The definition, in float64; also with one mistake at a time."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    rms_eps: float = tiny.TINY.rms_norm_eps
    iterations: int = tiny.TINY.hc_sinkhorn_iters
    transposed: bool = False
    rows_last: bool = False

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams [num_tokens, N, hidden] -> x, post, C [source, target]."""
        eps = tiny.TINY.hc_eps
        flat = streams.double().flatten(1)
        m = (flat @ self.fn.T) / (flat.square().mean(1, keepdim=True) + self.rms_eps).sqrt()
        pre, post, logits = m.split([N, N, N * N], dim=1)
        pre = (pre * self.scale[0] + self.base[:N]).sigmoid() + eps
        post = 2 * (post * self.scale[1] + self.base[N : 2 * N]).sigmoid()
        c = (logits * self.scale[2] + self.base[2 * N :]).view(-1, N, N).softmax(2) + eps
        source, target = (2, 1) if self.rows_last else (1, 2)
        c = c / (c.sum(source, keepdim=True) + eps)
        for _ in range(self.iterations - 1):
            c = c / (c.sum(target, keepdim=True) + eps)
            c = c / (c.sum(source, keepdim=True) + eps)
        return torch.einsum("ti,tih->th", pre, streams.double()), post, c

    def write(self, streams: Tensor, y: Tensor) -> Tensor:
        _, post, c = self.read(streams)
        mix = "tji,tih->tjh" if self.transposed else "tij,tih->tjh"
        return post[..., None] * y.double()[:, None] + torch.einsum(mix, c, streams.double())


def deviation(hyper: HyperConnection, oracle: Oracle, streams: Tensor) -> float:
    y = tiny.normal(len(streams), HIDDEN, seed=7)
    written = hyper.read(streams).write_back(y, torch.float32)
    return (written - oracle.write(streams, y)).abs().max().item()


@pytest.mark.parametrize("num_tokens", [1, 130, 257])
def test_rows_do_not_depend_on_the_blocks_they_are_computed_in(num_tokens: int) -> None:
    """A single row takes a path of its own; more rows are taken 128 at a time."""
    hyper, oracle = random_site(4.0)
    streams = tiny.normal(num_tokens, N, HIDDEN, seed=5)
    assert deviation(hyper, oracle, streams) < TOLERANCE


@pytest.mark.parametrize("std", [0.5, 4.0])
def test_a_site_is_its_definition(std: float) -> None:
    hyper, oracle = random_site(std)
    streams = tiny.normal(50, N, HIDDEN, seed=2)
    x, _, _ = oracle.read(streams)
    torch.testing.assert_close(hyper.read(streams).x.double(), x, atol=TOLERANCE, rtol=0)
    assert deviation(hyper, oracle, streams) < TOLERANCE


@pytest.mark.parametrize(
    "mistake", [{"transposed": True}, {"rows_last": True}, {"iterations": 19}, {"iterations": 200}], ids=str
)
def test_a_wrong_mix_is_another_model(mistake: dict[str, int]) -> None:
    """C is not symmetric, and 20 steps have not converged for logits of this size."""
    hyper, oracle = random_site(std=6.0)
    assert deviation(hyper, replace(oracle, **mistake), tiny.normal(50, N, HIDDEN, seed=2)) > 100 * TOLERANCE


def test_the_norm_takes_rms_norm_eps_not_hc_eps() -> None:
    hyper, oracle = random_site()
    small = 2e-3 * tiny.normal(50, N, HIDDEN, seed=2)  # mean square 4e-6, between the two
    assert deviation(hyper, oracle, small) < TOLERANCE
    assert deviation(hyper, replace(oracle, rms_eps=tiny.TINY.hc_eps), small) > 100 * TOLERANCE


@pytest.mark.parametrize(("std", "row_error"), [(1.0, (0.0, 1e-3)), (6.0, (1e-3, 0.2))])
def test_columns_sum_to_one_and_rows_only_nearly(std: float, row_error: tuple[float, float]) -> None:
    """Columns are normalised last; the epsilon in each sum costs them hc_eps, float32 about as much again."""
    hyper, _ = random_site(std)
    comb = hyper.read(tiny.normal(500, N, HIDDEN, seed=3)).comb_t.transpose(1, 2)
    assert (comb.sum(1) - 1).abs().max() < 2e-6
    assert row_error[0] <= (comb.sum(2) - 1).abs().max() < row_error[1]


def test_identity_mix_is_an_ordinary_residual_network() -> None:
    """C = I, post = 1, pre = 1/4, equal streams."""
    config = tiny.TINY.first_layers(5)
    base = torch.zeros(N * (N + 2))
    base[:N] = torch.tensor(1 / N - config.hc_eps).logit()
    base[2 * N :] = 40 * torch.eye(N).flatten()
    overrides = {}
    for name in (f"layers.{i}.hc_{kind}" for i in range(5) for kind in ("attn", "ffn")):
        overrides |= {f"{name}_fn": torch.zeros(len(base), N * HIDDEN), f"{name}_base": base}
        overrides |= {f"{name}_scale": torch.ones(3)}
    trunk, _ = tiny.model(overrides, config)
    tokens = tiny.token_ids(30)
    hidden = Sequencer(trunk, 30).feed(tokens)
    cache = Sequencer(trunk, 30)
    batch = Batch(torch.tensor(tokens), (Segment(0, 30, 0, cache.slot, cache.table),))
    h = trunk.embed(batch.token_ids)
    for layer in trunk.layers:
        x = rms_norm(h, layer.input_norm, layer.eps)
        if layer.index in config.kda_layers:
            h = h + layer.mixer.forward(x, batch, cache.cache.kda[layer.index])
        else:
            h = h + layer.mixer.forward(x, batch, cache.cache.mla[layer.index])
        h = h + layer.ffn.forward(rms_norm(h, layer.post_attention_norm, layer.eps))
    # hc_eps leaves C off the identity by up to 4e-6 a site; ten sites, then five layers of amplification.
    torch.testing.assert_close(hidden, rms_norm(h, trunk.norm, trunk.eps), atol=5e-4, rtol=0)


def test_mapping_stays_float32_under_bfloat16_streams() -> None:
    hyper, oracle = random_site()
    streams = tiny.normal(50, N, HIDDEN, seed=2).bfloat16()
    read, y = hyper.read(streams), tiny.normal(50, HIDDEN)
    torch.testing.assert_close(read.x.double(), oracle.read(streams)[0], atol=TOLERANCE, rtol=0)
    assert deviation(hyper, oracle, streams) < TOLERANCE
    # One rounding per write: the float32 result, rounded.
    assert torch.equal(read.write_back(y, torch.bfloat16), read.write_back(y, torch.float32).bfloat16())
