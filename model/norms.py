"""Normalisations. Every reduction and product is float32; the result is rounded once, by whoever stores it.

Two epsilons exist side by side: `rms_norm_eps` (1e-5) in every RMS norm, 1e-6 in the indexer's LayerNorm and
in the l2 norm of KDA's q and k. They are not interchangeable.
"""

import torch
from torch import Tensor

INDEXER_LAYER_NORM_EPS = 1e-6
L2_NORM_EPS = 1e-6


def mean_square(x: Tensor) -> Tensor:
    """x [..., width] float32 -> [..., 1]; by the vector norm, which reads x once and stores nothing its size."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., width], weight [width] float32 -> [..., width] float32: weight * x / sqrt(mean(x^2) + eps)."""
    x = x.float()
    return (x * torch.rsqrt(mean_square(x).add_(eps))).mul_(weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [..., width], weight and bias [width] float32 -> float32; mean-centred, `INDEXER_LAYER_NORM_EPS`."""
    return torch.nn.functional.layer_norm(x.float(), weight.shape, weight, bias, INDEXER_LAYER_NORM_EPS)


def l2_norm(x: Tensor) -> Tensor:
    """x [..., width] float32 -> x / sqrt(sum(x^2) + 1e-6) over the last axis."""
    return x * torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(L2_NORM_EPS))
