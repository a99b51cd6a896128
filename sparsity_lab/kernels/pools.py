"""What candidate pools hold of the oracle's choice and of the mass, without a number a position and pool in memory.

The plain reference is the torch path of `metrics.pools_of`. Masses are exact multiples of one unit, so their sums do
not depend on the order in which a program adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsity_lab.selection import on_device

STEP = 512  # places, or blocks, a program looks at together


@triton.jit
def _pools_kernel(
    ranks, topk_blocks, order, blocks, budgets, held, mass, places, nb, block_size, lines, count,
    COUNT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One row and pool; held float64 [count, P, lines], mass float64 [P, lines]."""
    row = tl.program_id(0).to(tl.int64)
    pool = tl.program_id(1).to(tl.int64)
    pools = tl.num_programs(1)
    most = tl.load(topk_blocks + pool)
    k = tl.load(budgets + tl.arange(0, COUNT), mask=tl.arange(0, COUNT) < count, other=0)
    inside = tl.zeros([COUNT, STEP], tl.int32)
    first = 0
    while first < places:
        at = first + tl.arange(0, STEP)
        position = tl.load(order + row * places + at, mask=at < places, other=-1)
        there = position >= 0
        rank = tl.load(ranks + row * nb + position // block_size, mask=there, other=2147483647)
        inside += ((rank < most)[None, :] & (at[None, :] < k[:, None])).to(tl.int32)
        first += STEP
    own = tl.zeros([STEP], tl.float64)
    first = 0
    while first < nb:
        at = first + tl.arange(0, STEP)
        rank = tl.load(ranks + row * nb + at, mask=at < nb, other=2147483647)
        own += tl.load(blocks + row * nb + at, mask=rank < most, other=0.0)
        first += STEP
    i = tl.arange(0, COUNT)
    tl.store(held + (i * pools + pool) * lines + row, tl.sum(inside, 1).to(tl.float64), mask=i < count)
    tl.store(mass + pool * lines + row, tl.sum(own, 0))


def pools_of(
    ranks: Tensor, topk_blocks: Sequence[int], order: Tensor, block_size: int, blocks: Tensor, budgets: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """How many of the first k entries of the oracle's order lie in each of P pools, float64 [K, P, g, R], and the mass
    of each pool, float64 [P, g, R].

    Args:
        ranks: int32 [g, R, nb]; order: whole numbers [g, R, L], -1 where nothing; blocks: float64 [g, R, nb], mass.
    """
    groups, rows, nb = ranks.shape
    lines, pools, count = groups * rows, len(topk_blocks), len(budgets)
    held = torch.empty(count, pools, groups, rows, dtype=torch.float64, device=ranks.device)
    mass = torch.empty(pools, groups, rows, dtype=torch.float64, device=ranks.device)
    if mass.numel():
        sizes, ks = (on_device(numbers, ranks.device, torch.int32) for numbers in (topk_blocks, budgets))
        _pools_kernel[(lines, pools)](
            ranks.contiguous(), sizes, order.contiguous(), blocks.contiguous(), ks, held, mass, order.shape[-1], nb,
            block_size, lines, count, COUNT=triton.next_power_of_2(count), STEP=STEP,
        )  # fmt: skip
    return held, mass
