"""`model.attention=sparse`: the selection applied while something is measured, from a configuration's values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparsity_lab.activations import ObservableModel
from sparsity_lab.cells import Candidate, Selection, cell_topology, index_sources

if TYPE_CHECKING:
    from sparsity_lab.models.sparse import SparseModel

SPARSE = "sparse"
INDEX_SOURCES = "index_sources"


def settled(model: Mapping[str, Any], scorer: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings of a model with `applied.scorer` named in full; without `applied` where nothing is.

    Args:
        scorer: the run's own, which stands where `applied.scorer` is null.
    Raises:
        ValueError: neither is there.
    """
    model = dict(model)
    applied = model.pop("applied", None)
    if applied is None or model.get("attention") != SPARSE:
        return model
    chosen = applied["scorer"] or scorer
    if chosen is None:
        raise ValueError("model.applied.scorer=null: this experiment has no scorer of its own; name one")
    if isinstance(chosen, str):
        chosen = {"name": "lightning", "weights": "shipped"} if chosen == "learned" else {"name": chosen}
    return model | {"applied": {**applied, "scorer": dict(chosen)}}


def sparse_model(model: ObservableModel, applied: Mapping[str, Any]) -> SparseModel:
    """A loaded model with a selection applied.

    Raises:
        ValueError: a value out of range, or that does not fit the model, by its key.
    """
    from sparsity_lab.job import build_scorer
    from sparsity_lab.models.sparse import SparseModel

    options = dict(applied)
    pool, layers, first = options.pop("candidate"), options.pop("layers"), options.pop("dense_layers")
    try:
        scorer = build_scorer(options.pop("scorer"), model)
        if any(value is not None for value in pool.values()):
            options["candidate"] = Candidate(**pool)
        selection = Selection(**options)
        return SparseModel(model, selection, scorer, _layers(layers, first, selection, scorer, model))
    except ValueError as error:
        text = str(error).replace("selection.", "model.applied.")
        raise ValueError(f"model.applied.{text}" if text.startswith(("layers=", "scorer.")) else text) from error


def _layers(layers: Any, first: int, selection: Selection, scorer: Any, model: ObservableModel) -> list[int] | None:
    """The layers to apply a selection in."""
    if isinstance(layers, str) and layers != INDEX_SOURCES:
        raise ValueError(f"layers={layers!r}: must be null, a list of layers, or {INDEX_SOURCES}")
    if first < 0:
        raise ValueError(f"model.applied.dense_layers={first}: must be at least 0")
    full = [layer for layer, window in model.windows().items() if window is None]
    if layers == INDEX_SOURCES:
        sources = index_sources(selection.index_source_layers, scorer)
        selecting = cell_topology(selection.compress_ratio, sources, model.num_layers).index_source_layers
        layers = [layer for layer in selecting if layer in full]
    kept = [layer for layer in (full if layers is None else layers) if layer >= first]
    if not kept and full:
        raise ValueError(f"model.applied.dense_layers={first}: leaves no layer to apply a selection in")
    return kept or None
