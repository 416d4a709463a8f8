"""Feed-forward layers: the router, the clamped SwiGLU, the dense MLP and the mixture of experts.

One function, `clamped_swiglu`, serves dense layers, routed experts and the shared expert: the gate is limited
from above only, up on both sides, before the activation (`swiglu_limit`). The router works in float32: the
bias takes part in choosing experts and never in their weights; weights are normalised sigmoid scores times
`routed_scaling_factor`, applied once, here; ties choose the lowest expert.
"""

import torch
from torch import Tensor
from torch.nn import functional

from model.config import Glm5NextConfig
from model.formats import Weight
from model.linear import Linear
from model.weights import WeightTree

DENOMINATOR_EPS = 1e-20  # fixed by the architecture, not a config field
# Groups of rows are padded to a multiple of this. Matrix kernels treat fewer rows differently; with padding, a
# row's result does not depend on how many others chose the same expert.
ROW_PADDING = 16
FEW_ROWS_BYTES = 16 << 20  # of experts that may be expanded together, which is faster than one by one


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), elementwise; overwrites `gate` and `up`."""
    return functional.silu(gate.clamp_(max=limit), inplace=True).mul_(up.clamp_(-limit, limit))


class Mlp:
    """Dense MLP, and the shared expert: x [num_tokens, hidden] -> [num_tokens, hidden]."""

    def __init__(self, tree: WeightTree, config: Glm5NextConfig, dtype: torch.dtype) -> None:
        self.gate_up = tree.pair("gate_proj", "up_proj")
        self.down, self.limit, self.dtype = tree.linear("down_proj"), config.swiglu_limit, dtype

    def forward(self, x: Tensor) -> Tensor:
        return swiglu_mlp(x.to(self.dtype), self.gate_up, self.down, self.limit)


def swiglu_mlp(x: Tensor, gate_up: Weight, down: Weight, limit: float) -> Tensor:
    """x [rows, hidden], gate_up [2 (x) intermediate, hidden], down [hidden, intermediate] -> [rows, hidden]."""
    gate, up = functional.linear(x, gate_up.expand(x.dtype).flatten(0, -2)).chunk(2, dim=-1)
    return functional.linear(clamped_swiglu(gate, up, limit), down.expand(x.dtype))


class Router:
    """Chooses `num_experts_per_tok` experts per token."""

    def __init__(self, tree: WeightTree, config: Glm5NextConfig, dtype: torch.dtype) -> None:
        self.gate, self.bias = Linear(tree.linear("gate"), dtype), tree.tensor("gate.e_score_correction_bias")
        self.top_k, self.scaling = config.num_experts_per_tok, config.routed_scaling_factor

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [num_tokens, hidden] -> experts [num_tokens, top_k] int64, weights [num_tokens, top_k] float32."""
        return choose_experts(self.gate.in_float32(x), self.bias, self.top_k, self.scaling)


def choose_experts(logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """logits [num_tokens, experts] float32, bias [experts] float32 -> (experts, weights), see Router.route."""
    scores = logits.sigmoid()
    experts = (scores + bias).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, experts)
    return experts, weights / (weights.sum(1, keepdim=True) + DENOMINATOR_EPS) * scaling


class Moe:
    """Routed experts and the shared expert: x [num_tokens, hidden] -> [num_tokens, hidden] float32."""

    def __init__(self, tree: WeightTree, config: Glm5NextConfig, dtype: torch.dtype) -> None:
        self.router = Router(tree, config, dtype)
        self.shared = Mlp(tree.at("shared_experts"), config, dtype)
        # [experts, 2, intermediate, hidden]: gate and up of an expert side by side, each with its own scales
        self.gate_up, self.down = tree.experts("gate_proj", "up_proj"), tree.experts("down_proj")
        self.limit, self.dtype = config.swiglu_limit, dtype
        self.expanded_bytes = 3 * config.hidden_size * config.moe_intermediate_size * dtype.itemsize

    def forward(self, x: Tensor) -> Tensor:
        experts, weights = self.router.route(x)
        x = x.to(self.dtype)
        few = experts.numel() * self.expanded_bytes <= FEW_ROWS_BYTES
        routed = self._few_rows(x, experts, weights) if few else self._by_expert(x, experts, weights)
        return routed + self.shared.forward(x)

    def _few_rows(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Every row through every expert that one of them chose, as one batch: expanding the experts is what costs."""
        hit, place = experts.unique(return_inverse=True)
        gate_up = self.gate_up.select(hit).expand(self.dtype).flatten(1, 2)
        gate, up = torch.bmm(x.expand(len(hit), -1, -1), gate_up.transpose(1, 2)).chunk(2, dim=2)
        down = self.down.select(hit).expand(self.dtype)
        outputs = torch.bmm(clamped_swiglu(gate, up, self.limit), down.transpose(1, 2))
        chosen = outputs[place, torch.arange(len(x), device=x.device).unsqueeze(1)]  # [rows, top_k, hidden]
        return torch.bmm(weights.unsqueeze(1), chosen.float()).squeeze(1)

    def _by_expert(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Many rows: one expert expanded at a time, its rows together, sums in expert order."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        order = experts.flatten().sort(stable=True)
        tokens = functional.pad(order.indices // experts.shape[1], (0, ROW_PADDING))
        pair_weights = weights.flatten()[order.indices].unsqueeze(1)
        hit, counts = order.values.unique_consecutive(return_counts=True)
        begin = 0
        for expert, count in zip(hit.tolist(), counts.tolist(), strict=True):
            # The padding reads rows of the experts after this one; their results are dropped.
            padded = x.index_select(0, tokens[begin : begin + count + -count % ROW_PADDING])
            result = swiglu_mlp(padded, self.gate_up.select(expert), self.down.select(expert), self.limit)
            weighted = result[:count].float() * pair_weights[begin : begin + count]
            out.index_add_(0, tokens[begin : begin + count], weighted)
            begin += count
        return out
