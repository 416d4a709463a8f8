"""Normalisations. Every reduction and product is float32; the result is rounded once, by whoever stores it.

Two epsilons exist side by side: `rms_norm_eps` (1e-5) in every RMS norm, 1e-6 in the indexer's LayerNorm and
in the l2 norm of KDA's q and k. They are not interchangeable.
"""

import functools

import torch
from torch import Tensor

INDEXER_LAYER_NORM_EPS = 1e-6
L2_NORM_EPS = 1e-6


def root_mean_square(x: Tensor, eps: float) -> Tensor:
    """x [..., width] float32 -> sqrt(mean(x^2) + eps), [..., 1]; reads x once and stores nothing its size."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(x.shape[-1] ** -0.5)
    return torch.hypot(norm, _scalar(eps**0.5, x.device))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., width], weight [width] float32 -> [..., width] float32: weight * x / sqrt(mean(x^2) + eps)."""
    x = x.float()
    return (x / root_mean_square(x, eps)).mul_(weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [..., width], weight and bias [width] float32 -> float32; mean-centred, `INDEXER_LAYER_NORM_EPS`."""
    return torch.nn.functional.layer_norm(x.float(), weight.shape, weight, bias, INDEXER_LAYER_NORM_EPS)


def l2_norm(x: Tensor) -> Tensor:
    """x [..., width] float32 -> x / sqrt(sum(x^2) + 1e-6) over the last axis."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.hypot(norm, _scalar(L2_NORM_EPS**0.5, x.device))


@functools.cache
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)
