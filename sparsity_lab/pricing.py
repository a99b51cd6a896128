"""What measured cells would cost, decoding on a device at a context.

Costs are those of `sparsity_lab.cost`: attention and indexing of one decoded token, in the layers with full causal
attention, at the roofline of a device. The rest of the model costs the same whatever is selected.

Coverage was measured on documents of some length; at another context two assumptions are at hand (`Setting.budget`).
"scaled": k and the pool grow with the context, so that the share selected stays what was measured. "fixed": k and the
pool stay, and what they cover of a longer context is unknown and likely less.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from sparsity_lab import cost
from sparsity_lab.cells import Candidate, Cell, Selection
from sparsity_lab.cost import Architecture, Device, IndexShape
from sparsity_lab.lightning import IndexerConfig
from sparsity_lab.measurement import ENVELOPE
from sparsity_lab.results import Results
from sparsity_lab.shape import ModelShape
from sparsity_lab.topology import Topology

if TYPE_CHECKING:
    from sparsity_lab.evaluation.summary import EvaluationResults

BUDGETS = ("scaled", "fixed")
COUNTED = ("seconds", "read_bytes", "flops", "kv_bytes", "index_bytes")


class UnpricedError(ValueError):
    """A cell whose cost is not known, and why."""


@dataclass(frozen=True)
class Setting:
    """Where the selection is to run.

    Raises:
        ValueError: context_tokens or batch below 1, an unknown budget.
    """

    device: Device
    context_tokens: int
    batch: int = 1
    budget: Literal["scaled", "fixed"] = "scaled"

    def __post_init__(self) -> None:
        for name in ("context_tokens", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.removesuffix('_tokens')}={getattr(self, name)}: must be at least 1")
        if self.budget not in BUDGETS:
            raise ValueError(f"budget={self.budget!r}: must be one of {', '.join(BUDGETS)}")

    def at_context(self, selection: Selection, length: int) -> Selection:
        """The selection, measured on documents of `length` tokens, as it would be at the context."""
        if self.budget == "fixed" or length == self.context_tokens:
            return selection
        topk = -(-selection.topk * self.context_tokens // length)
        pool = selection.candidate
        if pool is not None:
            least = -(-(topk + pool.block_size - 1) // pool.block_size)  # see `topology.check_pool`
            blocks = max(least, -(-pool.topk_blocks * self.context_tokens // length))
            pool = dataclasses.replace(pool, topk_blocks=blocks)
        return dataclasses.replace(selection, topk=topk, candidate=pool)


def cell_of(about: Mapping[str, Any] | pd.Series) -> Cell:
    """The cell that a manifest or a row of `Results.cell_frame` describes."""
    value: dict[str, Any] = {str(key): None if _missing(item) else item for key, item in about.items()}
    pool = None
    if value["candidate_source_layer"] is not None:
        names = ("candidate_source_layer", "candidate_topk_blocks", "candidate_block_size")
        pool = Candidate(*(int(value[name]) for name in names))
    sources = value.get("index_source_layers")
    selection = Selection(
        int(value["compress_ratio"]), int(value["topk"]), int(value["window"]), value["share"],
        bool(value.get("exclude_window", False)), int(value.get("sinks") or 0), pool,
        None if sources is None else tuple(int(layer) for layer in sources.split(",")),
    )  # fmt: skip
    return Cell(value["scorer"], selection)


def _missing(item: Any) -> bool:
    return item is None or item is pd.NA or (isinstance(item, float) and math.isnan(item))


def architecture(about: Mapping[str, Any], manifest: Mapping[str, Any], selection: Selection) -> Architecture:
    """The model of a measured cell with indexers attached to its layers of full causal attention.

    Args:
        about: the cell's description; manifest: of its results, which has the model's and the indexers' shapes;
        selection: what to price, the cell's own or that of `Setting.at_context`.
    Raises:
        UnpricedError: a bound, a model with sparse attention of its own, or results that do not tell the shapes.
    """
    scorer = (about.get("scorer_options") or {}).get("name", about["scorer"])
    if scorer in ENVELOPE:
        raise UnpricedError(f"{scorer} is a bound, not an indexer to ship")
    fields = (manifest.get("model") or {}).get("shape")
    if fields is None:
        raise UnpricedError("these results do not tell the model's shape; run the same command again to add it")
    shape = ModelShape.from_dict(fields)
    if shape.native:
        raise UnpricedError("the model has sparse attention of its own; sparsity_lab.cost has presets for those")
    pool = selection.candidate
    model = cost.attached(
        about["model"], _topology(selection, shape), _indexer(about, manifest, scorer), hidden_size=shape.hidden_size,
        heads=shape.num_heads, kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, topk=selection.topk,
        window=selection.window, topk_blocks=None if pool is None else pool.topk_blocks,
        block_size=None if pool is None else pool.block_size,
    )  # fmt: skip
    return model if scorer == "lightning" else _scored_by_keys(model, shape, scorer, selection.compress_ratio)


def _topology(selection: Selection, shape: ModelShape) -> Topology:
    """Roles of the layers with full causal attention, numbered among themselves."""
    place = {layer: i for i, layer in enumerate(shape.attention_layers)}
    sources, pool = selection.index_source_layers, selection.candidate
    try:
        return Topology.attached(
            len(place), selection.compress_ratio, None if sources is None else [place[layer] for layer in sources],
            None if pool is None else place[pool.source_layer],
        )  # fmt: skip
    except KeyError as error:
        raise UnpricedError(f"layer {error} has a window shorter than the context") from error


def _indexer(about: Mapping[str, Any], manifest: Mapping[str, Any], scorer: str) -> IndexerConfig:
    """The shape of the cell's indexers; the default stands in where keys are scored and it is not used."""
    if scorer != "lightning":
        return IndexerConfig()
    known = (manifest.get("scorers") or {}).get(about["scorer"], {}).get("indexers", {})
    fields = known.get(str(about["compress_ratio"]), known.get("any"))
    if fields is None:
        raise UnpricedError("these results do not tell the indexers' shape; run the same command again to add it")
    return IndexerConfig(**fields)


def _scored_by_keys(model: Architecture, shape: ModelShape, scorer: str, ratio: int) -> Architecture:
    """Scores from the model's own queries against a summary of each group's keys: the mean (mean_key), or minimum and
    maximum (quest). At ratio 1 the keys themselves are scored and nothing is stored beside them."""
    summaries = {"mean_key": 1, "quest": 2}.get(scorer)
    if summaries is None:
        raise UnpricedError(f"the cost of scorer {scorer} is not known")
    summaries = 1 if ratio == 1 else summaries
    size = cost.entry_bytes(("bf16", summaries * shape.num_kv_heads * shape.head_dim))
    index = IndexShape(shape.num_heads, summaries * shape.head_dim, size, query_parameters=0)
    layers = tuple(dataclasses.replace(layer, stores_index=layer.stores_index and ratio > 1) for layer in model.layers)
    return dataclasses.replace(model, index=index, layers=layers)


def prices(results: Results | EvaluationResults, setting: Setting) -> pd.DataFrame:
    """What each cell costs a decoded token at the setting, and dense attention beside it; a row a cell.

    `seconds`, `read_bytes`, `flops`, `kv_bytes` and `index_bytes` (of cache a token of context), the same with
    `dense_` in front, `relative_cost` (of seconds), `topk_at_context`; or `unpriced`, the reason why there is none.
    """
    rows = []
    for key, about in results.cells.items():
        selection = setting.at_context(cell_of(about).selection, int(about["length"]))
        row: dict[str, Any] = {"cell_id": key, "unpriced": None}
        try:
            row |= _price(architecture(about, results.manifest, selection), setting)
            row["topk_at_context"] = selection.topk
        except ValueError as error:
            row["unpriced"] = str(error)
        rows.append(row)
    counted = [f"{prefix}{name}" for prefix in ("", "dense_") for name in COUNTED]
    return pd.DataFrame(rows, columns=["cell_id", "unpriced", "topk_at_context", *counted, "relative_cost"])


def _price(model: Architecture, setting: Setting) -> dict[str, float]:
    out: dict[str, float] = {}
    for prefix, each in (("", model), ("dense_", cost.dense_alternative(model))):
        parts = cost.decode_costs(each, setting.context_tokens, batch=setting.batch)
        cache = cost.cache_bytes_per_token(each)
        out |= {
            f"{prefix}seconds": cost.total_seconds(parts, setting.device),
            f"{prefix}read_bytes": sum(part.bytes for part in parts),
            f"{prefix}flops": sum(part.flops for part in parts),
            f"{prefix}kv_bytes": cache.kv_bytes,
            f"{prefix}index_bytes": cache.index_bytes,
        }
    return out | {"relative_cost": out["seconds"] / out["dense_seconds"]}
