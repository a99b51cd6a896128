"""`model.attention=sparse`: the selection applied while something is measured, from a configuration's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparsity_lab.activations import ObservableModel
from sparsity_lab.cells import Candidate, Selection, cell_topology, index_sources

if TYPE_CHECKING:
    from sparsity_lab.models.sparse import SparseModel

SPARSE = "sparse"
INDEX_SOURCES = "index_sources"
KEY = "model.applied"


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
        full = [layer for layer, window in model.windows().items() if window is None]
        where = None  # SparseModel says what is wrong with a model without full attention
        if full:
            where = layers_to_apply(KEY, layers, first, selection, scorer, full, model.num_layers)
        return SparseModel(model, selection, scorer, where)
    except ValueError as error:
        text = str(error).replace("selection.", f"{KEY}.")
        raise ValueError(f"{KEY}.{text}" if text.startswith(("layers=", "scorer.")) else text) from error


def check_layers(key: str, layers: Any, dense_layers: int) -> None:
    """What can be told of `<key>.layers` and `<key>.dense_layers` before there is a model; else ValueError."""
    if isinstance(layers, str) and layers != INDEX_SOURCES:
        raise ValueError(f"{key}.layers={layers!r}: must be null, a list of layers, or {INDEX_SOURCES}")
    if dense_layers < 0:
        raise ValueError(f"{key}.dense_layers={dense_layers}: must be at least 0")


def layers_to_apply(
    key: str, layers: Any, dense_layers: int, selection: Selection, scorer: Any, available: Sequence[int], number: int
) -> list[int]:
    """The layers in which a selection is applied, of those `available` in a model with `number` layers; the others stay
    dense.

    Args:
        key: where the options stand, for messages; layers: None = all, a list, or "index_sources".
        dense_layers: so many first layers stay dense.
    Raises:
        ValueError: layers that cannot select, or none left.
    """
    check_layers(key, layers, dense_layers)
    if layers == INDEX_SOURCES:
        sources = index_sources(selection.index_source_layers, scorer)
        selecting = cell_topology(selection.compress_ratio, sources, number).index_source_layers
        layers = [layer for layer in selecting if layer in available]
    chosen = list(available) if layers is None else [int(layer) for layer in layers]
    if unknown := [layer for layer in chosen if layer not in available]:
        raise ValueError(f"{key}.layers={unknown}: no full attention there; layers with it are {list(available)}")
    kept = [layer for layer in chosen if layer >= dense_layers]
    if not kept:
        raise ValueError(f"{key}.dense_layers={dense_layers}: leaves no layer to apply a selection in")
    return kept
