"""The sparse attention that a model brings along: its own indexer as a scorer, its own selection as cells."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsity_lab.activations import ObservableModel
from sparsity_lab.cells import Selection
from sparsity_lab.dense import RowTile
from sparsity_lab.indexer import index_scores
from sparsity_lab.topology import NativeSelection


class Native:
    """Scorer: the model's own indexer, with the queries, weights and keys it really used.

    Layers that reuse another's selection in the model do so here too, unless a cell names `index_source_layers` itself.

    Raises:
        ValueError: a model without an indexer of its own.
    """

    name = "native"

    def __init__(self, model: ObservableModel) -> None:
        if model.native is None:
            raise ValueError(f"scorer=native: {model.name} has no indexer of its own; scorer=lightning attaches one")
        self.topology = model.native.topology
        self.index_source_layers = model.native.topology.index_source_layers

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def check(self, selection: Selection) -> None:
        """Raise ValueError where the indexer has no scores for a selection."""
        own = sorted(set(self.topology.compress_ratios) - {0})
        if selection.compress_ratio not in own:
            raise ValueError(
                f"selection.compress_ratio={selection.compress_ratio}: the model's indexer scores at {own}"
            )
        _check_share(selection.share)

    def scores(self, tile: RowTile, ratio: int, share: str) -> Tensor:
        """float32 [1, R, n].

        Raises:
            ValueError: the layer has no index scores, or not at this ratio or for this share.
        """
        _check_share(share)
        index = tile.acts.index
        if index is None or index.ratio != ratio:
            found = "none" if index is None else f"scores at {index.ratio}"
            raise ValueError(
                f"scorer=native: layer {tile.acts.layer} has {found}, needed at selection.compress_ratio={ratio}"
            )
        return index_scores(index.q[:, tile.rows], index.k, index.w[:, tile.rows], index.relu)


def _check_share(share: str) -> None:
    if share != "layer":
        raise ValueError(f"selection.share={share}: scorer=native has one selection a layer; set selection.share=layer")


def native_cells(native: NativeSelection) -> list[dict[str, Any]]:
    """The model's own selection as matched fields of `cells.expand`: a single-level cell per ratio, and a two-level
    one at the ratio of its candidate source."""
    topology, source = native.topology, native.topology.candidate_source_layer
    selecting = {topology.compress_ratios[layer] for layer in topology.index_source_layers}
    cells: list[dict[str, Any]] = [{"compress_ratio": ratio, "candidate": None} for ratio in sorted(selecting)]
    if source is not None:
        pool = {"source_layer": source, "topk_blocks": native.topk_blocks, "block_size": native.block_size}
        cells.append({"compress_ratio": topology.compress_ratios[source], "candidate": pool})
    return cells
