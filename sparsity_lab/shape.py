"""What costs depend on, as manifests keep it: the model's sizes and the sizes of the indexers that were measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sparsity_lab.activations import ObservableModel
from sparsity_lab.lightning import IndexerConfig, Lightning, beyond_distillation
from sparsity_lab.scorers import Scorer


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model's attention.

    Args:
        attention_layers: layers with full causal attention, ascending; those that a selection could serve.
        native: it has sparse attention of its own.
    """

    num_layers: int
    attention_layers: tuple[int, ...]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    native: bool = False

    @classmethod
    def of(cls, model: ObservableModel) -> ModelShape | None:
        """The shape of a model; None where it does not tell the width of its heads."""
        head_dim = getattr(model, "head_dim", None)
        if head_dim is None:
            return None
        layers = tuple(sorted(layer for layer, window in model.windows().items() if window is None))
        sizes = (model.hidden_size, model.num_heads, model.num_kv_heads, int(head_dim))
        return cls(model.num_layers, layers, *sizes, native=model.native is not None)

    def describe(self) -> dict[str, Any]:
        """As JSON has it; `from_dict` takes it back."""
        return {**dataclasses.asdict(self), "attention_layers": list(self.attention_layers)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ModelShape:
        """Raises ValueError for fields that do not exist or lack."""
        try:
            return cls(**{**fields, "attention_layers": tuple(fields["attention_layers"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"model shape {dict(fields)}: not one of this version ({error})") from error


def described_model(model: ObservableModel) -> dict[str, Any]:
    """What a manifest says of a model."""
    shape = ModelShape.of(model)
    told = {"name": model.name, "fingerprint": model.fingerprint, "dtype": str(model.dtype)}
    return told | {"shape": None if shape is None else shape.describe()}


def described_scorers(
    scorers: Mapping[str, Scorer], settings: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """What a manifest says of scorers: label -> `settings` (of its configuration, where it has one); `indexers`,
    compress ratio -> `IndexerConfig`'s fields, "any" standing for every ratio; and `distilled`, the name of its
    `weights` and, by ratio, the `lengths` of the documents they were distilled on."""
    return {
        label: {
            "settings": dict((settings or {}).get(label, {})) or None,
            "indexers": _indexers(scorer),
            "distilled": _distilled(scorer),
        }
        for label, scorer in scorers.items()
    }


def _distilled(scorer: Scorer) -> dict[str, Any]:
    if not isinstance(scorer, Lightning) or not scorer.distilled_lengths:
        return {}
    return {"weights": scorer.asked, "lengths": {str(ratio): n for ratio, n in scorer.distilled_lengths.items()}}


def caveats(manifest: Mapping[str, Any], cells: Iterable[Mapping[str, Any]], length: int = 0) -> list[str]:
    """What to know of the figures of cells, by what their manifest says of scorers: a sentence for weights that served
    longer documents than they were distilled on (`length`: or are to serve)."""
    scorers = manifest.get("scorers") or {}
    found: dict[tuple[str, int], int] = {}
    for cell in cells:
        distilled = (scorers.get(cell.get("scorer")) or {}).get("distilled") or {}
        used = max(length, int(cell.get("length") or 0))
        trained = distilled.get("lengths", {}).get(str(cell.get("compress_ratio")), used)
        if used > trained:
            which = distilled["weights"], trained
            found[which] = max(used, found.get(which, 0))
    return [beyond_distillation(*which, used) for which, used in found.items()]


def _indexers(scorer: Scorer) -> dict[str, Any]:
    if not isinstance(scorer, Lightning):
        return {}
    found: dict[str, IndexerConfig] = {str(ratio): file.config for ratio, file in scorer.files.items()}
    return {ratio: dataclasses.asdict(config) for ratio, config in (found or {"any": scorer.config}).items()}
