"""What the first k places of an order hold, for all k of a list in one walk along it.

The plain reference is the torch path of `metrics.selection_metrics`. Masses are exact multiples of one unit, so their
sums do not depend on the order in which a program adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsity_lab.selection import on_device

STEP = 512  # places a program looks at together


@triton.jit
def _sums_kernel(
    order, rank, mass, outside, raw_start, budgets, out, rows, places, n, ratio, count,
    COUNT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One row of one selection; out float64 [5, count, P, rows]."""
    row = tl.program_id(0).to(tl.int64)
    selection = tl.program_id(1).to(tl.int64)
    lines = tl.num_programs(1).to(tl.int64) * rows
    start = tl.load(raw_start + row)
    all_k = tl.load(budgets + tl.arange(0, COUNT), mask=tl.arange(0, COUNT) < count, other=0)
    kept = tl.zeros([STEP], tl.float64)
    beyond = tl.zeros([STEP], tl.float64)
    tokens = tl.zeros([STEP], tl.int64)
    top1 = tl.zeros([STEP], tl.int64)
    hits = tl.zeros([COUNT, STEP], tl.int32)
    place = 0
    for i in range(count):
        k = tl.load(budgets + i)
        stop = tl.minimum(k, places)
        while place < stop:
            at = place + tl.arange(0, STEP)
            position = tl.load(order + (selection * rows + row) * places + at, mask=at < stop, other=-1)
            there = position >= 0
            kept += tl.load(mass + row * n + position, mask=there, other=0.0)
            beyond += tl.load(outside + row * n + position, mask=there, other=0.0)
            size = tl.minimum(tl.maximum(start - position * ratio, 0), ratio)
            tokens += tl.where(there, size, 0)
            best = tl.load(rank + row * n + position, mask=there, other=2147483647)
            top1 += tl.where(best == 0, 1, 0)
            # a place is in S and in O_k iff it is below k and its place in the oracle's order is
            both = tl.where(there, tl.maximum(best, at), 2147483647)
            hits += (both[None, :] < all_k[:, None]).to(tl.int32)
            place = tl.minimum(place + STEP, stop)
        to = out + i * lines + selection * rows + row
        tl.store(to + count * lines, tl.sum(kept, 0))
        tl.store(to + 2 * count * lines, tl.sum(beyond, 0))
        tl.store(to + 3 * count * lines, tl.sum(tokens, 0).to(tl.float64))
        tl.store(to + 4 * count * lines, tl.sum(top1, 0).to(tl.float64))
    i = tl.arange(0, COUNT)
    tl.store(out + i * lines + selection * rows + row, tl.sum(hits, 1).to(tl.float64), mask=i < count)


def order_sums(
    order: Tensor, rank: Tensor, mass: Tensor, outside: Tensor, raw_start: Tensor, ratio: int, budgets: Sequence[int]
) -> Tensor:
    """Hits, mass, mass outside the raw window, tokens outside it, and whether the best position is there, of the first
    k entries of P orders: float64 [5, K, P, g, R].

    Args:
        order: int64 [P, g, R, L], -1 where nothing; rank: int32 [g, R, n]; mass, outside: float64 [g, R, n].
        raw_start: int64 [R]; budgets: ascending k.
    """
    selections, groups, rows, places = order.shape
    lines, count = groups * rows, len(budgets)
    out = torch.empty(5, count, selections, groups, rows, dtype=torch.float64, device=order.device)
    if out.numel():
        ks = on_device(budgets, order.device, torch.int32)
        _sums_kernel[(lines, selections)](
            order.contiguous(), rank.contiguous(), mass.contiguous(), outside.contiguous(),
            raw_start.expand(groups, rows).contiguous(), ks, out, lines, places, mass.shape[-1], ratio,
            count, COUNT=triton.next_power_of_2(count), STEP=STEP,
        )  # fmt: skip
    return out
