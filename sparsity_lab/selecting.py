"""Which positions a layer takes: one piece of code for measuring (`passes`) and for sparse attention (`models.sparse`).

A `Selector` is called layer by layer, and in each layer row tile by row tile: it orders a layer's scores, or reads what
an earlier layer chose for the same rows.

Shapes: g groups, R rows of a tile, n compressed positions, nb blocks, L places of an order (-1 = nothing).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsity_lab import kernels
from sparsity_lab.cells import Candidate, Cell, cell_topology, index_sources
from sparsity_lab.dense import RowTile
from sparsity_lab.metrics import oracle_order
from sparsity_lab.scorers import Oracle, Recency, Scorer
from sparsity_lab.selection import DROPPED, adjust_scores, order_positions, rank_blocks
from sparsity_lab.topology import NativeSelection


class Variant(NamedTuple):
    """What changes a layer's order beside the scores themselves."""

    share: str
    ratio: int
    scorer: str
    sinks: int
    excluded_window: int | None
    index_sources: tuple[int, ...] | None


def variant_of(cell: Cell, scorer: Scorer) -> Variant:
    s, sources = cell.selection, index_sources(cell.selection.index_source_layers, scorer)
    return Variant(s.share, s.compress_ratio, cell.scorer, s.sinks, s.window if s.exclude_window else None, sources)


def restrict(order: Tensor, ranks: Tensor, block_size: int, pools: Sequence[int], limit: int) -> list[Tensor]:
    """The first `limit` entries of an order that lie in each of some pools: a running count instead of a second sort.

    Args:
        order: int64 [..., n], -1 where nothing; ranks: int32 [..., nb], of the source's blocks.
        pools: how many of the best blocks each holds.
    Returns:
        for every pool int64 [..., min(limit, n)], -1 where it holds fewer.
    """
    limit = min(limit, order.shape[-1])
    if kernels.usable(order):
        from sparsity_lab.kernels.select import restrict as walk

        return list(walk(order, ranks, block_size, pools, limit).unbind())
    along = ranks.gather(-1, order.clamp(min=0) // block_size).masked_fill_(order < 0, DROPPED)
    return [_first_inside(order, along < pool, limit) for pool in pools]


def _first_inside(order: Tensor, inside: Tensor, limit: int) -> Tensor:
    count = inside.cumsum(-1, dtype=torch.int32)
    keep = inside & (count <= limit)
    out = order.new_full((*order.shape[:-1], limit), -1)
    filled = torch.arange(limit, device=order.device) < count[..., -1:]
    # both masks are walked row by row, so entries land in their own row, in order
    return out.masked_scatter_(filled, order.masked_select(keep))


def newest_first(tile: RowTile, share: str, ratio: int, limit: int) -> Tensor:
    """The order of `scorers.Recency`, int64 [g, R, min(limit, n)]."""
    places = torch.arange(min(limit, tile.length // ratio), device=tile.rows.device)
    return (tile.visible(ratio).unsqueeze(-1) - 1 - places).clamp_(min=-1).expand(tile.groups(share), -1, -1)


# what scorers choose where nothing but visibility restricts them, if that is at hand without a sort of their scores
KNOWN_ORDERS: dict[type, Callable[[RowTile, str, int, int], Tensor]] = {Oracle: oracle_order, Recency: newest_first}


def _numbers(where: Tensor) -> torch.dtype:
    """Of the orders that are handed on: kernels read int32 in half the time, torch gathers by int64."""
    return torch.int32 if kernels.usable(where) else torch.int64


class Selector:
    """Chooses for the selections of one variant, which then differ in budget, window and pool only.

    Between layers only the block ranks of candidate sources are kept, and the orders that later layers reuse. Use one a
    document, or one a call of a model.

    Args:
        cells: of one variant, with their scorer.
        layers: that will come by, ascending; num_layers: of the model; native: its own sparse attention, if any.
    """

    def __init__(
        self,
        cells: Collection[Cell],
        scorer: Scorer,
        layers: Collection[int],
        num_layers: int,
        native: NativeSelection | None = None,
    ) -> None:
        self.scorer = scorer
        self.variant = variant_of(next(iter(cells)), scorer)
        self.topology = cell_topology(self.variant.ratio, self.variant.index_sources, num_layers, native)
        self.pools = list(dict.fromkeys(cell.selection.candidate for cell in cells))
        self.limit = max(cell.selection.topk for cell in cells)
        self.last = {source: i for i in sorted(layers) if (source := self.topology.index_source(i)) is not None}
        self.chosen: dict[int, dict[Candidate | None, Tensor]] = {}  # tile -> what the latest source chose
        self.block_ranks: dict[tuple[int, int, int], Tensor] = {}  # source, block size, tile

    def pool(self, layer: int, candidate: Candidate | None) -> Candidate | None:
        """The pool a layer's choice is restricted to: the source and the layers before it choose freely."""
        source = self.topology.index_source(layer)
        return candidate if candidate is not None and source is not None and source > candidate.source_layer else None

    def select(self, tile: RowTile) -> dict[Candidate | None, Tensor]:
        """The best positions first, whole numbers [g, R, ≥ min(limit, n)], for every pool of this layer (see `pool`);
        as the layer chooses now or as its index source has before. Empty where nothing is selected."""
        layer, place = tile.acts.layer, tile.place
        source = self.topology.index_source(layer)
        if source is None:
            return {}
        if layer > source:
            kept = self.chosen[place] if layer < self.last[source] else self.chosen.pop(place)
            return {pool: order.to(_numbers(order)) for pool, order in kept.items()}
        orders = self._choose(tile)
        if layer < self.last[source]:
            self.chosen[place] = {pool: order.int() for pool, order in orders.items()}
        return orders

    def ranks(self, tile: RowTile, pool: Candidate) -> Tensor:
        """Block ranks of a pool's source for the tile's rows, int32 [g, R, nb]."""
        return self.block_ranks[pool.source_layer, pool.block_size, tile.place]

    def _choose(self, tile: RowTile) -> dict[Candidate | None, Tensor]:
        """Order the scores once; with a pool, what a walk along that order leaves of it."""
        v = self.variant
        known = KNOWN_ORDERS.get(type(self.scorer))
        if known is not None and self.pools == [None] and not v.sinks and v.excluded_window is None:
            return {None: known(tile, v.share, v.ratio, self.limit).to(_numbers(tile.rows))}
        scores = self.scorer.scores(tile, v.ratio, v.share)
        scores = adjust_scores(
            scores.expand(tile.groups(v.share), -1, -1),
            tile.rows,
            v.ratio,
            window=v.excluded_window or 0,
            exclude_window=v.excluded_window is not None,
            sinks=v.sinks,
            hidden=tile.hidden(v.ratio),
        )
        self._publish(tile, scores)
        pools = list(dict.fromkeys(self.pool(tile.acts.layer, pool) for pool in self.pools))
        most = self.limit if pools == [None] else None
        order = order_positions(scores, most, tile.doubts, _numbers(scores))
        found: dict[Candidate | None, Tensor] = {None: order[..., : self.limit]} if None in pools else {}
        of_source: dict[tuple[int, int], list[Candidate]] = defaultdict(list)
        for pool in pools:
            if pool is not None:
                of_source[pool.source_layer, pool.block_size].append(pool)
        for same in of_source.values():
            sizes = [pool.topk_blocks for pool in same]
            found |= zip(
                same, restrict(order, self.ranks(tile, same[0]), same[0].block_size, sizes, self.limit), strict=True
            )
        return {pool: found[pool] for pool in pools}

    def _publish(self, tile: RowTile, scores: Tensor) -> None:
        layer = tile.acts.layer
        for block_size in {p.block_size for p in self.pools if p is not None and p.source_layer == layer}:
            ranks = rank_blocks(scores, tile.visible(self.variant.ratio), block_size, tile.doubts)
            self.block_ranks[layer, block_size, tile.place] = ranks.contiguous()
