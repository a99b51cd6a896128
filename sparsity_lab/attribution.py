"""Where coverage is lost, step by step, for one selection: a waterfall that sums exactly.

    token_oracle   the best k * r tokens
    oracle         the best k groups              - compression loss
    pool_oracle    the best k in the pool         - pool loss
    own            the layer's own scores         - scorer loss
    used           what the layer attends to      - reuse loss (0 where it selects itself)

Each is a share of the layer's visible dense mass, on the same rows, so the losses of a layer add up to token_oracle -
used, and `used` is the coverage of the cell. A layer has a pool where its index source comes after the candidate
source, as in `passes`. Reuse may gain what the layer's own scores lose; its loss is negative then.

Shapes: g groups, R rows of a tile, n compressed positions, K budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from sparsity_lab import metrics
from sparsity_lab.ablation import Ablation, row_sums, scored
from sparsity_lab.cells import Candidate, cell_topology, index_sources
from sparsity_lab.dense import RowTile
from sparsity_lab.pool_walk import kept_mass
from sparsity_lab.scorers import Scorer
from sparsity_lab.selecting import restrict
from sparsity_lab.selection import rank_blocks
from sparsity_lab.topology import NativeSelection

STEPS = ("token_oracle", "oracle", "pool_oracle", "own", "used")
LOSSES = ("compression_loss", "pool_loss", "scorer_loss", "reuse_loss")


class AttributionPass:
    """The waterfall of one document; `tile` is called layer by layer, in order.

    Args:
        ablation: its budgets, compress ratio, grouping and window are those of the selection.
        layers: that have scores of their own, ascending.
        candidate: the pool, or None; index_source_layers: see `cells.Selection`.
    Raises:
        ValueError: a source that is not among `layers`.
    """

    def __init__(
        self,
        ablation: Ablation,
        scorer: Scorer,
        layers: Sequence[int],
        num_layers: int,
        *,
        native: NativeSelection | None = None,
        candidate: Candidate | None = None,
        index_source_layers: Sequence[int] | None = None,
    ) -> None:
        self.ablation, self.scorer, self.candidate = ablation, scorer, candidate
        named = index_sources(index_source_layers, scorer)
        self.topology = cell_topology(ablation.compress_ratio, named, num_layers, native)
        self.sources = {i: source for i in layers if (source := self.topology.index_source(i)) is not None}
        needed = {*self.sources.values(), *(() if candidate is None else [candidate.source_layer])}
        if lacking := sorted(needed - {i for i, source in self.sources.items() if i == source}):
            raise ValueError(
                f"attribution: layers {lacking} must select for others, but are no index sources among {list(layers)}"
            )
        self.ranks: dict[int, Tensor] = {}  # first row -> block ranks of the candidate source
        self.chosen: dict[tuple[int, int], Tensor] = {}  # (first row, index source) -> what it selected
        self.sums: dict[int, Tensor] = {}  # layer -> [2 (sum, n), step, K]

    def tile(self, tile: RowTile) -> None:
        """Read the steps of one row tile of a layer."""
        layer, a = tile.acts.layer, self.ablation
        if layer not in self.sources:
            return
        place, source, most = tile.place, self.sources[layer], a.topk[-1]
        scores, order = scored(tile, self.scorer, a)
        best = metrics.oracle_order(tile, a.share, a.compress_ratio)
        pool = self.candidate if self.candidate is not None and source > self.candidate.source_layer else None
        own, in_pool = (self._inside(x, place, pool)[..., :most] for x in (order, best))
        if layer == source:
            self.chosen[place, layer] = own
        if self.candidate is not None and layer == self.candidate.source_layer:
            lengths = tile.visible(a.compress_ratio)
            self.ranks[place] = rank_blocks(scores, lengths, self.candidate.block_size)
        true = metrics.truth(tile, a.share, a.compress_ratio, a.window, most)
        steps = (best[..., :most], in_pool, own, self.chosen[place, source])
        kept = [kept_mass(true.mass, order, a.topk).movedim(-1, 0) for order in steps]
        kept.insert(0, self._tokens(tile, true, kept[0]))
        values = torch.stack([metrics.ratio_or_nan(x, true.total) for x in kept])  # [step, K, g, R]
        ks = torch.tensor(a.topk, device=values.device).view(-1, 1, 1)
        counted = (true.visible > ks).expand(values.shape[1:])
        more = torch.stack(row_sums(values.flatten(2), counted.flatten(1))).cpu()
        self.sums[layer] = self.sums[layer] + more if layer in self.sums else more

    def _inside(self, order: Tensor, place: int, pool: Candidate | None) -> Tensor:
        """The order's entries in the pool, int64 [g, R, min(max k, n)]; all of it without one."""
        if pool is None:
            return order
        return restrict(order, self.ranks[place], pool.block_size, [pool.topk_blocks], self.ablation.topk[-1])[0]

    def _tokens(self, tile: RowTile, true: metrics.Truth, oracle: Tensor) -> Tensor:
        """Mass of the best k * r tokens in complete groups, float64 [K, g, R]; a layer that attends to compressed keys
        has no tokens to choose from and loses nothing here."""
        ratio = self.ablation.compress_ratio
        if tile.acts.compressed is not None or ratio == 1:
            return oracle
        tokens = tile.token_mass(self.ablation.share)
        hidden = torch.arange(tile.length, device=tokens.device) >= (true.visible * ratio).unsqueeze(-1)
        most = min(self.ablation.topk[-1] * ratio, tile.length)
        kept = tokens.masked_fill(hidden, 0.0).topk(most, dim=-1).values
        prefix = metrics.within([k * ratio for k in self.ablation.topk], most, tokens.device)
        return (kept @ prefix).movedim(-1, 0)

    def frame(self) -> pd.DataFrame:
        """A row a (layer, k): `n` rows and the sum of every step over them."""
        rows: list[dict[str, Any]] = []
        for layer, (sums, counts) in self.sums.items():
            for i, k in enumerate(self.ablation.topk):
                steps = {f"{name}_sum": float(sums[s, i]) for s, name in enumerate(STEPS)}
                rows.append({"layer": layer, "topk": k, "n": float(counts[0, i]), **steps})
        return pd.DataFrame(rows)


def waterfall(tallies: pd.DataFrame, *, overall: bool = False) -> pd.DataFrame:
    """Steps and losses by layer and k: means over rows, then documents; `overall`: means over layers, too. The losses
    add up to token_oracle - used, to rounding.

    Args:
        tallies: frames of `AttributionPass.frame`, with `document`.
    """
    means = tallies[["document", "layer", "topk"]].copy()
    for name in STEPS:
        means[name] = tallies[f"{name}_sum"] / tallies["n"].where(tallies["n"] > 0)
    table = means.groupby(["layer", "topk"], sort=True)[list(STEPS)].mean().reset_index()
    if overall:
        table = table.groupby("topk", sort=True)[list(STEPS)].mean().reset_index()
    for loss, before, after in zip(LOSSES, STEPS, STEPS[1:], strict=False):
        table[loss] = table[before] - table[after]
    return table
