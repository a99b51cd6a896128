"""All cells of a pass, evaluated together: one forward of the model serves every cell.

Per layer, row tile, ratio and grouping the dense mass is ranked once; per scorer the index scores are ranked once. A
cell then only reads: its top-k is a prefix of the order, and with a candidate pool the prefix of what a running count
leaves of that order. So a further cell costs counting, not sorting. A layer that reuses another's selection reads the
order that the other chose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsity_lab import metrics
from sparsity_lab.cells import Candidate, Cell, cell_topology, index_sources
from sparsity_lab.checks import check_selections
from sparsity_lab.dense import RowTile
from sparsity_lab.metrics import METRICS, NAN, Truth
from sparsity_lab.scorers import Scorer
from sparsity_lab.selection import DROPPED, adjust_scores, order_positions, rank_blocks, visible_lengths
from sparsity_lab.topology import NativeSelection, Topology

# Values are rounded to multiples of this before they are summed, so tallies are exact sums: they merge to the same
# bits whatever the order of rows, documents and shards.
VALUE_UNIT = 2.0**-36


def exact_values(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """The values as multiples of VALUE_UNIT, 0 where they are NaN or not counted, and where they are neither."""
    defined = ~values.isnan() & counted
    return torch.where(defined, (values / VALUE_UNIT).round() * VALUE_UNIT, 0.0), defined


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


def num_buckets(length: int) -> int:
    """Position buckets of a document: [1, 2) with row 0, [2, 4), [4, 8) ... up to its length."""
    return max(1, (length - 1).bit_length())


def bucket_of(rows: Tensor) -> Tensor:
    """Bucket index, floor(log2(max(s, 1))), exact below 2**48."""
    return torch.log2(rows.clamp(min=1).double()).floor().long()


def restrict(order: Tensor, block_rank: Tensor, topk_blocks: int, limit: int) -> Tensor:
    """The first `limit` entries of an order that lie in the pool, by a running count instead of a second sort.

    Args:
        order: int64 [..., n], -1 where nothing.
        block_rank: int32 [..., n], rank of each entry's block (DROPPED for -1).
    Returns:
        int64 [..., min(limit, n)], -1 where the pool holds fewer.
    """
    inside = block_rank < topk_blocks
    keep = inside & (inside.cumsum(-1, dtype=torch.int32) <= limit)
    out = order.new_full((*order.shape[:-1], min(limit, order.shape[-1])), -1)
    filled = torch.arange(out.shape[-1], device=order.device) < keep.sum(-1, keepdim=True)
    # both masks are walked row by row, so entries land in their own row, in order
    return out.masked_scatter_(filled, order.masked_select(keep))


class Tally:
    """Sums and counts a (cell, layer, bucket) over one document; exact, so they add up in any order."""

    def __init__(self, cells: int, layers: Sequence[int], length: int, device: torch.device) -> None:
        self.layers = list(layers)
        shape = (cells, len(layers), num_buckets(length))
        self.sums = torch.zeros((*shape, len(METRICS)), dtype=torch.float64, device=device)
        self.counts = torch.zeros((*shape, len(METRICS)), dtype=torch.float64, device=device)
        self.rows = torch.zeros((*shape, 3), dtype=torch.float64, device=device)  # averaged, saturated, empty

    def add(
        self,
        cells: Sequence[int],
        layer: int,
        rows: Tensor,
        values: Tensor,
        visible: Tensor,
        ks: Tensor,
        places: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        """values float64 [metric, K, P, g, R] (NaN = undefined) for budgets ks [K, 1] and P selections; `places` holds
        the index along K and along P of every cell."""
        into = torch.nn.functional.one_hot(bucket_of(rows), self.sums.shape[2]).double()
        kinds = torch.stack([visible > ks, (visible <= ks) & (visible > 0), (visible == 0).expand(len(ks), -1)])
        exact, defined = exact_values(values, kinds[0][:, None, None])
        at, place = torch.tensor(cells, device=rows.device), self.layers.index(layer)
        at_k, at_pool = (torch.tensor(index, device=rows.device) for index in places)
        self.sums[at, place] += (exact.sum(3) @ into)[:, at_k, at_pool].permute(1, 2, 0)
        self.counts[at, place] += (defined.double().sum(3) @ into)[:, at_k, at_pool].permute(1, 2, 0)
        self.rows[at, place] += (kinds.double() @ into)[:, at_k].permute(1, 2, 0) * values.shape[3]

    def columns(self) -> dict[str, np.ndarray]:
        """Long form: indices of cell, layer and bucket, then the tallies; combinations without rows are left out."""
        rows = self.rows.cpu().numpy()
        cell, layer, bucket = np.nonzero(rows.sum(-1))
        out: dict[str, np.ndarray] = {
            "cell": cell.astype(np.int32),
            "layer": np.asarray(self.layers, dtype=np.int32)[layer],
            "bucket": (1 << bucket).astype(np.int64),
        }
        for i, name in enumerate(("rows", "saturated", "empty")):
            out[name] = rows[cell, layer, bucket, i].astype(np.int64)
        sums, counts = self.sums.cpu().numpy()[cell, layer, bucket], self.counts.cpu().numpy()[cell, layer, bucket]
        for i, name in enumerate(METRICS):
            out[f"{name}_sum"] = sums[:, i]
            out[f"{name}_n"] = counts[:, i].astype(np.int64)
        return out


class DocumentPass:
    """Evaluates every cell on one document, layer by layer.

    Between layers only the block ranks of candidate sources are kept, and the first entries of orders that later layers
    reuse.

    Args:
        num_layers: of the model; native: its own sparse attention, if it has one.
        detail_rows: the rows on which per-head metrics are measured, int64 [E].
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        scorers: Mapping[str, Scorer],
        tally: Tally,
        *,
        num_layers: int,
        native: NativeSelection | None = None,
        detail_rows: Tensor | None = None,
        checks: bool = True,
    ) -> None:
        self.cells = list(cells)
        self.scorers = scorers
        self.tally = tally
        self.detail_rows = detail_rows
        self.checks = checks
        self.block_ranks: dict[tuple[Variant, int, int, int], Tensor] = {}
        self.chosen: dict[tuple[Variant, int], dict[Candidate | None, Tensor]] = {}
        self.by_variant: dict[Variant, list[int]] = defaultdict(list)
        self.kmax: dict[tuple[str, int], int] = defaultdict(int)
        for i, cell in enumerate(self.cells):
            variant = variant_of(cell, scorers[cell.scorer])
            self.by_variant[variant].append(i)
            group = (variant.share, variant.ratio)
            self.kmax[group] = max(self.kmax[group], cell.selection.topk)
        self.topologies: dict[Variant, Topology] = {
            v: cell_topology(v.ratio, v.index_sources, num_layers, native) for v in self.by_variant
        }

    def tile(self, tile: RowTile) -> None:
        """Evaluate all cells on one row tile of one layer."""
        for variant, members in self.by_variant.items():
            source = self.topologies[variant].index_source(tile.acts.layer)
            if source is None:
                continue
            searches: dict[int, dict[Candidate | None, list[int]]] = defaultdict(lambda: defaultdict(list))
            for i in members:
                selection = self.cells[i].selection
                pool = selection.candidate
                # the source and the layers before it choose freely, as published
                inside = pool if pool is not None and source > pool.source_layer else None
                searches[selection.window][inside].append(i)
            pools = dict.fromkeys(pool for pools in searches.values() for pool in pools)
            orders = self._orders(tile, variant, source, pools)
            for window, cells in searches.items():
                true = metrics.truth(
                    tile, variant.share, variant.ratio, window, self.kmax[variant.share, variant.ratio]
                )
                order = torch.stack([orders[pool] for pool in cells])
                self._read(tile, variant, cells, order, true, own=source == tile.acts.layer)

    def _orders(
        self, tile: RowTile, variant: Variant, source: int, pools: Iterable[Candidate | None]
    ) -> dict[Candidate | None, Tensor]:
        """Per pool the order, int64 [g, R, L], that the layer chooses now or that its source has chosen before."""
        layer, place = tile.acts.layer, (variant, int(tile.rows[0]))
        last = max(i for i in self.tally.layers if self.topologies[variant].index_source(i) == source)
        if layer > source:
            kept = self.chosen[place] if layer < last else self.chosen.pop(place)
            return {pool: order.long() for pool, order in kept.items()}
        orders = self._select(tile, variant, pools)
        if layer < last:
            kmax = max(self.cells[i].selection.topk for i in self.by_variant[variant])
            self.chosen[place] = {pool: order[..., :kmax].int() for pool, order in orders.items()}
        return orders

    def _select(
        self, tile: RowTile, variant: Variant, pools: Iterable[Candidate | None]
    ) -> dict[Candidate | None, Tensor]:
        """Order the scores once; with a pool, what a walk along that order leaves of it."""
        scores = self.scorers[variant.scorer].scores(tile, variant.ratio, variant.share)
        scores = adjust_scores(
            scores.expand(tile.groups(variant.share), -1, -1),
            tile.rows,
            variant.ratio,
            window=variant.excluded_window or 0,
            exclude_window=variant.excluded_window is not None,
            sinks=variant.sinks,
        )
        self._publish(tile, variant, scores)
        kmax = self.kmax[variant.share, variant.ratio]
        order = order_positions(scores, kmax if set(pools) == {None} else None)
        in_order: dict[tuple[int, int], Tensor] = {}
        return {pool: self._inside(tile, variant, order, pool, kmax, in_order) for pool in pools}

    def _publish(self, tile: RowTile, variant: Variant, scores: Tensor) -> None:
        layer = tile.acts.layer
        pools = {self.cells[i].selection.candidate for i in self.by_variant[variant]}
        for block_size in {p.block_size for p in pools if p is not None and p.source_layer == layer}:
            ranks = rank_blocks(scores, visible_lengths(tile.rows, variant.ratio), block_size)
            self.block_ranks[variant, layer, block_size, int(tile.rows[0])] = ranks

    def _ranks(self, tile: RowTile, variant: Variant, pool: Candidate) -> Tensor:
        return self.block_ranks[variant, pool.source_layer, pool.block_size, int(tile.rows[0])]

    def _inside(
        self,
        tile: RowTile,
        variant: Variant,
        order: Tensor,
        pool: Candidate | None,
        limit: int,
        in_order: dict[tuple[int, int], Tensor],
    ) -> Tensor:
        """The first `limit` entries of the order in the pool; `in_order` keeps each source's block ranks along it."""
        if pool is None:
            return order[..., :limit]
        source = (pool.source_layer, pool.block_size)
        if source not in in_order:
            ranks = self._ranks(tile, variant, pool).gather(-1, order.clamp(min=0) // pool.block_size)
            in_order[source] = ranks.masked_fill_(order < 0, DROPPED)
        return restrict(order, in_order[source], pool.topk_blocks, limit)

    def _read(
        self,
        tile: RowTile,
        variant: Variant,
        pools: Mapping[Candidate | None, Sequence[int]],
        order: Tensor,
        true: Truth,
        own: bool,
    ) -> None:
        """All metrics of the cells of every pool into the tally; order [P, g, R, L], a pool each.

        own: the layer chose it itself.
        """
        cells = [i for members in pools.values() for i in members]
        budgets = sorted({self.cells[i].selection.topk for i in cells})
        found = metrics.selection_metrics(order, variant.ratio, tile.rows, true, budgets)
        ranks = [None if p is None else self._ranks(tile, variant, p) for p in pools]
        held = [
            None if p is None or r is None else metrics.pool_of(r, p.topk_blocks, p.block_size, true, budgets)
            for p, r in zip(pools, ranks, strict=True)
        ]
        found |= metrics.pool_metrics(held, true, found["hits"], budgets)
        few = self._detail(tile, variant)
        if few is not None:
            found |= metrics.head_metrics(tile, order, variant.ratio, true, few, budgets)
        missing = torch.full_like(found["hits"], NAN)
        values = torch.stack([found.get(name, missing) for name in METRICS])
        ks = torch.tensor(budgets, device=order.device).unsqueeze(-1)
        if self.checks:
            examples = {p: self.cells[members[0]] for p, members in pools.items()}
            check_selections(tile, examples, ranks, order, true, values, budgets, own)
        at_k = [budgets.index(self.cells[i].selection.topk) for i in cells]
        at_pool = [p for p, members in enumerate(pools.values()) for _ in members]
        self.tally.add(cells, tile.acts.layer, tile.rows, values, true.visible, ks, (at_k, at_pool))

    def _detail(self, tile: RowTile, variant: Variant) -> metrics.Detail | None:
        if self.detail_rows is None:
            return None
        return metrics.detail(tile, variant.share, variant.ratio, self.detail_rows)
