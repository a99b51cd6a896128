"""From scores to selections: the order of positions, the pool of candidate blocks, the top-k.

Shapes: any leading axes, then n compressed positions (or nb blocks). `lengths` are visible lengths v, one a row.
Ties always go to the lowest position. Everything rests on `order_positions`, so there is one tie rule and one sort.

Source: the select_candidate_blocks and top-k of DeepSeek V4.1's published indexer, with one deliberate deviation: the
published top-k fills up with unreachable or out-of-pool positions when the pool is smaller than k; here what is missing
is -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsity_lab import kernels
from sparsity_lab.doubts import Doubts, refuse

NEG_INF = float("-inf")
DROPPED = torch.iinfo(torch.int32).max  # the rank of a block that can never be kept
_LOW = 0xFFFFFFFF
_UNREACHABLE = 0x7F800000  # upper half of the sort key of -inf


def visible_lengths(positions: Tensor, ratio: int) -> Tensor:
    """Complete groups that the query at each absolute position may see: (s + 1) // ratio, same shape."""
    return (positions + 1) // ratio


def hidden_positions(positions: Tensor, ratio: int, n: int) -> Tensor:
    """Which of n compressed positions the queries at `positions` [..., s] may not see, bool [..., s, n]."""
    return torch.arange(n, device=positions.device) >= visible_lengths(positions, ratio).unsqueeze(-1)


def as_mask(picks: Tensor, n: int) -> Tensor:
    """Where positions are picked: whole numbers [..., k], -1 = nothing -> bool [..., n]."""
    mask = torch.zeros(*picks.shape[:-1], n + 1, dtype=torch.bool, device=picks.device)
    return mask.scatter_(-1, picks.long().masked_fill(picks < 0, n), True)[..., :n]  # -1 lands in a spare column


def on_device(numbers: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Whole numbers on a device; the same ones are copied there once, since each copy waits for a GPU."""
    return _on_device(tuple(numbers), device, dtype)


@lru_cache(maxsize=512)
def _on_device(numbers: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


def padded(tensor: Tensor, width: int, value: float = 0) -> Tensor:
    """The last axis filled up to `width`; the tensor itself where nothing lacks (`F.pad` would copy it)."""
    lacking = width - tensor.shape[-1]
    return F.pad(tensor, (0, lacking), value=value) if lacking else tensor


def stacked(orders: Sequence[Tensor]) -> Tensor:
    """P orders [..., L] of whatever lengths as one, [P, ..., longest], -1 where one has nothing more."""
    longest = max(order.shape[-1] for order in orders)
    return torch.stack([padded(order, longest, -1) for order in orders])


def _check_scores(scores: Tensor, doubts: Doubts | None) -> None:
    if scores.dtype != torch.float32:
        raise ValueError(f"scores.dtype={scores.dtype}: scores are ranked in float32 (lower precision makes ties)")
    if scores.numel():
        text = "scores contain NaN: a NaN has no rank; look for it where the scores are made"
        refuse(scores.amax().isnan(), lambda: ValueError(text), doubts)


def _sort_keys(scores: Tensor) -> Tensor:
    """Distinct int64 keys whose ascending order is: higher score first, then lower position.

    The upper half is the float32 pattern mapped monotonically to int32 and turned round (-0 counts as +0), the lower
    half the position. Distinct keys make any sort or partition deterministic, on every device.
    """
    bits = (scores + 0.0).view(torch.int32)
    keys = torch.empty(scores.shape, dtype=torch.int64, device=scores.device)
    halves = keys.view(torch.int32).unflatten(-1, (scores.shape[-1], 2))  # little-endian: the lower half comes first
    halves[..., 0] = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    # a float's pattern rises with its size: turn all bits of positives, only the sign of negatives
    halves[..., 1] = bits ^ (~(bits >> 31) | torch.iinfo(torch.int32).min)
    return keys


def order_positions(
    scores: Tensor, limit: int | None = None, doubts: Doubts | None = None, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Positions by falling score, ties to the lowest position; -inf positions are unreachable and become -1.

    Args:
        scores: float32 [..., n].
        limit: only the best `limit` are needed (default: all n).
        doubts: take up whether scores hold NaN (default: look at once).
        dtype: of the result, int64 or int32.
    Returns:
        [..., min(limit, n)], reachable positions first, then -1.
    Raises:
        ValueError: scores are not float32 or hold NaN.
    """
    _check_scores(scores, doubts)
    n = scores.shape[-1]
    limit = n if limit is None else min(limit, n)
    if scores.device.type != "cpu":
        return _order_on_device(scores, limit, dtype)
    array = _sort_keys(scores).numpy()  # numpy's vectorised integer sort is several times faster than torch's
    if limit < n:
        array.partition(max(limit - 1, 0), axis=-1)
        array = array[..., :limit].copy()
    array.sort(axis=-1)
    keys = torch.from_numpy(array)
    return (keys & _LOW).masked_fill_((keys >> 32) == _UNREACHABLE, -1).to(dtype)


def _order_on_device(scores: Tensor, limit: int, dtype: torch.dtype) -> Tensor:
    """The same order by a stable sort, which keeps equal scores by position, of all scores or of the best `limit`."""
    if limit == scores.shape[-1] or not kernels.usable(scores):
        scores, order = (scores + 0.0).sort(dim=-1, descending=True, stable=True)  # + 0.0: -0 counts as +0
        scores, order = scores[..., :limit], order[..., :limit].to(dtype)
        return order.masked_fill_(scores == NEG_INF, -1)
    from sparsity_lab.kernels.select import top_positions

    picks = top_positions(scores, limit)
    best = scores.gather(-1, picks.clamp(min=0)).masked_fill_(picks < 0, NEG_INF)
    return picks.gather(-1, (best + 0.0).sort(dim=-1, descending=True, stable=True).indices).to(dtype)


def adjust_scores(
    scores: Tensor,
    positions: Tensor,
    ratio: int,
    *,
    window: int = 0,
    exclude_window: bool = False,
    sinks: int = 0,
    hidden: Tensor | None = None,
) -> Tensor:
    """The scores as the selection sees them: unreachable positions at -inf, options applied.

    Args:
        scores: float32 [..., s, n]; positions: absolute query positions [s].
        window: tokens always attended raw (only used by `exclude_window`).
        exclude_window: leave out positions whose tokens all lie in the window (they cost budget and add nothing).
        sinks: this many first positions are always kept; they take part of the budget.
        hidden: `hidden_positions` of the rows, if it is at hand.
    """
    j = torch.arange(scores.shape[-1], device=scores.device)
    out = scores
    if sinks:
        out = out.masked_fill(j < sinks, torch.finfo(scores.dtype).max)  # below the pinned block's infinity
    if exclude_window:
        first_in_window = (positions - window + 1).unsqueeze(-1)
        out = out.masked_fill((j * ratio >= first_in_window) & (j >= sinks), NEG_INF)
    if hidden is None:
        hidden = hidden_positions(positions, ratio, scores.shape[-1])
    return out.masked_fill(hidden, NEG_INF)


def block_scores(scores: Tensor, block_size: int) -> Tensor:
    """Best score of every block of `block_size` neighbours, [..., n] -> [..., ceil(n / block_size)]."""
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: must be at least 1")
    return in_blocks(scores, block_size, NEG_INF).amax(-1)


def in_blocks(values: Tensor, block_size: int, filling: float) -> Tensor:
    """Neighbours by block, the last one filled up: [..., n] -> [..., ceil(n / block_size), block_size]."""
    n = values.shape[-1]
    return padded(values, n + -n % block_size, filling).unflatten(-1, (-1, block_size))


def rank_blocks(scores: Tensor, lengths: Tensor | int, block_size: int, doubts: Doubts | None = None) -> Tensor:
    """Rank of every block: 0 is the newest visible block (pinned), then by falling block score.

    Args:
        scores: float32 [..., n], unreachable positions at -inf.
        lengths: visible length, an int or a tensor that broadcasts to the leading axes of `scores`.
        doubts: see `order_positions`.
    Returns:
        int32 [..., nb]; blocks with nothing reachable have rank DROPPED.
    """
    blocks = block_scores(scores, block_size)
    lengths = torch.as_tensor(lengths, device=scores.device)
    newest = ((lengths - 1) // block_size).unsqueeze(-1)
    # Python-style floor: length 0 gives block -1, so nothing is pinned
    blocks = blocks.masked_fill(torch.arange(blocks.shape[-1], device=scores.device) == newest, float("inf"))
    order = order_positions(blocks, doubts=doubts)
    places = torch.arange(order.shape[-1], dtype=torch.int32, device=order.device).expand_as(order)
    spare = order.shape[-1]  # -1 entries are written to a spare column
    ranks = torch.full((*order.shape[:-1], spare + 1), DROPPED, dtype=torch.int32, device=order.device)
    return ranks.scatter_(-1, order.masked_fill(order < 0, spare), places)[..., :spare]


def select_candidate_blocks(logits: Tensor, compress_lens: Tensor | int, topk_blocks: int, block_size: int) -> Tensor:
    """The candidate pool: the best `topk_blocks` blocks, the block of the newest visible position pinned among them.

    Args:
        logits: float32 [..., n] index scores, unreachable positions at -inf.
        compress_lens: visible length; an int, or a tensor [s, 1] / [b, s, 1] with the published trailing axis of 1.
        topk_blocks: blocks kept, the pinned one included; fewer where fewer have anything reachable.
        block_size: positions a block; the last block may be partial.
    Returns:
        bool [..., n]. Kept blocks are kept whole, so the mask may be true at positions not visible yet: the consumer's
        causal mask still applies.
    Raises:
        ValueError: topk_blocks or block_size below 1.
    """
    if topk_blocks < 1:
        raise ValueError(f"topk_blocks={topk_blocks}: must be at least 1")
    lengths = compress_lens.squeeze(-1) if isinstance(compress_lens, Tensor) and compress_lens.dim() else compress_lens
    kept = rank_blocks(logits, lengths, block_size) < topk_blocks
    return kept.repeat_interleave(block_size, dim=-1)[..., : logits.shape[-1]]


def select_topk(scores: Tensor, topk: int, *, pool: Tensor | None = None, offset: int = 0) -> Tensor:
    """The `topk` best reachable positions inside the pool, in position order.

    Args:
        scores: float32 [..., n], unreachable positions at -inf.
        topk: budget k.
        pool: bool, broadcasts to `scores`: only these may be selected (default: all).
        offset: added to every selected position (the published code places the window's slots first).
    Returns:
        int32 [..., min(topk, n)], ascending; -1 at the end where fewer than k are reachable.
    Raises:
        ValueError: topk below 1, scores not float32 or NaN, an offset beyond int32.
    """
    if topk < 1:
        raise ValueError(f"topk={topk}: must be at least 1")
    if pool is not None:
        scores = scores.masked_fill(~pool, NEG_INF)
    picks = order_positions(scores, topk)
    last = scores.shape[-1]
    picks = picks.masked_fill(picks < 0, last).sort(dim=-1).values
    if offset < 0 or offset + last - 1 > torch.iinfo(torch.int32).max:
        raise ValueError(f"offset={offset}: with {last} positions the indices must fit into int32")
    return torch.where(picks == last, -1, picks + offset).int()
