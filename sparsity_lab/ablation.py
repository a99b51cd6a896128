"""Every candidate source against every consumer, and every selection on every later layer, in one pass over a model.

Per consumer the scores are ordered once. For each earlier layer the pool at every block size and pool size is read off
that order, and the oracle's, by the running count that `selecting.restrict` uses, so the numbers are those that cells
with that candidate would get. Sums are exact, as in `passes.Tally`.

Kept between layers, and nothing else: of every layer the rank of each block at every block size, and the first
max(topk) positions of its order, all int16 (int32 beyond 32,767); see `kept_bytes`. What reuse of selections made
inside a pool takes is in `ablation_joint`.

Shapes: g groups, R rows of a tile, G = g * R, n compressed positions, nb blocks, S earlier layers, B block sizes,
P pool sizes, K budgets.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsity_lab import metrics
from sparsity_lab.cells import Candidate, Cell, Selection
from sparsity_lab.checks import CheckError
from sparsity_lab.dense import RowTile
from sparsity_lab.passes import exact_values
from sparsity_lab.pool_walk import kept_mass, kept_ranks, mass_in_pools, small_int
from sparsity_lab.scorers import Scorer
from sparsity_lab.selection import adjust_scores, order_positions

# means over the rows where they are defined; pool_oracle_coverage: of the oracle restricted to the pool
SOURCE_METRICS = ("pool_recall", "pool_coverage", "coverage", "pool_oracle_coverage", "single_coverage",
                  "oracle_coverage")  # fmt: skip
REUSE_METRICS = ("overlap", "reuse_coverage", "coverage")
SOURCE_KEYS = ("source", "consumer", "block_size", "pool_positions", "topk")
REUSE_KEYS = ("source", "consumer", "topk")
SLACK = 1e-6  # of a row's mass


@dataclass(frozen=True)
class Ablation:
    """What to compare: every combination of budget, pool size and block size.

    topk: budgets k; pool_positions: sizes of the pool, topk_blocks * block_size, in compressed positions; block_sizes:
    positions a block; joint_pools: (pool positions, block size) inside which selections are reused, too, for the search
    of index and candidate sources together; the rest: see `cells.Selection`.
    Raises:
        ValueError: nothing to compare, or a pool that cannot fill a selection or holds no whole number of blocks.
    """

    compress_ratio: int
    topk: tuple[int, ...]
    pool_positions: tuple[int, ...]
    block_sizes: tuple[int, ...]
    share: str = "layer"
    window: int = 0
    exclude_window: bool = False
    sinks: int = 0
    joint_pools: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("topk", "pool_positions", "block_sizes"):
            values = tuple(getattr(self, name))
            if not values or list(values) != sorted(set(values)):
                raise ValueError(f"ablation.{name}={list(values)}: must be ascending, each value once, at least one")
            object.__setattr__(self, name, values)
        pools = [tuple(pool) for pool in self.joint_pools]
        if len(set(pools)) < len(pools) or any(len(pool) != 2 for pool in pools):
            raise ValueError(f"ablation.joint_pools={pools}: must be pairs (pool_positions, block_size), each once")
        object.__setattr__(self, "joint_pools", tuple(pools))
        try:
            self.selection(self.topk[0])
        except ValueError as error:
            raise ValueError(str(error).replace("selection.", "ablation.")) from None
        grid = product(self.pool_positions, self.block_sizes)
        for key, compared in (("pool_positions", grid), ("joint_pools", self.joint_pools)):
            for positions, size in compared:
                if size < 1 or positions % size:
                    raise ValueError(f"ablation.{key}: {positions} positions are no multiple of block_size={size}")
                try:
                    self.selection(self.topk[-1], Candidate(0, positions // size, size))
                except ValueError as error:
                    raise ValueError(f"ablation.{key}: {positions} positions in blocks of {size}: {error}") from None

    def cells(self, scorer: str, source: int) -> list[Cell]:
        """The cells that candidate source `source` stands for."""
        pools = [Candidate(source, p // size, size) for size in self.block_sizes for p in self.pool_positions]
        return [Cell(scorer, self.selection(k, pool)) for pool in pools for k in self.topk]

    def selection(self, topk: int, candidate: Candidate | None = None) -> Selection:
        """One selection of the comparison."""
        return Selection(
            self.compress_ratio, topk, self.window, self.share, self.exclude_window, self.sinks, candidate=candidate
        )

    def describe(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return dataclasses.asdict(self)


def kept_bytes(ablation: Ablation, layers: int, rows: int, length: int, groups: int = 1) -> int:
    """Bytes kept between layers for one document of `length` tokens with `rows` sampled rows: ranks of blocks, each
    layer's own selection, and its selection inside the joint pools of the layers before it."""
    n = length // ablation.compress_ratio
    blocks = [-(-n // size) for size in {*ablation.block_sizes, *(size for _, size in ablation.joint_pools)}]
    ranks = layers * sum(count * small_int(count).itemsize for count in blocks)
    selections = layers + len(ablation.joint_pools) * layers * (layers - 1) // 2
    return groups * rows * (ranks + selections * min(ablation.topk[-1], n) * small_int(n).itemsize)


def scored(tile: RowTile, scorer: Scorer, ablation: Ablation) -> tuple[Tensor, Tensor]:
    """A layer's scores as selections see them, float32 [g, R, n], and their whole order, int64 [g, R, n]."""
    a = ablation

    def make() -> tuple[Tensor, Tensor]:
        scores = scorer.scores(tile, a.compress_ratio, a.share).expand(tile.groups(a.share), -1, -1)
        scores = adjust_scores(
            scores, tile.rows, a.compress_ratio, window=a.window, exclude_window=a.exclude_window, sinks=a.sinks
        )
        return scores, order_positions(scores)

    return tile.keep(("scored", scorer.name, a), make)


def block_ranks(tile: RowTile, scorer: Scorer, ablation: Ablation, block_size: int) -> Tensor:
    """Ranks of a layer's blocks, small integers [G, nb]."""
    a = ablation

    def make() -> Tensor:
        return kept_ranks(scored(tile, scorer, a)[0], tile.rows, a.compress_ratio, block_size)

    return tile.keep(("block ranks", scorer.name, a, block_size), make)


def row_sums(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Exact sums over rows, and how many counted: values float64 [..., G] (NaN = undefined) -> [...] each."""
    exact, defined = exact_values(values, counted)
    return exact.sum(-1), defined.double().sum(-1)


@dataclass(frozen=True)
class _Consumer:
    """A tile's rows, one a (group, row)."""

    visible: Tensor  # int64 [G]
    mass: Tensor  # float64 [G, n + 1]
    total: Tensor  # float64 [G]
    order: Tensor  # int64 [G, n]
    best: Tensor  # int64 [G, n], the oracle's order
    true: metrics.Truth

    def gains(self, order: Tensor) -> Tensor:
        return self.mass.gather(-1, order.masked_fill(order < 0, self.mass.shape[-1] - 1))


class AblationPass:
    """Compares all layers of one document; `tile` is called layer by layer, in order."""

    def __init__(self, ablation: Ablation, scorer: Scorer, layers: Sequence[int], *, checks: bool = True) -> None:
        self.ablation, self.scorer, self.layers, self.checks = ablation, scorer, list(layers), checks
        self.ranks: dict[tuple[int, int], list[Tensor]] = defaultdict(list)  # (first row, block size) -> one a layer
        self.first: dict[int, list[Tensor]] = defaultdict(list)  # first row -> the first positions of every layer
        self.source: dict[int, Tensor] = {}  # consumer -> [2 (sum, n), metric, S, B, P, K]
        self.reuse: dict[int, Tensor] = {}  # consumer -> [2, metric, S + 1, K]

    def tile(self, tile: RowTile) -> None:
        """Compare one row tile of a layer with the same rows of the layers before it."""
        layer, a = tile.acts.layer, self.ablation
        if layer not in self.layers:
            return
        order = scored(tile, self.scorer, a)[1]
        true = metrics.truth(tile, a.share, a.compress_ratio, a.window, a.topk[-1])
        best = metrics.oracle_order(tile, a.share, a.compress_ratio)
        groups = tile.groups(a.share)
        rows = _Consumer(
            true.visible.repeat(groups), true.mass.flatten(0, 1), true.total.flatten(), order.flatten(0, 1),
            best.flatten(0, 1), true,
        )  # fmt: skip
        place = tile.place
        self.first[place].append(rows.order[:, : a.topk[-1]].to(small_int(rows.order.shape[-1])))
        if self.layers[0] != layer:
            self._add(self.source, layer, self._against_pools(place, rows))
        self._add(self.reuse, layer, self._against_selections(place, rows))
        for size in a.block_sizes:
            self.ranks[place, size].append(block_ranks(tile, self.scorer, a, size))

    @staticmethod
    def _add(sums: dict[int, Tensor], layer: int, more: Tensor) -> None:
        sums[layer] = sums[layer] + more if layer in sums else more

    def _against_pools(self, place: int, rows: _Consumer) -> Tensor:
        """[2, metric, S, B, P, K]."""
        ks = torch.tensor(self.ablation.topk, device=rows.mass.device)
        whole = torch.stack([self._kept(rows.gains(order), ks) for order in (rows.order, rows.best)])  # [2, K, G]
        out = torch.stack([self._block_size(place, size, rows, ks, whole) for size in self.ablation.block_sizes], dim=3)
        return out.cpu()

    @staticmethod
    def _kept(gains: Tensor, ks: Tensor) -> Tensor:
        """Mass of the first k entries, [K, G]."""
        return gains.cumsum(-1).index_select(-1, ks.clamp(max=gains.shape[-1]) - 1).T

    def _block_size(self, place: int, size: int, rows: _Consumer, ks: Tensor, whole: Tensor) -> Tensor:
        """Sums and counts of all sources at one block size, [2, metric, S, P, K]."""
        pools = torch.tensor([p // size for p in self.ablation.pool_positions], device=ks.device)
        mass = rows.mass[:, :-1]
        of_blocks = F.pad(mass, (0, -mass.shape[-1] % size)).unflatten(-1, (-1, size)).sum(-1)
        gains, best_gains = rows.gains(rows.order), rows.gains(rows.best)
        blocks, best_blocks = (order.clamp(min=0) // size for order in (rows.order, rows.best))
        wanted, chosen = best_blocks[:, : int(ks[-1])], (rows.best >= 0)[:, : int(ks[-1])]
        counted = rows.visible > ks.unsqueeze(-1)
        possible = torch.minimum(rows.visible, ks.unsqueeze(-1)).double()
        prefix = metrics.within(ks.tolist(), wanted.shape[-1], ks.device)
        out = []
        for ranks in self.ranks[place, size]:
            inside = ranks < pools.view(-1, 1, 1)  # [P, G, nb]
            held = (inside.gather(-1, wanted.expand(len(pools), -1, -1)) & chosen).double() @ prefix
            pooled = (of_blocks * inside).sum(-1).unsqueeze(1)  # [P, 1, G]
            kept = mass_in_pools(rows.order, gains, blocks, ranks, pools, ks)
            best = mass_in_pools(rows.best, best_gains, best_blocks, ranks, pools, ks)
            # float32 ranks the oracle's masses, so near ties may lie the wrong way round
            if self.checks and bool(((kept > best + SLACK) | (best > torch.minimum(pooled, whole[1]) + SLACK)).any()):
                raise CheckError(f"block_size={size}: a selection keeps more than its pool or than the oracle")
            shares = [metrics.ratio_or_nan(x, rows.total) for x in (pooled, kept, best, *whole)]
            recall = metrics.ratio_or_nan(held.movedim(-1, 1), possible)
            values = torch.stack([x.expand_as(kept) for x in (recall, *shares)])
            out.append(torch.stack(row_sums(values, counted)))
        return torch.stack(out, dim=2)

    def _against_selections(self, place: int, rows: _Consumer) -> Tensor:
        """This layer's mass on its own selection (last) and on those of the layers before, [2, metric, S + 1, K]."""
        ks = torch.tensor(self.ablation.topk, device=rows.mass.device)
        chosen = torch.stack(self.first[place]).long()  # [S + 1, G, L]
        n = rows.mass.shape[-1] - 1
        at = chosen.masked_fill(chosen < 0, n)
        kept = kept_mass(rows.mass.expand(len(at), -1, -1), chosen, self.ablation.topk).movedim(-1, 1)  # [S + 1, K, G]
        own = metrics.ranks_of(rows.order[:, : at.shape[-1]], n + 1).expand(len(at), -1, -1).gather(-1, at)
        both = torch.maximum(own, torch.arange(at.shape[-1], dtype=torch.int32, device=ks.device))
        common = torch.stack([(both < k).sum(-1) for k in self.ablation.topk], dim=1).double()
        values = torch.stack(
            [
                common / ks.unsqueeze(-1),
                metrics.ratio_or_nan(kept, kept[-1:]),
                metrics.ratio_or_nan(kept, rows.total),
            ]
        )
        return torch.stack(row_sums(values, rows.visible > ks.unsqueeze(-1))).cpu()

    def frames(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Sums and counts of the document: a row a (source, consumer, block size, pool size, k), and a row a (source,
        consumer, k), every metric as `<metric>_sum` and `<metric>_n`."""
        a = self.ablation
        sizes = (a.block_sizes, a.pool_positions, a.topk)
        source = [
            sums_frame(sums, (self.layers[: sums.shape[2]], [layer], *sizes), SOURCE_KEYS, SOURCE_METRICS)
            for layer, sums in self.source.items()
        ]
        reuse = [
            sums_frame(sums, (self.layers[: sums.shape[2]], [layer], a.topk), REUSE_KEYS, REUSE_METRICS)
            for layer, sums in self.reuse.items()
        ]
        return pd.concat(source, ignore_index=True), pd.concat(reuse, ignore_index=True)


def sums_frame(sums: Tensor, axes: Sequence[Sequence[int]], keys: Sequence[str], names: Sequence[str]) -> pd.DataFrame:
    """[2 (sum, n), metric, *axes] in long form, a column a key, sums and counts as `<metric>_sum` and `<metric>_n`."""
    places: Any = pd.MultiIndex.from_product(axes, names=list(keys))
    columns = [f"{name}_{kind}" for kind in ("sum", "n") for name in names]
    return pd.DataFrame(sums.flatten(2).flatten(0, 1).T.cpu().numpy(), places, columns).reset_index()
