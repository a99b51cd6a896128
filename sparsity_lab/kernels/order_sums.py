"""What the first k places of an order hold, for all k of a list in one walk along it.

A walk looks up one number a place: the position's mass, in whole units, and its place in the oracle's order. The plain
reference is the torch path of `metrics.selection_metrics`. Sums of whole units do not depend on the order in which a
program adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsity_lab.dense import MASS_UNIT
from sparsity_lab.selection import on_device

STEP = 256  # places a program looks at together
RANK_BITS = 14  # for the place in the oracle's order, all set = none; the other 49 hold a mass of 0 to 2 - 2**-48
UNITS = tl.constexpr(1 / MASS_UNIT)


@triton.jit
def pack(mass, rank, SHIFT: tl.constexpr):
    """int64 of a mass and a place in the oracle's order."""
    return ((mass * UNITS).to(tl.int64) << SHIFT) | rank


@triton.jit
def _sums_kernel(
    order, looked_up, edge, raw_start, budgets, out, rows, places, n, ratio, count,
    COUNT: tl.constexpr, SHIFT: tl.constexpr, APART: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One row of one selection; looked_up: see `pack`; out float64 [5, count, P, rows]. APART: no mass is raw."""
    row = tl.program_id(0).to(tl.int64)
    selection = tl.program_id(1).to(tl.int64)
    lines = tl.num_programs(1).to(tl.int64) * rows
    start = tl.load(raw_start + row)
    part = tl.full([], 0, tl.int64)
    if not APART:
        part = (tl.load(edge + row) * UNITS).to(tl.int64)
    all_k = tl.load(budgets + tl.arange(0, COUNT), mask=tl.arange(0, COUNT) < count, other=0)
    nowhere: tl.constexpr = (1 << SHIFT) - 1
    kept = tl.zeros([STEP], tl.int64)
    beyond = tl.zeros([STEP], tl.int64)
    tokens = tl.zeros([STEP], tl.int64)
    top1 = tl.zeros([STEP], tl.int32)
    hits = tl.zeros([COUNT, STEP], tl.int32)
    place = 0
    for i in range(count):
        stop = tl.minimum(tl.load(budgets + i), places)
        while place < stop:
            at = place + tl.arange(0, STEP)
            position = tl.load(order + (selection * rows + row) * places + at, mask=at < stop, other=-1).to(tl.int64)
            there = position >= 0
            found = tl.load(looked_up + row * (n + 1) + position, mask=there, other=nowhere)
            mass, rank = found >> SHIFT, (found & nowhere).to(tl.int32)
            size = tl.where(there, tl.minimum(tl.maximum(start - position * ratio, 0), ratio), 0)
            kept += mass
            beyond += mass if APART else tl.where(size == ratio, mass, tl.where(size > 0, part, 0))
            tokens += size
            top1 += (rank == 0).to(tl.int32)
            # a place is in S and in O_k iff it is below k and its place in the oracle's order is
            both = tl.where(rank == nowhere, 2147483647, tl.maximum(rank, at))
            hits += (both[None, :] < all_k[:, None]).to(tl.int32)
            place = tl.minimum(place + STEP, stop)
        to = out + i * lines + selection * rows + row
        tl.store(to + count * lines, tl.sum(kept, 0).to(tl.float64) / UNITS)
        tl.store(to + 2 * count * lines, tl.sum(beyond, 0).to(tl.float64) / UNITS)
        tl.store(to + 3 * count * lines, tl.sum(tokens, 0).to(tl.float64))
        tl.store(to + 4 * count * lines, tl.sum(top1, 0).to(tl.float64))
    i = tl.arange(0, COUNT)
    tl.store(out + i * lines + selection * rows + row, tl.sum(hits, 1).to(tl.float64), mask=i < count)


def packed(mass: Tensor, order: Tensor) -> Tensor | None:
    """What a walk looks up, int64 [..., n + 1]: `pack` of every position's mass, float64 [..., n + 1], and its place in
    the oracle's order, int64 [..., L]. None where that is too long."""
    if order.shape[-1] >= 1 << RANK_BITS:
        return None
    nowhere, last = (1 << RANK_BITS) - 1, mass.shape[-1] - 1
    units = (mass / MASS_UNIT).long() << RANK_BITS
    at = order.masked_fill(order < 0, last)
    found = (units | nowhere).scatter_(-1, at, units.gather(-1, at) | torch.arange(at.shape[-1], device=at.device))
    found[..., last] = nowhere
    return found


def order_sums(
    order: Tensor, looked_up: Tensor, edge: Tensor | None, raw_start: Tensor, ratio: int, budgets: Sequence[int]
) -> Tensor:
    """Hits, mass, mass outside the raw window, tokens outside it, and whether the best position is there, of the first
    k entries of P orders: float64 [5, K, P, g, R].

    Args:
        order: whole numbers [P, g, R, L], -1 where nothing.
        looked_up: int64 [g, R, n + 1], see `packed`.
        edge: float64 [g, R], of the position that holds raw_start, the mass before it; None = no mass is raw.
        raw_start: int64 [R]; budgets: ascending k.
    """
    selections, groups, rows, places = order.shape
    lines, count = groups * rows, len(budgets)
    out = torch.empty(5, count, selections, groups, rows, dtype=torch.float64, device=order.device)
    if out.numel():
        ks = on_device(budgets, order.device, torch.int32)
        _sums_kernel[(lines, selections)](
            order.contiguous(), looked_up.contiguous(), out if edge is None else edge.contiguous(),
            raw_start.expand(groups, rows).contiguous(), ks, out, lines, places, looked_up.shape[-1] - 1, ratio,
            count,
            COUNT=triton.next_power_of_2(count), SHIFT=RANK_BITS, APART=edge is None, STEP=STEP,
        )  # fmt: skip
    return out
