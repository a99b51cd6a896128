"""Block-wise fake quantisation (quantise and dequantise) and the Hadamard rotation that may precede it.

Shapes: any leading axes, then d channels, cut into blocks that share one scale. The result equals, bit for bit, what
real low-precision storage would give back. Gradients pass straight through, so a quantised indexer stays trainable.

Sources: OCP Microscaling formats (MXFP4, MXFP8) for the power-of-two scales, the published DeepSeek V3.2 and V4.1
inference code for floors, clamps and block widths; `shared/goldens/README.md` states them exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

QuantFormat = Literal["none", "fp4_ue8m0", "fp4_e4m3", "fp8_ue8m0", "fp8_e4m3_128"]
E2M1_MAX = 6.0
E4M3_MAX = 448.0


@dataclass(frozen=True)
class _Format:
    block: int  # channels that share a scale
    largest: float  # largest value of the element format
    floor: float  # smallest amax a scale is made from, so that an all-zero block has one
    element: Callable[[Tensor], Tensor]  # float32 in [-largest, largest] -> nearest representable
    scale: Callable[[Tensor], Tensor]  # ideal scale amax / largest -> stored scale


def round_e2m1(v: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6, ties to the even code.

    The grid is even within [0, 2], [2, 4] and [4, 6]; on each piece the even code is the even multiple of the step, so
    round-half-even does it.
    """
    size = v.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.round(v / step) * step


def _round_e4m3(v: Tensor) -> Tensor:
    """Nearest float8 e4m3 value, ties to even; |v| ≤ 448."""
    return v.to(torch.float8_e4m3fn).float()


def power_of_two_scale(v: Tensor) -> Tensor:
    """2^ceil(log2 v) of positive normal float32, from the bits: log2() in float32 is wrong just above powers of two."""
    bits = v.contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    return (exponent.clamp(max=255) << 23).view(torch.float32)


def _e4m3_scale(v: Tensor) -> Tensor:
    return _round_e4m3(v.clamp(max=E4M3_MAX))


def _float32_scale(v: Tensor) -> Tensor:
    return v


_FORMATS: dict[str, _Format] = {
    "fp4_ue8m0": _Format(32, E2M1_MAX, E2M1_MAX * 2.0**-126, round_e2m1, power_of_two_scale),
    "fp4_e4m3": _Format(16, E2M1_MAX, E2M1_MAX * 2.0**-9, round_e2m1, _e4m3_scale),
    "fp8_ue8m0": _Format(32, E4M3_MAX, 1e-4, _round_e4m3, power_of_two_scale),
    "fp8_e4m3_128": _Format(128, E4M3_MAX, 1e-4, _round_e4m3, _float32_scale),
}


def check_format(fmt: str, width: int, key: str = "quant", width_key: str = "channels") -> None:
    """Raise ValueError unless `fmt` exists and its blocks divide `width` channels; the keys are what an error calls
    them."""
    if fmt not in get_args(QuantFormat):
        raise ValueError(f"{key}={fmt!r}: must be one of {get_args(QuantFormat)}")
    block = 1 if fmt == "none" else _FORMATS[fmt].block
    if fmt != "none" and (width < 1 or width % block):
        raise ValueError(f"{width_key}={width}: must be a multiple of {block}, the block of {key}={fmt!r}")


def fake_quant(x: Tensor, fmt: QuantFormat) -> Tensor:
    """Quantise blocks of channels and dequantise again.

    Args:
        x: floating [..., d].
        fmt: "none" (x itself) · "fp4_ue8m0" (e2m1, power-of-two scale per 32) · "fp4_e4m3" (e2m1, e4m3 scale per 16) ·
            "fp8_ue8m0" (e4m3, power-of-two scale per 32) · "fp8_e4m3_128" (e4m3, float32 scale amax/448 per 128).
    Returns:
        The shape and dtype of x; computed in float32. A block that holds NaN or infinity becomes NaN as a whole: it has
        no scale, and the fault would otherwise turn into zeros unseen.
    Raises:
        ValueError: unknown format, or d not divisible by its block.
    """
    check_format(fmt, x.shape[-1])
    if fmt == "none":
        return x
    return _StraightThrough.apply(x, _FORMATS[fmt])


def _quantise(x: Tensor, fmt: _Format) -> Tensor:
    blocks = x.float().unflatten(-1, (-1, fmt.block))
    amax = blocks.abs().amax(-1, keepdim=True)
    # a tensor divisor: CUDA turns division by a number into a product with its reciprocal, one unit off the CPU
    scale = fmt.scale(amax.clamp(min=fmt.floor) / torch.full_like(amax, fmt.largest))
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    # an e4m3 scale may have been rounded down, and then the block's largest values exceed the grid
    values = fmt.element((blocks / scale).clamp(-fmt.largest, fmt.largest))
    return (values * scale).flatten(-2).to(x.dtype)


class _StraightThrough(torch.autograd.Function):
    """Rounding has gradient zero almost everywhere; training treats it as the identity instead."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: _Format) -> Tensor:
        return _quantise(x, fmt)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def hadamard_transform(x: Tensor) -> Tensor:
    """Multiply the channels by the normalised Sylvester-Hadamard matrix; orthogonal, its own inverse.

    It spreads an outlier channel over all channels before quantisation. Rotating queries and keys alike leaves their
    dot products as they were.

    Args:
        x: floating [..., d], d a power of two.
    Returns:
        The shape and dtype of x; computed in float32.
    Raises:
        ValueError: d is not a power of two.
    """
    width = x.shape[-1]
    check_hadamard_width(width)
    y = x.float()
    half = 1
    while half < width:
        left, right = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.stack([left + right, left - right], dim=-2).flatten(-3)
        half *= 2
    return (y * width**-0.5).to(x.dtype)


def check_hadamard_width(width: int) -> None:
    """Raise ValueError unless a Hadamard transform of this width exists."""
    if width < 1 or width & (width - 1):
        raise ValueError(f"hadamard width={width}: must be a power of two")
