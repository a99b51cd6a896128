"""All cells of a pass, evaluated together: one forward of the model serves every cell.

Per layer, row tile, ratio and grouping the dense mass is ranked once; per scorer the index scores are ranked once. A
cell then only reads: its top-k is a prefix of the order, and with a candidate pool the prefix of what a running count
leaves of that order. So a further cell costs counting, not sorting. A layer that reuses another's selection reads the
order that the other chose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsity_lab import metrics
from sparsity_lab.cells import Candidate, Cell
from sparsity_lab.checks import check_selections
from sparsity_lab.dense import RowTile
from sparsity_lab.metrics import METRICS, NAN, Truth
from sparsity_lab.scorers import Scorer
from sparsity_lab.selecting import Selector, Variant, variant_of
from sparsity_lab.selection import on_device, stacked
from sparsity_lab.topology import NativeSelection

# Values are rounded to multiples of this before they are summed, so tallies are exact sums: they merge to the same
# bits whatever the order of rows, documents and shards.
VALUE_UNIT = 2.0**-36


def exact_values(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """The values as multiples of VALUE_UNIT, 0 where they are NaN or not counted, and where they are neither."""
    defined = ~values.isnan() & counted
    return torch.where(defined, (values / VALUE_UNIT).round() * VALUE_UNIT, 0.0), defined


def num_buckets(length: int) -> int:
    """Position buckets of a document: [1, 2) with row 0, [2, 4), [4, 8) ... up to its length."""
    return max(1, (length - 1).bit_length())


def bucket_of(rows: Tensor) -> Tensor:
    """Bucket index, floor(log2(max(s, 1))), exact below 2**48."""
    return torch.log2(rows.clamp(min=1).double()).floor().long()


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
        at, place = on_device(cells, rows.device), self.layers.index(layer)
        at_k, at_pool = (on_device(index, rows.device) for index in places)
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


class Choice(NamedTuple):
    """What a selector chose in a layer for some cells, which then differ in budget only."""

    order: Tensor  # whole numbers [g, R, L], best first, -1 = nothing
    pool: Candidate | None
    ranks: Tensor | None  # int32 [g, R, nb], block ranks of the pool's source
    example: Cell
    own: bool  # the layer selected by its own scores, rather than reuse another's selection
    limit: int  # the largest k that the order answers for
    cells: list[int]


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
        self.kmax: dict[tuple[str, int], int] = defaultdict(int)
        members: dict[Variant, list[int]] = defaultdict(list)
        for i, cell in enumerate(self.cells):
            variant = variant_of(cell, scorers[cell.scorer])
            members[variant].append(i)
            group = (variant.share, variant.ratio)
            self.kmax[group] = max(self.kmax[group], cell.selection.topk)
        self.selectors = [
            (Selector([cells[i] for i in own], scorers[v.scorer], tally.layers, num_layers, native), own)
            for v, own in members.items()
        ]

    def tile(self, tile: RowTile) -> None:
        """Evaluate all cells on one row tile of one layer; what has the same truth is looked up together."""
        together: dict[tuple[str, int, int], list[Choice]] = defaultdict(list)
        for selector, members in self.selectors:
            orders = selector.select(tile)
            chosen: dict[tuple[int, Candidate | None], Choice] = {}
            for i in members if orders else ():
                selection = self.cells[i].selection
                pool = selector.pool(tile.acts.layer, selection.candidate)
                if (selection.window, pool) not in chosen:
                    ranks = None if pool is None else selector.ranks(tile, pool)
                    own = selector.topology.index_source(tile.acts.layer) == tile.acts.layer
                    choice = Choice(orders[pool], pool, ranks, self.cells[i], own, selector.limit, [])
                    chosen[selection.window, pool] = choice
                    together[selection.share, selection.compress_ratio, selection.window].append(choice)
                chosen[selection.window, pool].cells.append(i)
        for (share, ratio, window), choices in together.items():
            true = metrics.truth(tile, share, ratio, window, self.kmax[share, ratio])
            self._read(tile, share, ratio, choices, true)

    def _read(self, tile: RowTile, share: str, ratio: int, choices: Sequence[Choice], true: Truth) -> None:
        """All metrics of the cells of P choices into the tally."""
        cells = [i for choice in choices for i in choice.cells]
        budgets = sorted({self.cells[i].selection.topk for i in cells})
        order = stacked([choice.order for choice in choices])
        found = metrics.selection_metrics(order, ratio, tile.rows, true, budgets)
        found |= metrics.pool_metrics(_pools(choices, true, budgets), found["hits"], true, budgets)
        few = None if self.detail_rows is None else metrics.detail(tile, share, ratio, self.detail_rows)
        if few is not None:
            found |= metrics.head_metrics(tile, order, ratio, true, few, budgets)
        missing = torch.full_like(found["hits"], NAN)
        values = torch.stack([found.get(name, missing) for name in METRICS])
        if self.checks:
            check_selections(tile, choices, order, true, values, budgets)
        at_k = [budgets.index(self.cells[i].selection.topk) for i in cells]
        at_choice = [p for p, choice in enumerate(choices) for _ in choice.cells]
        ks = on_device(budgets, order.device).unsqueeze(-1)
        self.tally.add(cells, tile.acts.layer, tile.rows, values, true.visible, ks, (at_k, at_choice))


def _pools(choices: Sequence[Choice], true: Truth, budgets: Sequence[int]) -> metrics.Pools:
    """The pool of every choice, NaN where there is none; the pools of one source are looked up together."""
    held = true.total.new_full((len(budgets), len(choices), *true.total.shape), NAN)
    mass = true.total.new_full((len(choices), *true.total.shape), NAN)
    of_source: dict[tuple[int, int], list[tuple[int, Candidate, Tensor]]] = defaultdict(list)
    for p, choice in enumerate(choices):
        if choice.pool is not None and choice.ranks is not None:
            of_source[id(choice.ranks), choice.pool.block_size].append((p, choice.pool, choice.ranks))
    if of_source:
        pools = [
            metrics.pools_of(same[0][2], [pool.topk_blocks for _, pool, _ in same], block_size, true, budgets)
            for (_, block_size), same in of_source.items()
        ]
        at = on_device([p for same in of_source.values() for p, _, _ in same], held.device)
        held[:, at] = torch.cat([pool.oracle_hits for pool in pools], dim=1)
        mass[at] = torch.cat([pool.mass for pool in pools])
    return metrics.Pools(held, mass)
