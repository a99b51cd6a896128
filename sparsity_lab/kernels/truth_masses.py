"""Exact masses of compressed positions from the mean mass of tokens, in one walk over memory.

The plain reference is the torch path of `metrics.truth`. Every mass is a multiple of `dense.MASS_UNIT`, so sums of them
are the same in any order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsity_lab.kernels.order_sums import RANK_BITS, UNITS, pack

STEP = 512  # positions, or tokens, that a program looks at together
WHOLE = tl.constexpr(1.5 * 2.0**52)  # a float64 near this one has no fraction: adding it rounds, half to even


@triton.jit
def _exact(mass):
    return (mass.to(tl.float64) * UNITS + WHOLE - WHOLE) / UNITS


@triton.jit
def _position_kernel(mean, visible, mass, places, rows, tokens, n, ratio, SHIFT: tl.constexpr, STEP: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * STEP + tl.arange(0, STEP)
    seen = j < tl.load(visible + line % rows)
    own = tl.zeros([STEP], tl.float64)
    for member in range(ratio):
        own += _exact(tl.load(mean + line * tokens + j * ratio + member, mask=seen, other=0.0))
    tl.store(mass + line * (n + 1) + j, own, mask=j <= n)
    tl.store(places + line * (n + 1) + j, pack(own, (1 << SHIFT) - 1, SHIFT), mask=j <= n)


@triton.jit
def _rank_kernel(order, mass, places, most, n, SHIFT: tl.constexpr, STEP: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * STEP + tl.arange(0, STEP)
    position = tl.load(order + line * most + at, mask=at < most, other=-1)
    there = position >= 0
    own = tl.load(mass + line * (n + 1) + position, mask=there, other=0.0)
    tl.store(places + line * (n + 1) + position, pack(own, at, SHIFT), mask=there)


@triton.jit
def _row_kernel(
    mean, positions, visible, raw_start, total, edge, raw, rows, tokens, ratio, STEP: tl.constexpr
):  # fmt: skip
    """The mass of a row's visible positions, that of its first raw token's position before this token, and that of its
    raw tokens."""
    line = tl.program_id(0).to(tl.int64)
    start = tl.load(raw_start + line % rows)
    last = tl.load(positions + line % rows)
    end = tl.load(visible + line % rows) * ratio
    seen = tl.zeros([STEP], tl.float64)
    before = tl.zeros([STEP], tl.float64)
    after = tl.zeros([STEP], tl.float64)
    token = 0
    while token <= last:
        at = token + tl.arange(0, STEP)
        mass = _exact(tl.load(mean + line * tokens + at, mask=at <= last, other=0.0))
        seen += tl.where(at < end, mass, 0.0)
        before += tl.where((at >= start // ratio * ratio) & (at < start), mass, 0.0)
        after += tl.where(at >= start, mass, 0.0)
        token += STEP
    tl.store(total + line, tl.sum(seen, 0))
    tl.store(edge + line, tl.sum(before, 0))
    tl.store(raw + line, tl.sum(after, 0))


class TruthMasses(NamedTuple):
    """See the fields of the same names of `metrics.Truth`."""

    mass: Tensor
    total: Tensor
    edge: Tensor
    raw_mass: Tensor
    places: Tensor | None


def truth_masses(
    mean: Tensor, positions: Tensor, visible: Tensor, raw_start: Tensor, order: Tensor, ratio: int
) -> TruthMasses:
    """The masses of a tile's rows, and what `order_sums` looks up.

    Args:
        mean: float32 [g, R, t], zero behind the row's own token; positions, visible, raw_start: int64 [R].
        order: the oracle's, int64 [g, R, L], -1 where nothing.
    Returns:
        arrays over n = t // ratio positions; `places` is None where the order is too long for it.
    """
    groups, rows, tokens = mean.shape
    n, mean, most = tokens // ratio, mean.contiguous(), order.shape[-1]
    mass = torch.empty(groups, rows, n + 1, dtype=torch.float64, device=mean.device)
    places = torch.empty(groups, rows, n + 1, dtype=torch.int64, device=mean.device)
    total, edge, raw = (torch.empty(groups, rows, dtype=torch.float64, device=mean.device) for _ in range(3))
    if raw.numel():
        visible, raw_start, positions = visible.contiguous(), raw_start.contiguous(), positions.contiguous()
        lines = groups * rows
        _position_kernel[(lines, triton.cdiv(n + 1, STEP))](
            mean, visible, mass, places, rows, tokens, n, ratio, SHIFT=RANK_BITS, STEP=STEP
        )
        if most:
            _rank_kernel[(lines, triton.cdiv(most, STEP))](
                order.contiguous(), mass, places, most, n, SHIFT=RANK_BITS, STEP=STEP
            )
        _row_kernel[(lines,)](mean, positions, visible, raw_start, total, edge, raw, rows, tokens, ratio, STEP=STEP)
    return TruthMasses(mass, total, edge, raw, places if most < 1 << RANK_BITS else None)
