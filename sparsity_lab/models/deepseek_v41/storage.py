"""Low-precision storage of weights, as in DeepSeek V4.1's checkpoints.

fp8: e4m3 values [out, in] with one power-of-two scale (ue8m0) per block of 32 x 32, or per 32 along `in` for tables.
fp4: two e2m1 values a byte [out, in / 2], the first in the low half, with one power-of-two scale per 32 along `in`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsity_lab.quant import E2M1_MAX, E4M3_MAX, power_of_two_scale, round_e2m1

BLOCK = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """float32 [out, in] of a stored fp8 (float8_e4m3fn) or fp4 (int8 or uint8, packed) weight and its scale.

    Raises:
        ValueError: a storage type that is neither, or a scale that does not cover it.
    """
    if values.dtype in (torch.int8, torch.uint8):
        wide = unpack_fp4(values)
    elif values.dtype == torch.float8_e4m3fn:
        wide = values.float()
    else:
        raise ValueError(f"{values.dtype}: a scaled weight must be float8_e4m3fn or packed fp4 (int8)")
    factors = scale.float()
    for axis, size in enumerate(wide.shape):
        # an axis has one scale an entry (rows of fp4) or one a block
        block = next((b for b in (1, BLOCK) if -(-size // b) == scale.shape[axis]), None)
        if block is None:
            raise ValueError(
                f"scale {list(scale.shape)}: does not cover a weight of {list(wide.shape)} in blocks of 32"
            )
        factors = factors.repeat_interleave(block, dim=axis).narrow(axis, 0, size)
    return wide * factors


def quantise_fp8(weight: Tensor, rows: int = BLOCK) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn values and float8_e8m0fnu scales of a weight [out, in], blocks of `rows` x 32."""
    amax = _block_amax(weight.float(), rows)
    scale = power_of_two_scale(amax.clamp(min=1e-4) / E4M3_MAX)
    wide = scale.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    values = (weight.float() / wide).clamp(-E4M3_MAX, E4M3_MAX)
    return values.to(torch.float8_e4m3fn), scale.to(torch.float8_e8m0fnu)


def quantise_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packed int8 [out, in / 2] and float8_e8m0fnu scales [out, in / 32] of a weight [out, in].

    Raises:
        ValueError: `in` is no multiple of 32.
    """
    if weight.shape[1] % BLOCK:
        raise ValueError(f"a weight of {list(weight.shape)}: fp4 storage needs a width divisible by {BLOCK}")
    scale = power_of_two_scale(_block_amax(weight.float(), 1).clamp(min=E2M1_MAX * 2.0**-126) / E2M1_MAX)
    values = round_e2m1((weight.float() / scale.repeat_interleave(BLOCK, 1)).clamp(-E2M1_MAX, E2M1_MAX))
    grid = torch.tensor(_E2M1, device=weight.device)
    codes = torch.searchsorted(grid, values.abs()).to(torch.uint8) | (values.signbit().to(torch.uint8) << 3)
    low, high = codes.unflatten(1, (-1, 2)).unbind(-1)
    return (low | (high << 4)).view(torch.int8), scale.to(torch.float8_e8m0fnu)


def unpack_fp4(packed: Tensor) -> Tensor:
    """float32 [out, in] of packed e2m1 values [out, in / 2]."""
    codes = packed.view(torch.uint8)
    codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()
    grid = torch.tensor([*_E2M1, *(-v for v in _E2M1)], device=packed.device)
    return grid[codes]


def _block_amax(weight: Tensor, rows: int) -> Tensor:
    """Largest size in every block of `rows` x 32; the last blocks may be partial."""
    height, width = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -width % BLOCK, 0, -height % rows))
    return padded.abs().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, rows)).amax(dim=(1, 3))
