"""Selection on a GPU: the k best positions of a row by a threshold, and what pools leave of an order.

The kernels walk a row in order and write what they keep as they meet it, so equal scores always go to the lowest
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
IN_REGISTERS = 32768  # scores of a row that a program holds while it looks for a threshold
TOGETHER = 4  # pools whose counts share the 64 bits of a number
COUNT_BITS = 64 // TOGETHER


@triton.jit
def _sort_key(score):
    """uint32 that rises with the score; -0 counts as +0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _threshold_kernel(scores, threshold, spare, n, k, WIDTH: tl.constexpr):
    """A score at or above which k or more scores of one row lie, above which fewer; and how many at it belong to the k
    best. Found bit by bit: the k-th best score, or what parts it from the next. WIDTH: more than k, at least n."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    key = _sort_key(tl.load(scores + row * n + at, mask=at < n, other=float("-inf")))
    limit = tl.full([], 0, tl.uint32)
    bit = tl.full([], 1 << 31, tl.uint32)
    while bit > 0:
        tried = limit | bit
        count = tl.sum((key >= tried).to(tl.int32), 0)
        if count >= k:
            limit = tried
        bit = tl.where(count == k, 0, bit >> 1)
    bits = limit.to(tl.int32, bitcast=True)
    tl.store(threshold + row, (bits ^ (~(bits >> 31) | -2147483648)).to(tl.float32, bitcast=True))
    tl.store(spare + row, (k - tl.sum((key > limit).to(tl.int32), 0)).to(tl.int64))


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
def _restrict_kernel(
    order, ranks, topk_blocks, out, n, nb, block_size, limit, rows, count,
    STEP: tl.constexpr, TOGETHER: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The first `limit` entries of one row's order whose block is among the best of each of TOGETHER pools, then -1.
    One running count serves them all: each pool's takes BITS bits of it."""
    row = tl.program_id(0).to(tl.int64)
    pool = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    blocks = tl.load(topk_blocks + pool, mask=pool < count, other=0)
    shift = (tl.arange(0, TOGETHER) * BITS).to(tl.int64)
    field = (tl.full([], 1, tl.int64) << BITS) - 1
    to = out + (pool.to(tl.int64) * rows + row) * limit
    written = tl.where(pool < count, 0, limit)
    first = 0
    end = n
    while (first < end) & (tl.min(written, 0) < limit):
        at = first + tl.arange(0, STEP)
        position = tl.load(order + row * n + at, mask=at < n, other=-1)
        there = position >= 0
        if tl.max(position, 0) < 0:
            end = first  # nothing more comes
        rank = tl.load(ranks + row * nb + position // block_size, mask=there, other=0)
        keep = there[:, None] & (rank[:, None] < blocks[None, :])
        counts = tl.cumsum(tl.sum(keep.to(tl.int64) << shift[None, :], 1), 0)
        place = written[None, :] + ((counts[:, None] >> shift[None, :]) & field).to(tl.int32) - 1
        tl.store(to[None, :] + place, position[:, None], mask=keep & (place < limit))
        written += tl.sum(keep.to(tl.int32), 0)
        first += STEP
    rest = tl.min(written, 0)
    while rest < limit:
        at = (rest + tl.arange(0, STEP))[:, None]
        tl.store(to[None, :] + at, -1, mask=(at >= written[None, :]) & (at < limit))
        rest += STEP


def top_positions(scores: Tensor, k: int) -> Tensor:
    """The k best positions of every row, in position order: float32 [..., n] -> int64 [..., k], -1 at the end.

    The k-th best score is found without a sort; ties at it go to the lowest positions, -inf is never taken.
    """
    flat = scores.flatten(0, -2).contiguous()
    rows, n = flat.shape
    out = torch.empty(rows, k, dtype=torch.int64, device=scores.device)
    if n <= IN_REGISTERS:
        threshold = torch.empty(rows, dtype=torch.float32, device=scores.device)
        spare = torch.empty(rows, dtype=torch.int64, device=scores.device)
        width = triton.next_power_of_2(max(n, k + 1))
        if rows:
            warps = max(4, min(16, width // 2048))
            _threshold_kernel[(rows,)](flat, threshold, spare, n, k, WIDTH=width, num_warps=warps)
    else:
        threshold = flat.topk(k, dim=-1, sorted=False).values.amin(-1)
        spare = k - (flat > threshold.unsqueeze(-1)).sum(-1)
    if rows:
        _compact_kernel[(rows,)](flat, threshold, spare, out, n, k, STEP=STEP)
    return out.view(*scores.shape[:-1], k)


def restrict(order: Tensor, ranks: Tensor, block_size: int, pools: Sequence[int], limit: int) -> Tensor:
    """The first `limit` entries of an order inside each of P pools of one source: [P, ..., limit].

    Args:
        order: whole numbers [..., n], -1 where nothing; ranks: int32 [..., nb], ranks of the source's blocks.
        pools: how many of the best blocks each of the P pools holds.
    """
    topk_blocks = on_device(pools, order.device, torch.int32)
    flat, block_ranks = order.flatten(0, -2).contiguous(), ranks.flatten(0, -2).contiguous()
    rows, n = flat.shape
    out = torch.empty(len(pools), rows, limit, dtype=order.dtype, device=order.device)
    if out.numel():
        _restrict_kernel[(rows, triton.cdiv(len(pools), TOGETHER))](
            flat, block_ranks, topk_blocks, out, n, block_ranks.shape[1], block_size, limit, rows, len(pools),
            STEP=STEP, TOGETHER=TOGETHER, BITS=COUNT_BITS,
        )  # fmt: skip
    return out.view(len(pools), *order.shape[:-1], limit)
