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
from model.norms import mean_square
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
        self.sums = SumMatrices.create(streams, self.eps, self.fn.device)

    def read(self, streams: Tensor) -> SiteInput:
        """streams [num_tokens, streams, hidden] in the activation dtype -> SiteInput."""
        n, wide = self.num_streams, streams.float()
        flat = wide.flatten(1)
        # A weightless RMS norm before the product is a division by one number per row after it.
        mapping = (flat @ self.fn.T).mul_(torch.rsqrt(mean_square(flat).add_(self.rms_eps)))
        mapping = torch.addcmul(self.base, mapping, self.scale)
        pre, post, logits = mapping.split([n, n, n * n], dim=1)
        x = torch.bmm((pre.sigmoid() + self.eps).unsqueeze(1), wide).squeeze(1)
        comb = sinkhorn(logits, self.sums, self.iterations)
        return SiteInput(x, (POST_MULTIPLIER * post.sigmoid()).unsqueeze(2), comb.transpose(1, 2), wide)


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
    with_one = torch.ones(num_tokens, n * n + 1, device=logits.device)
    comb, total = with_one[:, : n * n], torch.empty_like(logits)
    torch.add(logits.view(-1, n, n).softmax(-1).flatten(1), sums.eps, out=comb)
    comb.div_(torch.mm(with_one, sums.columns, out=total))
    for _ in range(iterations - 1):
        comb.div_(torch.mm(with_one, sums.rows, out=total))
        comb.div_(torch.mm(with_one, sums.columns, out=total))
    return comb.reshape(num_tokens, n, n)
