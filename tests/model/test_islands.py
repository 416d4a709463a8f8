"""What must be float32 is float32 in the built model too, and the two epsilons keep their places."""

import torch

from model.hyper_connections import HyperConnection, sinkhorn, sinkhorn_floats
from model.kda import Kda
from model.moe import Router
from model.norms import INDEXER_LAYER_NORM_EPS, layer_norm
from tests import tiny

SPARSE = "layers.4"


def test_router_bias_keeps_its_bits_and_logits_are_float32_under_bfloat16_weights() -> None:
    # Field bug A4 at the Router itself: biases near 7 lose 3 decimal digits in bfloat16.
    bias = 6.817 + 0.246 * torch.rand(tiny.TINY.n_routed_experts, generator=torch.Generator().manual_seed(0))
    gate = tiny.normal(tiny.TINY.n_routed_experts, tiny.TINY.hidden_size, seed=1).bfloat16().float()
    names = (f"{SPARSE}.mlp.gate.e_score_correction_bias", f"{SPARSE}.mlp.gate.weight")
    tree = tiny.tree(dict(zip(names, (bias, gate), strict=True)))
    router = Router(tree.at(f"{SPARSE}.mlp"), tiny.TINY, torch.bfloat16)
    assert torch.equal(router.bias, bias)
    x = 0.3 * tiny.normal(1000, tiny.TINY.hidden_size, seed=2)
    experts, _ = router.route(x)
    scores = (x.double() @ gate.double().T).sigmoid() + bias.double()
    assert torch.equal(
        experts.sort().values, scores.topk(tiny.TINY.num_experts_per_tok).indices.sort().values
    )


def test_mhc_base_and_scale_keep_their_bits_in_the_built_site() -> None:
    outputs = tiny.TINY.hc_mult * (tiny.TINY.hc_mult + 2)
    base, scale = torch.full((outputs,), 1.0001), torch.tensor([0.7371, 1.0001, 0.7371])
    tree = tiny.tree({"layers.0.hc_attn_base": base, "layers.0.hc_attn_scale": scale})
    site = HyperConnection(tree.at("layers.0"), "hc_attn", tiny.TINY)
    assert torch.equal(site.base, base)
    assert torch.equal(site.scale[[0, tiny.TINY.hc_mult, -1]], scale)


def test_one_token_sinkhorn_is_the_batched_one() -> None:
    # Strong logits: rows have not converged after 20 steps, so one step more or less would show.
    logits = 8 * tiny.normal(1, 16, seed=3)
    for iterations in (1, 2, 19, 20):
        one = torch.tensor(sinkhorn_floats(logits[0].tolist(), 1e-6, iterations)).view(1, 4, 4)
        torch.testing.assert_close(one, sinkhorn(logits, 1e-6, iterations), atol=2e-6, rtol=0)
    assert (sinkhorn(logits, 1e-6, 20) - sinkhorn(logits, 1e-6, 19)).abs().max() > 1e-5


def test_indexer_layer_norm_has_its_own_epsilon() -> None:
    x = 1e-3 * tiny.normal(4, 16, seed=4)  # variance near the epsilon
    weight, bias = torch.ones(16), torch.zeros(16)
    wide = x.double()
    expected = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(layer_norm(x, weight, bias).double(), expected, atol=1e-5, rtol=0)
    assert INDEXER_LAYER_NORM_EPS == 1e-6


def test_beta_and_gate_are_float32_under_bfloat16_products() -> None:
    kda = Kda(tiny.tree().at("layers.0.self_attn"), tiny.TINY, torch.bfloat16)
    f_a, b = tiny.normal(5, kda.head_dim, seed=5).bfloat16(), tiny.normal(5, kda.heads, seed=6).bfloat16()
    inputs = kda._inputs(tiny.normal(5, 3 * tiny.TINY.linear_width, seed=7), f_a, b)
    assert inputs.beta.dtype == inputs.g.dtype == torch.float32
    assert torch.equal(inputs.beta, b.float().sigmoid())
