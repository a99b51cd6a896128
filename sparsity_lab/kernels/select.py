"""Selection on a GPU: the k best positions of a row by a threshold, and what a pool leaves of an order.

Both kernels walk a row once and write what they keep in the order they meet it, so equal scores always go to the lowest
position, whatever the launch. The plain references are in `selection` and `selecting`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsity_lab.selection import on_device

STEP = 1024  # entries a program looks at together


@triton.jit
def _compact_kernel(scores, threshold, spare, out, n, k, STEP: tl.constexpr):
    """Positions of one row above its threshold, and the first `spare` at it, in position order."""
    row = tl.program_id(0).to(tl.int64)
    limit = tl.load(threshold + row)
    ties = tl.load(spare + row)
    written = 0
    seen = 0
    first = 0
    while first < n:
        at = first + tl.arange(0, STEP)
        score = tl.load(scores + row * n + at, mask=at < n, other=float("-inf"))
        equal = (score == limit) & (at < n)
        rank = seen + tl.cumsum(equal.to(tl.int32), 0)
        keep = ((score > limit) | (equal & (rank <= ties))) & (score > float("-inf"))
        place = written + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(out + row * k + place, at, mask=keep & (place < k))
        written += tl.sum(keep.to(tl.int32), 0)
        seen += tl.sum(equal.to(tl.int32), 0)
        first += STEP
    while written < k:
        at = written + tl.arange(0, STEP)
        tl.store(out + row * k + at, -1, mask=at < k)
        written += STEP


@triton.jit
def _restrict_kernel(order, ranks, topk_blocks, out, n, nb, block_size, limit, rows, STEP: tl.constexpr):
    """The first `limit` entries of one row's order whose block is among the best of its pool, then -1."""
    row = tl.program_id(0).to(tl.int64)
    pool = tl.program_id(1)
    blocks = tl.load(topk_blocks + pool)
    written = 0
    first = 0
    while (first < n) & (written < limit):
        at = first + tl.arange(0, STEP)
        position = tl.load(order + row * n + at, mask=at < n, other=-1)
        there = position >= 0
        rank = tl.load(ranks + row * nb + position // block_size, mask=there, other=0)
        keep = there & (rank < blocks)
        place = written + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(out + (pool * rows + row) * limit + place, position, mask=keep & (place < limit))
        written += tl.sum(keep.to(tl.int32), 0)
        first += STEP
    while written < limit:
        at = written + tl.arange(0, STEP)
        tl.store(out + (pool * rows + row) * limit + at, -1, mask=at < limit)
        written += STEP


def top_positions(scores: Tensor, k: int) -> Tensor:
    """The k best positions of every row, in position order: float32 [..., n] -> int64 [..., k], -1 at the end.

    The k-th best score is found without a sort; ties at it go to the lowest positions, -inf is never taken.
    """
    flat = scores.flatten(0, -2).contiguous()
    threshold = flat.topk(k, dim=-1, sorted=False).values.amin(-1)
    spare = k - (flat > threshold.unsqueeze(-1)).sum(-1)
    out = torch.empty(flat.shape[0], k, dtype=torch.int64, device=scores.device)
    if flat.shape[0]:
        _compact_kernel[(flat.shape[0],)](flat, threshold, spare, out, flat.shape[1], k, STEP=STEP)
    return out.view(*scores.shape[:-1], k)


def restrict(order: Tensor, ranks: Tensor, block_size: int, pools: Sequence[int], limit: int) -> Tensor:
    """The first `limit` entries of an order inside each of P pools of one source: int64 [P, ..., limit].

    Args:
        order: int64 [..., n], -1 where nothing; ranks: int32 [..., nb], ranks of the source's blocks.
        pools: how many of the best blocks each of the P pools holds.
    """
    topk_blocks = on_device(pools, order.device, torch.int32)
    flat, block_ranks = order.flatten(0, -2).contiguous(), ranks.flatten(0, -2).contiguous()
    rows, n = flat.shape
    out = torch.empty(len(pools), rows, limit, dtype=torch.int64, device=order.device)
    if out.numel():
        _restrict_kernel[(rows, len(pools))](
            flat, block_ranks, topk_blocks, out, n, block_ranks.shape[1], block_size, limit, rows, STEP=STEP
        )
    return out.view(len(pools), *order.shape[:-1], limit)
