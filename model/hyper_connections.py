"""mHC, manifold-constrained hyper-connections: the residual path of the trunk (two sites per layer).

Instead of one residual there are `hc_mult` streams. A site reads them as a weighted sum, and writes back
`post_j * y + sum_i C[i, j] * stream_i`, where C is made almost doubly stochastic by `hc_sinkhorn_iters` steps
of row and column normalisation (Sinkhorn). Columns are normalised last, so after the fixed number of steps
column sums are 1 and row sums only nearly: count and order are part of the model, C is not symmetric.

Everything here is float32; streams are stored in the activation dtype, rounded once per write.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import Glm5NextConfig
from model.norms import root_mean_square
from model.weights import WeightTree

POST_MULTIPLIER = 2.0  # fixed by the architecture, not a config field


@dataclass(frozen=True)
class SiteInput:
    """What a site hands to its layer, and what it needs to write the layer's output back."""

    x: Tensor  # [num_tokens, hidden] float32, the weighted sum of the streams
    post: Tensor  # [num_tokens, streams, 1] float32
    comb_t: Tensor  # [num_tokens, target stream, source stream] float32, C transposed
    streams: Tensor  # [num_tokens, streams, hidden] float32

    def write_back(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """y [num_tokens, hidden] -> new streams [num_tokens, streams, hidden] in `dtype`."""
        return torch.matmul(self.comb_t, self.streams).addcmul_(self.post, y.float().unsqueeze(1)).to(dtype)


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
        self.sums = SumMatrices.create(streams, self.eps, self.fn.device)

    def read(self, streams: Tensor) -> SiteInput:
        """streams [num_tokens, streams, hidden] in the activation dtype -> SiteInput."""
        n, wide = self.num_streams, streams.float()
        flat = wide.flatten(1)
        # A weightless RMS norm before the product is a division by one number per row after it.
        mapping = (flat @ self.fn.T).div_(root_mean_square(flat, self.rms_eps))
        mapping = torch.addcmul(self.base, mapping, self.scale)
        gates = torch.addcmul(self.gate_offset, mapping[:, : 2 * n].sigmoid(), self.gate_factor)
        x = torch.bmm(gates[:, None, :n], wide).squeeze(1)
        comb = sinkhorn(mapping[:, 2 * n :], self.sums, self.iterations)
        return SiteInput(x, gates[:, n:, None], comb.transpose(1, 2), wide)


@dataclass(frozen=True)
class SumMatrices:
    """Matrices that turn a flat C with a 1 appended, [.., n*n + 1], into its broadcast row or column sums plus
    `hc_eps` in one product: [n*n + 1, n*n], zeros and ones above a row of eps."""

    rows: Tensor
    columns: Tensor
    eps: float

    @classmethod
    def create(cls, n: int, eps: float, device: torch.device) -> "SumMatrices":
        eye, ones = torch.eye(n, device=device), torch.ones(n, n, device=device)
        eps_row = torch.full((1, n * n), eps, device=device)
        return cls(
            torch.cat([torch.kron(eye, ones), eps_row]), torch.cat([torch.kron(ones, eye), eps_row]), eps
        )


def sinkhorn(logits: Tensor, sums: SumMatrices, iterations: int) -> Tensor:
    """logits [num_tokens, n*n] float32, row-major [source, target] -> C [num_tokens, n, n] float32.

    Softmax over targets plus eps, one column normalisation, then `iterations` - 1 times rows and columns.
    """
    num_tokens, n = len(logits), round(logits.shape[1] ** 0.5)
    if num_tokens == 1 and n == 4 and logits.device.type == "cpu":
        return _sinkhorn_one_token(logits, sums.eps, iterations)
    with_one = torch.ones(num_tokens, n * n + 1, device=logits.device)
    comb, total = with_one[:, : n * n], torch.empty_like(logits)
    torch.add(logits.reshape(-1, n, n).softmax(-1).flatten(1), sums.eps, out=comb)
    comb.div_(torch.mm(with_one, sums.columns, out=total))
    for _ in range(iterations - 1):
        comb.div_(torch.mm(with_one, sums.rows, out=total))
        comb.div_(torch.mm(with_one, sums.columns, out=total))
    return comb.reshape(num_tokens, n, n)


def _sinkhorn_one_token(logits: Tensor, eps: float, iterations: int) -> Tensor:
    """`sinkhorn` of one token and four streams in plain floats: 78 tensor operations on 16 numbers would take a
    tenth of a small model's decode step. c_ij is `c{i}{j}`, source i, target j."""
    rows = logits.view(4, 4).softmax(-1).add_(eps).tolist()
    (c00, c01, c02, c03), (c10, c11, c12, c13), (c20, c21, c22, c23), (c30, c31, c32, c33) = rows
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
    return torch.tensor(
        [[[c00, c01, c02, c03], [c10, c11, c12, c13], [c20, c21, c22, c23], [c30, c31, c32, c33]]]
    )
