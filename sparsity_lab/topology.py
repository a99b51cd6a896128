"""Who plays which role among the layers: compress ratios, KV sources, index sources, the candidate source.

One object serves DeepSeek V4.1 models, whose layers share compressed KV, and indexers attached to a dense model, whose
layers share selections only.

Source: the configuration of DeepSeek V4.1 (field names are its own).
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsity_lab.index_state import CandidateRole, IndexRole


def check_pool(topk: int, topk_blocks: int, block_size: int) -> None:
    """Raise ValueError unless a pool of `topk_blocks` blocks always fills a selection of `topk`.

    The pinned newest block may hold a single visible position.
    """
    least = topk_blocks * block_size - (block_size - 1)
    if least < topk:
        raise ValueError(
            f"candidate_topk_blocks={topk_blocks} x candidate_block_size={block_size} may hold only {least} visible "
            f"positions, fewer than topk={topk}; topk_blocks * block_size - (block_size - 1) must be at least topk"
        )


@dataclass(frozen=True)
class Topology:
    """The layers' roles, checked as a whole.

    Args:
        compress_ratios: tokens a compressed position, one entry a layer; 0 = the layer attends to its window only.
        kv_source_layers: layers that compress KV and make index keys of the latent; later layers use the latest one's.
        index_source_layers: layers that run an indexer; later layers reuse the latest one's top-k. Every KV source is
            one, since its indexer holds the projection to index keys.
        candidate_source_layer: the index source whose best blocks later index sources search in; None = no pool.
    Raises:
        ValueError: with the field and layer that break a rule.
    """

    compress_ratios: tuple[int, ...]
    kv_source_layers: tuple[int, ...]
    index_source_layers: tuple[int, ...]
    candidate_source_layer: int | None = None

    def __post_init__(self) -> None:
        for name in ("compress_ratios", "kv_source_layers", "index_source_layers"):
            object.__setattr__(self, name, _whole_numbers(name, getattr(self, name)))
        if not self.compress_ratios:
            raise ValueError("compress_ratios=[]: needs one entry a layer")
        if any(ratio < 0 for ratio in self.compress_ratios):
            raise ValueError(f"compress_ratios={list(self.compress_ratios)}: must not be negative")
        # index sources first: attached indexers are given by them alone
        self._check_sources("index_source_layers", self.index_source_layers)
        self._check_sources("kv_source_layers", self.kv_source_layers)
        for layer in self.kv_source_layers:
            if layer not in self.index_source_layers:
                raise ValueError(
                    f"kv_source_layers: layer {layer} is not in index_source_layers={list(self.index_source_layers)}; "
                    "a KV source makes its index keys with an indexer of its own"
                )
        for layer, ratio in enumerate(self.compress_ratios):
            if ratio:
                self._check_consumer(layer, ratio, "kv_source_layers", self.kv_source_layers)
                self._check_consumer(layer, ratio, "index_source_layers", self.index_source_layers)
        self._check_candidate()

    @classmethod
    def attached(
        cls,
        num_layers: int,
        compress_ratio: int,
        index_source_layers: Sequence[int] | None = None,
        candidate_source_layer: int | None = None,
    ) -> Topology:
        """Indexers attached to a dense model: every index source makes its own keys, at one ratio.

        Layers before the first index source have none to follow and stay dense (ratio 0 here).

        Args:
            index_source_layers: None = every layer runs its own indexer.
        """
        sources = range(num_layers) if index_source_layers is None else index_source_layers
        sources = _whole_numbers("index_source_layers", sources)
        first = min(sources, default=0)
        ratios = tuple(0 if layer < first else compress_ratio for layer in range(num_layers))
        return cls(ratios, sources, sources, candidate_source_layer)

    @property
    def num_layers(self) -> int:
        return len(self.compress_ratios)

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed KV `layer` attends to; None for a window-only layer."""
        return self._latest(self.kv_source_layers, layer)

    def index_source(self, layer: int) -> int | None:
        """The layer whose top-k `layer` uses; None for a window-only layer."""
        return self._latest(self.index_source_layers, layer)

    def candidate_role(self, layer: int) -> CandidateRole:
        """Whether an index source publishes the pool, searches in it, or neither."""
        source = self.candidate_source_layer
        if source is None or layer < source or layer not in self.index_source_layers:
            return "none"
        return "source" if layer == source else "consumer"

    def index_role(self, layer: int, *, topk: int, topk_blocks: int, block_size: int) -> IndexRole:
        """The role of an index source in one call of its indexer.

        Raises:
            ValueError: `layer` is no index source.
        """
        owner = self.kv_source(layer)
        if layer not in self.index_source_layers or owner is None:
            raise ValueError(f"layer {layer} is not in index_source_layers={list(self.index_source_layers)}")
        role, ratio = self.candidate_role(layer), self.compress_ratios[layer]
        return IndexRole(layer, owner, ratio, topk, role, topk_blocks, block_size)

    def describe(self) -> dict[str, Any]:
        """The fields as plain lists, ready for JSON or YAML; `from_dict` takes them back."""
        fields = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Topology:
        """Raises ValueError for fields that do not exist or lack."""
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(fields) - set(names))
        lacking = sorted(set(names[:-1]) - set(fields))
        if unknown or lacking:
            raise ValueError(f"topology: unknown fields {unknown}, missing fields {lacking}; it has {', '.join(names)}")
        return cls(**fields)

    def _latest(self, sources: tuple[int, ...], layer: int) -> int | None:
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer}: the model has layers 0 to {self.num_layers - 1}")
        place = bisect_right(sources, layer)
        return sources[place - 1] if place and self.compress_ratios[layer] else None

    def _check_sources(self, name: str, sources: tuple[int, ...]) -> None:
        if list(sources) != sorted(set(sources)):
            raise ValueError(f"{name}={list(sources)}: must be ascending, each layer once")
        outside = [layer for layer in sources if not 0 <= layer < self.num_layers]
        if outside:
            raise ValueError(f"{name}: {outside} lie outside the model's layers 0 to {self.num_layers - 1}")
        idle = [layer for layer in sources if not self.compress_ratios[layer]]
        if idle:
            raise ValueError(f"{name}: layers {idle} have compress_ratio 0, they attend to their window only")

    def _check_consumer(self, layer: int, ratio: int, name: str, sources: tuple[int, ...]) -> None:
        source = self._latest(sources, layer)
        if source is None:
            raise ValueError(f"{name}={list(sources)}: layer {layer} (compress_ratio {ratio}) comes before any source")
        if self.compress_ratios[source] != ratio:
            raise ValueError(
                f"{name}: layer {layer} has compress_ratio {ratio}, its source layer {source} has "
                f"{self.compress_ratios[source]}; they must be equal"
            )

    def _check_candidate(self) -> None:
        source = self.candidate_source_layer
        if source is None:
            return
        (source,) = _whole_numbers("candidate_source_layer", [source])
        if source not in self.index_source_layers:
            raise ValueError(
                f"candidate_source_layer={source}: must be one of index_source_layers={list(self.index_source_layers)}"
            )
        consumers = [layer for layer in self.index_source_layers if layer > source]
        if not consumers:
            raise ValueError(f"candidate_source_layer={source}: no index source after it would use its pool")
        for layer in consumers:
            if self.compress_ratios[layer] != self.compress_ratios[source]:
                raise ValueError(
                    f"candidate_source_layer={source} has compress_ratio {self.compress_ratios[source]}, its consumer "
                    f"layer {layer} has {self.compress_ratios[layer]}; they must be equal"
                )


@dataclass(frozen=True)
class NativeSelection:
    """The selection a sparse model was made with.

    Args:
        topology: its layers' roles; ratio 0 for layers that have nothing to select.
        topk: positions an index source selects.
        window: last tokens always attended raw; 0 = none.
        compressed: whether it attends to compressed keys, one a position (else to the tokens of each position).
        topk_blocks, block_size: its candidate pool, where the topology has a candidate source.
    """

    topology: Topology
    topk: int
    window: int
    compressed: bool
    topk_blocks: int | None = None
    block_size: int | None = None


def _whole_numbers(name: str, values: Any) -> tuple[int, ...]:
    values = tuple(values)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name}={list(values)}: must be whole numbers")
    return values
