"""What costs depend on, as manifests keep it: the model's sizes and the sizes of the indexers that were measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparsity_lab.activations import ObservableModel
from sparsity_lab.lightning import IndexerConfig, Lightning
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
    """What a manifest says of scorers: label -> `settings` (of its configuration, where it has one) and `indexers`,
    compress ratio -> `IndexerConfig`'s fields, "any" standing for every ratio."""
    return {
        label: {"settings": dict((settings or {}).get(label, {})) or None, "indexers": _indexers(scorer)}
        for label, scorer in scorers.items()
    }


def _indexers(scorer: Scorer) -> dict[str, Any]:
    if not isinstance(scorer, Lightning):
        return {}
    found: dict[str, IndexerConfig] = {str(ratio): file.config for ratio, file in scorer.files.items()}
    return {ratio: dataclasses.asdict(config) for ratio, config in (found or {"any": scorer.config}).items()}
