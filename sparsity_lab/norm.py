"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = weight · x / sqrt(mean(x²) + eps) over the last axis, computed in float32, in x's dtype.

    Args:
        dim: width of the last axis.
        eps: added to the mean square.
    Source: arXiv 1910.07467.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * wide).to(x.dtype)
