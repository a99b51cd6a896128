"""Selections made inside a candidate pool and reused by later layers: every candidate source with every index source
behind it, on every layer that could use what the latter selected. With these triples the search of index sources and
candidate source together is exact on the documents they were measured on.

Kept between layers, beside the block ranks that `ablation` keeps: the first max(topk) positions that each layer selects
inside the pool of each layer before it, counted by `ablation.kept_bytes`.

Shapes: G rows (groups times query rows), n compressed positions, S candidate sources, K budgets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from sparsity_lab import metrics
from sparsity_lab.ablation import Ablation, block_ranks, row_sums, scored, sums_frame
from sparsity_lab.dense import RowTile
from sparsity_lab.pool_walk import kept_mass, picks_in_pool
from sparsity_lab.scorers import Scorer

JOINT_KEYS = ("candidate", "source", "consumer", "pool_positions", "block_size", "topk")
JOINT_METRICS = ("coverage",)
Pool = tuple[int, int]  # (pool positions, block size)


class JointPass:
    """Coverage by triples of one document; `tile` is called layer by layer, in order."""

    def __init__(self, ablation: Ablation, scorer: Scorer, layers: Sequence[int]) -> None:
        self.ablation, self.scorer, self.layers = ablation, scorer, list(layers)
        self.ranks: dict[tuple[int, int], list[Tensor]] = defaultdict(list)  # (tile, block size) -> one a layer
        self.picks: dict[tuple[int, Pool], list[Tensor]] = defaultdict(list)  # -> [S, G, L], one a layer but the first
        self.sums: dict[tuple[Pool, int, int], Tensor] = {}  # (pool, index source, consumer) -> [2 (sum, n), S, K]

    def tile(self, tile: RowTile) -> None:
        """Read one row tile of a layer, on its own selections in the pools and on those of the layers before it."""
        a, layer, place = self.ablation, tile.acts.layer, tile.place
        if layer not in self.layers or not a.joint_pools:
            return
        order = scored(tile, self.scorer, a)[1].flatten(0, 1)
        true = metrics.truth(tile, a.share, a.compress_ratio, a.window, a.topk[-1])
        mass, total = true.mass.flatten(0, 1), true.total.flatten()
        visible = true.visible.repeat(tile.groups(a.share))
        for pool in a.joint_pools:
            picks = self.picks[place, pool]
            if self.ranks[place, pool[1]]:
                picks.append(self._select(order, self.ranks[place, pool[1]], pool))
            for source, chosen in zip(self.layers[1:], picks, strict=False):
                more = self._coverage(chosen.long(), mass, total, visible)
                key = (pool, source, layer)
                self.sums[key] = self.sums[key] + more if key in self.sums else more
        for size in {size for _, size in a.joint_pools}:
            self.ranks[place, size].append(block_ranks(tile, self.scorer, a, size))

    def _select(self, order: Tensor, ranks: Sequence[Tensor], pool: Pool) -> Tensor:
        """What the layer selects inside the pool of every layer before it, small integers [S, G, L]."""
        positions, size = pool
        blocks = order.clamp(min=0) // size
        return torch.stack(
            [picks_in_pool(order, blocks, one, positions // size, self.ablation.topk[-1]) for one in ranks]
        )

    def _coverage(self, chosen: Tensor, mass: Tensor, total: Tensor, visible: Tensor) -> Tensor:
        """Sums and counts over rows, [2, S, K], of selections [S, G, L]; mass [G, n + 1], total and visible [G]."""
        ks = torch.tensor(self.ablation.topk, device=mass.device)
        kept = kept_mass(mass.expand(len(chosen), -1, -1), chosen, self.ablation.topk).movedim(-1, 1)  # [S, K, G]
        return torch.stack(row_sums(metrics.ratio_or_nan(kept, total), visible > ks.unsqueeze(-1)))

    def frame(self) -> pd.DataFrame:
        """A row a (candidate source, index source, consumer, pool, k): sum and count of coverage."""
        parts = []
        for ((positions, size), source, consumer), sums in self.sums.items():
            axes = (self.layers[: sums.shape[1]], [source], [consumer], [positions], [size], self.ablation.topk)
            parts.append(sums_frame(sums.unsqueeze(1), axes, JOINT_KEYS, JOINT_METRICS))
        return pd.concat(parts, ignore_index=True)
