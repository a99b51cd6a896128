"""Exact masses of compressed positions from the mean mass of tokens, in one walk over memory.

The plain reference is the torch path of `metrics.truth`. Every mass is a multiple of `dense.MASS_UNIT`, so sums of them
are the same in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STEP = 512  # positions, or tokens, that a program looks at together
UNITS = tl.constexpr(2.0**48)
WHOLE = tl.constexpr(1.5 * 2.0**52)  # a float64 near this one has no fraction: adding it rounds, half to even


@triton.jit
def _exact(mass):
    return (mass.to(tl.float64) * UNITS + WHOLE - WHOLE) / UNITS


@triton.jit
def _position_kernel(mean, visible, raw_start, mass, outside, rows, tokens, n, ratio, STEP: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * STEP + tl.arange(0, STEP)
    seen = j < tl.load(visible + line % rows)
    start = tl.load(raw_start + line % rows)
    own = tl.zeros([STEP], tl.float64)
    beyond = tl.zeros([STEP], tl.float64)
    for member in range(ratio):
        token = j * ratio + member
        one = _exact(tl.load(mean + line * tokens + token, mask=seen, other=0.0))
        own += one
        beyond += tl.where(token < start, one, 0.0)
    tl.store(mass + line * (n + 1) + j, own, mask=j <= n)
    tl.store(outside + line * (n + 1) + j, beyond, mask=j <= n)


@triton.jit
def _raw_kernel(mean, positions, raw_start, out, rows, tokens, STEP: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    token = tl.load(raw_start + line % rows)
    last = tl.load(positions + line % rows)
    total = tl.zeros([STEP], tl.float64)
    while token <= last:
        at = token + tl.arange(0, STEP)
        total += _exact(tl.load(mean + line * tokens + at, mask=at <= last, other=0.0))
        token += STEP
    tl.store(out + line, tl.sum(total, 0))


def truth_masses(
    mean: Tensor, positions: Tensor, visible: Tensor, raw_start: Tensor, ratio: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Mass of every visible position, the part of it before the row's first raw token, and the mass of the raw tokens.

    Args:
        mean: float32 [g, R, t], zero behind the row's own token; positions, visible, raw_start: int64 [R].
    Returns:
        float64 [g, R, n + 1] twice, with a zero at the end, and float64 [g, R]; n = t // ratio.
    """
    groups, rows, tokens = mean.shape
    n, mean = tokens // ratio, mean.contiguous()
    mass, outside = (torch.empty(groups, rows, n + 1, dtype=torch.float64, device=mean.device) for _ in range(2))
    raw = torch.empty(groups, rows, dtype=torch.float64, device=mean.device)
    if raw.numel():
        visible, raw_start, positions = visible.contiguous(), raw_start.contiguous(), positions.contiguous()
        grid = (groups * rows, triton.cdiv(n + 1, STEP))
        _position_kernel[grid](mean, visible, raw_start, mass, outside, rows, tokens, n, ratio, STEP=STEP)
        _raw_kernel[(groups * rows,)](mean, positions, raw_start, raw, rows, tokens, STEP=STEP)
    return mass, outside, raw
