"""mHC, manifold-constrained hyper-connections: the residual path of the trunk (two sites per layer).

Instead of one residual there are `hc_mult` streams. A site reads them as a weighted sum, and writes back
`post_j * y + sum_i C[i, j] * stream_i`, where C is made almost doubly stochastic by `hc_sinkhorn_iters` steps
of row and column normalisation (Sinkhorn). Columns are normalised last, so after the fixed number of steps
column sums are 1 and row sums only nearly: count and order are part of the model, C is not symmetric.

Everything here is float32; streams are stored in the activation dtype, rounded once per write.
"""

import math
from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import Glm5NextConfig
from model.norms import root_mean_square
from model.weights import WeightTree

POST_MULTIPLIER = 2.0  # fixed by the architecture, not a config field
ROW_BLOCK = 128
FEW_TOKENS = 8  # up to here plain floats are faster


@dataclass(frozen=True)
class SiteInput:
    """What a site hands to its layer, and what it needs to write the layer's output back."""

    x: Tensor  # [num_tokens, hidden] float32, the weighted sum of the streams
    post: Tensor  # [num_tokens, streams, 1] float32
    comb_t: Tensor  # [num_tokens, target stream, source stream] float32, C transposed
    streams: Tensor  # [num_tokens, streams, hidden] float32

    def write_back(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """y [num_tokens, hidden] -> new streams [num_tokens, streams, hidden] in `dtype`."""
        if len(y) == 1:
            new = torch.addmm(self.post[0] * y, self.comb_t[0], self.streams[0])
            return new.unsqueeze(0).to(dtype)
        out = torch.empty_like(self.streams)
        parts = (out, self.comb_t, self.streams, self.post, y.float().unsqueeze(1))
        for new, comb_t, streams, post, own in zip(*map(row_blocks, parts), strict=True):
            torch.bmm(comb_t, streams, out=new).addcmul_(post, own)
        return out.to(dtype)


def row_blocks(x: Tensor) -> tuple[Tensor, ...]:
    """x [num_tokens, ...] in blocks of rows that stay in a CPU's cache from one operation to the next."""
    return x.split(ROW_BLOCK) if x.device.type == "cpu" else (x,)


class HyperConnection:
    """One site: `hc_attn_*` or `hc_ffn_*` of a layer."""

    def __init__(self, tree: WeightTree, prefix: str, config: Glm5NextConfig) -> None:
        streams = self.num_streams = config.hc_mult
        self.fn = tree.tensor(f"{prefix}_fn")  # [2 * streams + streams^2, streams * hidden]
        self.base = tree.tensor(f"{prefix}_base")
        pre, post, comb = tree.tensor(f"{prefix}_scale")
        self.scale = torch.cat([pre.expand(streams), post.expand(streams), comb.expand(streams**2)])
        self.eps, self.rms_eps, self.iterations = config.hc_eps, config.rms_norm_eps, config.hc_sinkhorn_iters
        # Reading weights are sigmoid + hc_eps, writing weights POST_MULTIPLIER * sigmoid.
        ones = self.base.new_ones(streams)
        self.gate_factor = torch.cat([ones, POST_MULTIPLIER * ones])
        self.gate_offset = torch.cat([self.eps * ones, 0 * ones])
        self.base_floats, self.scale_floats = self.base.tolist(), self.scale.tolist()

    def read(self, streams: Tensor) -> SiteInput:
        """streams [num_tokens, streams, hidden] in the activation dtype -> SiteInput."""
        n, wide = self.num_streams, streams.float()
        if len(streams) <= FEW_TOKENS and n == 4 and streams.device.type == "cpu":
            return self._read_few_tokens(wide)
        x, gates, logits = map(torch.cat, zip(*map(self._weigh, row_blocks(wide)), strict=True))
        comb = sinkhorn(logits, self.eps, self.iterations)
        return SiteInput(x, gates[:, n:, None], comb.transpose(1, 2), wide)

    def _weigh(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams [rows, streams, hidden] float32 -> x, reading and writing weights, logits of C."""
        n, flat = self.num_streams, streams.flatten(1)
        # A weightless RMS norm before the product is a division by one number per row after it.
        mapping = (flat @ self.fn.T).div_(root_mean_square(flat, self.rms_eps))
        mapping = torch.addcmul(self.base, mapping, self.scale)
        gates = torch.addcmul(self.gate_offset, mapping[:, : 2 * n].sigmoid(), self.gate_factor)
        return torch.bmm(gates[:, None, :n], streams).squeeze(1), gates, mapping[:, 2 * n :]

    def _read_few_tokens(self, streams: Tensor) -> SiteInput:
        """`read` of [n, 4, hidden] float32 in plain floats, token by token: a hundred tensor operations on 24 numbers
        each would take a sixth of a small model's decode step."""
        flat, sites = streams.flatten(1), []
        norms = torch.linalg.vector_norm(flat, dim=1).tolist()
        for norm, products in zip(norms, (flat @ self.fn.T).tolist(), strict=True):
            factor = 1 / math.hypot(norm * flat.shape[1] ** -0.5, self.rms_eps**0.5)
            terms = zip(self.base_floats, products, self.scale_floats, strict=True)
            mapping = [base + product * factor * scale for base, product, scale in terms]
            gates = [0.5 + 0.5 * math.tanh(0.5 * x) for x in mapping[:8]]  # sigmoids that can't overflow
            sites += [gate + self.eps for gate in gates[:4]]
            sites += [POST_MULTIPLIER * gate for gate in gates[4:]]
            sites += sinkhorn_floats(mapping[8:], self.eps, self.iterations)
        numbers = torch.frombuffer(array("f", sites), dtype=torch.float32).view(-1, 6, 4)
        x = torch.bmm(numbers[:, :1], streams).squeeze(1)
        return SiteInput(x, numbers[:, 1].unsqueeze(2), numbers[:, 2:].transpose(1, 2), streams)


def sinkhorn(logits: Tensor, eps: float, iterations: int) -> Tensor:
    """logits [num_tokens, n*n] float32, row-major [source, target] -> C [num_tokens, n, n] float32.

    Softmax over targets plus eps, one column normalisation, then `iterations` - 1 times rows and columns.
    """
    n = round(logits.shape[1] ** 0.5)
    # [source, target, num_tokens]: tokens last, so that every operation runs along them.
    comb = logits.T.reshape(n, n, -1).softmax(1).add_(eps)
    comb.div_(comb.sum(0, keepdim=True).add_(eps))
    for _ in range(iterations - 1):
        comb.div_(comb.sum(1, keepdim=True).add_(eps))
        comb.div_(comb.sum(0, keepdim=True).add_(eps))
    return comb.permute(2, 0, 1).contiguous()


def sinkhorn_floats(logits: list[float], eps: float, iterations: int) -> list[float]:
    """`sinkhorn` of one token and four streams: 16 logits -> 16 numbers. c_ij is `c{i}{j}`, source i, target j."""
    c00, c01, c02, c03 = _softmax_floats(eps, *logits[:4])
    c10, c11, c12, c13 = _softmax_floats(eps, *logits[4:8])
    c20, c21, c22, c23 = _softmax_floats(eps, *logits[8:12])
    c30, c31, c32, c33 = _softmax_floats(eps, *logits[12:])
    for step in range(iterations):
        if step:
            r0, r1 = 1 / (c00 + c01 + c02 + c03 + eps), 1 / (c10 + c11 + c12 + c13 + eps)
            r2, r3 = 1 / (c20 + c21 + c22 + c23 + eps), 1 / (c30 + c31 + c32 + c33 + eps)
            c00, c01, c02, c03 = c00 * r0, c01 * r0, c02 * r0, c03 * r0
            c10, c11, c12, c13 = c10 * r1, c11 * r1, c12 * r1, c13 * r1
            c20, c21, c22, c23 = c20 * r2, c21 * r2, c22 * r2, c23 * r2
            c30, c31, c32, c33 = c30 * r3, c31 * r3, c32 * r3, c33 * r3
        r0, r1 = 1 / (c00 + c10 + c20 + c30 + eps), 1 / (c01 + c11 + c21 + c31 + eps)
        r2, r3 = 1 / (c02 + c12 + c22 + c32 + eps), 1 / (c03 + c13 + c23 + c33 + eps)
        c00, c01, c02, c03 = c00 * r0, c01 * r1, c02 * r2, c03 * r3
        c10, c11, c12, c13 = c10 * r0, c11 * r1, c12 * r2, c13 * r3
        c20, c21, c22, c23 = c20 * r0, c21 * r1, c22 * r2, c23 * r3
        c30, c31, c32, c33 = c30 * r0, c31 * r1, c32 * r2, c33 * r3
    return [c00, c01, c02, c03, c10, c11, c12, c13, c20, c21, c22, c23, c30, c31, c32, c33]


def _softmax_floats(eps: float, a: float, b: float, c: float, d: float) -> tuple[float, float, float, float]:
    top = max(a, b, c, d)
    a, b, c, d = math.exp(a - top), math.exp(b - top), math.exp(c - top), math.exp(d - top)
    factor = 1 / (a + b + c + d)
    return a * factor + eps, b * factor + eps, c * factor + eps, d * factor + eps
