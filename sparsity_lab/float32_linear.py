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


def parts_of(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Three 16-bit tensors whose sum is x, float32 [...], the largest first."""
    parts, left = [], x
    for _ in range(PARTS):
        parts.append(left.to(dtype))
        left = left - parts[-1].float()
    return parts


def split_product(x: Tensor, parts: Tensor) -> Tensor:
    """x [..., n] bfloat16 on a GPU times a weight in parts [3 * m, n], the smallest first, float32 [..., m]."""
    products = torch.mm(x.flatten(0, -2), parts.T, out_dtype=torch.float32)
    return products.unflatten(-1, (PARTS, -1)).sum(1).unflatten(0, x.shape[:-1])


class Float32Linear(nn.Linear):
    """y = x Wᵀ without bias, float32 whatever the dtype of x."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, bias=False)
        self._split: tuple[tuple[int, int], Tensor] | None = None  # parts of a weight that is no longer trained

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if x.dtype != torch.bfloat16 or not x.is_cuda or weight.requires_grad or not _mm_widens():
            return F.linear(x.float(), weight)
        key = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        if self._split is None or self._split[0] != key:
            self._split = key, torch.cat(parts_of(weight)[::-1])
        return split_product(x, self._split[1])


def _mm_widens() -> bool:
    """Whether this torch multiplies 16-bit matrices into float32 ones."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)
