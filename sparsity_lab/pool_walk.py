"""What lies in candidate pools along an order, and the small integers that layers keep for later ones.

Shapes: G rows (groups times query rows), n compressed positions, nb blocks, P pool sizes, K budgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sparsity_lab.metrics import within
from sparsity_lab.selection import rank_blocks, visible_lengths


def small_int(most: int) -> torch.dtype:
    """The integers that hold 0 to `most` and -1."""
    return torch.int16 if most <= torch.iinfo(torch.int16).max else torch.int32


def kept_ranks(scores: Tensor, rows: Tensor, ratio: int, block_size: int) -> Tensor:
    """Ranks of a layer's blocks as later layers need them, small integers [G, nb]."""
    ranks = rank_blocks(scores, visible_lengths(rows, ratio), block_size).flatten(0, 1)
    # dropped blocks hold nothing visible, so a pool may as well hold them
    return ranks.clamp(max=ranks.shape[-1]).to(small_int(ranks.shape[-1]))


def walk(
    order: Tensor, blocks: Tensor, ranks: Tensor, pools: Tensor, most: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Walk an order to the entry at which each pool holds `most` of it, in stretches.

    Most rows get there early, so each stretch is for those that have not; what it finds replaces what was found.

    Args:
        order: int64 [G, n], -1 last; blocks: int64 [G, n], of its entries.
        ranks: [G, nb] of the source's blocks; pools: topk_blocks [P].
    Yields:
        pool and row int64 [w] of what is walked, and along the stretch whether an entry lies in the pool, bool, and how
        many do up to it, int32 [w, length].
    """
    rows, n = order.shape
    p, g = torch.cartesian_prod(torch.arange(len(pools)), torch.arange(rows)).to(order.device).unbind(-1)
    for length in (2 * most, 8 * most, n):
        length = min(length, n)
        inside = ranks[g].gather(-1, blocks[g, :length]) < pools[p].unsqueeze(-1)
        count = inside.cumsum(-1, dtype=torch.int32)
        yield p, g, inside, count
        short = (count[:, -1] < most) & (order[g, length - 1] >= 0)
        if length == n or not short.any():
            return
        p, g = p[short], g[short]


def mass_in_pools(order: Tensor, gains: Tensor, blocks: Tensor, ranks: Tensor, pools: Tensor, ks: Tensor) -> Tensor:
    """Mass of the first k entries of an order that lie in each pool; fewer where a pool holds fewer.

    Args:
        gains: float64 [G, n], mass of the order's entries (0 for -1); ks: ascending [K]; the rest: see `walk`.
    Returns:
        float64 [P, K, G].
    """
    out = gains.new_zeros(len(pools), len(order), len(ks))
    for p, g, inside, count in walk(order, blocks, ranks, pools, int(ks[-1])):
        length = count.shape[-1]
        last = torch.searchsorted(count, ks.int().expand(len(g), -1).contiguous()).clamp_(max=length - 1)
        out[p, g] = gains[g, :length].masked_fill(~inside, 0.0).cumsum(-1).gather(-1, last)
    return out.transpose(1, 2)


def picks_in_pool(order: Tensor, blocks: Tensor, ranks: Tensor, topk_blocks: int, most: int) -> Tensor:
    """The first `most` entries of an order that lie in one pool, small integers [G, min(most, n)], -1 at the end where
    it holds fewer; see `walk`."""
    n = order.shape[-1]
    most = min(most, n)
    out = order.new_full((len(order), most), -1)
    wanted = torch.arange(1, most + 1, dtype=torch.int32, device=order.device)
    for _, g, _, count in walk(order, blocks, ranks, torch.tensor([topk_blocks], device=order.device), most):
        places = torch.searchsorted(count, wanted.expand(len(g), -1).contiguous())
        found = order[g, : count.shape[-1]].gather(-1, places.clamp(max=count.shape[-1] - 1))
        out[g] = found.masked_fill(places == count.shape[-1], -1)
    return out.to(small_int(n))


def kept_mass(mass: Tensor, chosen: Tensor, budgets: Sequence[int]) -> Tensor:
    """Mass of the first k entries of selections int64 [..., L] (-1 = nothing), float64 [..., K].

    mass: float64 [..., n + 1], zero at the end.
    """
    at = chosen.masked_fill(chosen < 0, mass.shape[-1] - 1)
    return mass.gather(-1, at) @ within(budgets, at.shape[-1], mass.device)
