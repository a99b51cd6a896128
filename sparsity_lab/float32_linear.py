"""Linear layers of float32 weights on inputs of any dtype: what a 16-bit model's activations are read with.

bfloat16 holds 8 of float32's 24 digits, so a float32 weight is exactly a sum of three bfloat16 numbers. On a GPU their
products with bfloat16 inputs are exact too, and summed in float32: the digits of a float32 product at the speed of the
tensor cores, and no float32 copy of the input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PARTS = 3
MM_WIDENS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)  # 16-bit matrices multiply into float32 ones


def parts_of(x: Tensor) -> list[Tensor]:
    """Three bfloat16 tensors whose sum is x, float32 [...], the largest first."""
    parts, left = [], x
    for _ in range(PARTS):
        parts.append(left.bfloat16())
        left = left - parts[-1].float()
    return parts


def split_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., n] bfloat16 on a GPU times a float32 weight [m, n], float32 [..., m]."""
    parts = torch.cat(parts_of(weight)[::-1])  # the smallest first, for the sum
    products = torch.mm(x.flatten(0, -2), parts.T, out_dtype=torch.float32)
    return products.unflatten(-1, (PARTS, -1)).sum(1).unflatten(0, x.shape[:-1])


class Float32Linear(nn.Linear):
    """y = x Wᵀ without bias, float32 whatever the dtype of x."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        learns = torch.is_grad_enabled() and (self.weight.requires_grad or x.requires_grad)
        if x.dtype == torch.bfloat16 and x.is_cuda and not learns and MM_WIDENS:
            return split_product(x, self.weight)
        return F.linear(x.float(), self.weight)
