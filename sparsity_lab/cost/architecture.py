"""What is stored and who computes what: storage formats, the layers' kinds, sizes; cache bytes a token of context."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from sparsity_lab.topology import Topology, check_pool

LayerKind = Literal["window", "dense", "scan", "source", "consumer", "reuse"]
INDEXED: tuple[LayerKind, ...] = ("scan", "source", "consumer")  # run an indexer
SELECTIVE: tuple[LayerKind, ...] = (*INDEXED, "reuse")  # attend to a selection


@dataclass(frozen=True)
class _Storage:
    bits: int  # of a value
    scale_bits: int = 0
    block: int = 1  # values that share a scale


# names as in `quant.QuantFormat` where that has them
_STORAGE = {
    "fp32": _Storage(32),
    "bf16": _Storage(16),
    "fp8_e4m3_128": _Storage(8, 32, 128),  # float32 scales
    "fp8_ue8m0": _Storage(8, 8, 32),
    "fp8_ue8m0_64": _Storage(8, 8, 64),
    "fp4_e4m3": _Storage(4, 8, 16),
    "fp4_ue8m0": _Storage(4, 8, 32),
}


def entry_bytes(*fields: tuple[str, int], padding_bytes: int = 0) -> int:
    """Stored size of one cache entry with its scales: fields are (format, channels).

    Raises:
        ValueError: an unknown format, channels its blocks do not divide, or an entry that does not fill whole bytes.
    """
    bits = 8 * padding_bytes
    for name, channels in fields:
        if name not in _STORAGE:
            raise ValueError(f"storage format {name!r}: must be one of {', '.join(_STORAGE)}")
        storage = _STORAGE[name]
        if channels < 1 or channels % storage.block:
            raise ValueError(f"storage format {name!r}: channels={channels} must be a multiple of {storage.block}")
        bits += channels * storage.bits + channels // storage.block * storage.scale_bits
    if bits % 8:
        raise ValueError(f"cache entry of {list(fields)}: {bits} bits do not fill whole bytes")
    return bits // 8


@dataclass(frozen=True)
class Layer:
    """A layer, as far as cost depends on it.

    Args:
        kind: "window" attends to its window only; "dense" to everything visible; the others to a selection: "scan"
            scores every visible position, "source" does and publishes the candidate pool, "consumer" scores the pool
            only, "reuse" takes an earlier layer's selection.
        compress_ratio: tokens a compressed position; 0 in a window layer.
        stores_kv: it has main entries of its own (else it reads its KV source's).
        stores_index: it has index keys of its own.
    """

    kind: LayerKind
    compress_ratio: int
    stores_kv: bool
    stores_index: bool

    def __post_init__(self) -> None:
        if self.kind not in get_args(LayerKind):
            raise ValueError(f"layer kind {self.kind!r}: must be one of {get_args(LayerKind)}")
        if self.compress_ratio < (self.kind != "window"):
            raise ValueError(f"compress_ratio={self.compress_ratio}: a {self.kind} layer needs at least 1")


@dataclass(frozen=True)
class IndexShape:
    """An indexer's size.

    Args:
        heads, head_dim: of the index queries.
        entry_bytes: stored size of one index key.
        query_parameters: weights that make a token's index queries and head weights.
        key_token_parameters: weights that every token goes through on the way to an index key, for this purpose alone.
        key_position_parameters: weights that every compressed position goes through.
        weight_bytes: stored size of one of those weights.
    """

    heads: int
    head_dim: int
    entry_bytes: int
    query_parameters: int
    key_token_parameters: int = 0
    key_position_parameters: int = 0
    weight_bytes: float = 2

    def __post_init__(self) -> None:
        _require_positive(self, "heads", "head_dim", "entry_bytes", "weight_bytes")
        _require_not_negative(self, "query_parameters", "key_token_parameters", "key_position_parameters")

    @property
    def flops_per_key(self) -> int:
        """Of one query scoring one visible key: the products q·k of all heads."""
        return 2 * self.heads * self.head_dim


@dataclass(frozen=True)
class Architecture:
    """A model's attention, as far as cost depends on it.

    Args:
        name: for messages.
        layers: first to last.
        heads, head_dim, value_dim: query heads, and the channels of one query-key product and of one value (those of
            the latent, where heads share one latent entry).
        entry_bytes: stored size of one main entry, all key heads, keys and values; of a token where not `compressed`.
        window_entry_bytes: stored size of one token in the window's own cache, where `compressed`.
        window: last tokens always attended raw.
        topk: positions selected.
        index: None where no layer selects.
        compressed: attends to one entry a compressed position, beside the raw window (else to the tokens themselves).
        topk_blocks, block_size: the candidate pool, where a layer is a source.
    Raises:
        ValueError: naming the field that breaks a rule.
    """

    name: str
    layers: tuple[Layer, ...]
    heads: int
    head_dim: int
    value_dim: int
    entry_bytes: int
    window_entry_bytes: int
    window: int
    topk: int
    index: IndexShape | None
    compressed: bool
    topk_blocks: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "heads", "head_dim", "value_dim", "entry_bytes", "window_entry_bytes", "topk")
        _require_not_negative(self, "window")
        if not self.layers:
            raise ValueError(f"{self.name}: layers=(): needs at least one")
        kinds = {layer.kind for layer in self.layers}
        if self.index is None and kinds & set(INDEXED):
            raise ValueError(f"{self.name}: index=None: its layers run an indexer")
        if kinds & {"source", "consumer"}:
            if self.topk_blocks is None or self.block_size is None:
                raise ValueError(
                    f"{self.name}: topk_blocks={self.topk_blocks}, block_size={self.block_size}: a topology with a "
                    "candidate source needs both"
                )
            check_pool(self.topk, self.topk_blocks, self.block_size)

    @property
    def flops_per_entry(self) -> int:
        """Of one query attending to one entry: scores and weighted values of all heads."""
        return 2 * self.heads * (self.head_dim + self.value_dim)


def layers_of(topology: Topology, *, compressed: bool) -> tuple[Layer, ...]:
    """The layers of a topology.

    With `compressed`, KV sources alone store entries and ratio 0 means window only, as in V4.1; without, every layer
    stores its tokens and ratio 0 means dense, as with attached indexers.
    """
    names: dict[str, LayerKind] = {"none": "scan", "source": "source", "consumer": "consumer"}
    layers = []
    for number, ratio in enumerate(topology.compress_ratios):
        owns = number in topology.kv_source_layers
        if not ratio:
            layers.append(Layer("window", 0, False, False) if compressed else Layer("dense", 1, True, False))
            continue
        runs = number in topology.index_source_layers
        kind = names[topology.candidate_role(number)] if runs else "reuse"
        layers.append(Layer(kind, ratio, owns or not compressed, owns))
    return tuple(layers)


def dense_alternative(model: Architecture) -> Architecture:
    """The same model with the same main entries, every visible one attended and no indexer anywhere."""
    layers = tuple(
        dataclasses.replace(layer, kind="dense", stores_index=False) if layer.kind in SELECTIVE else layer
        for layer in model.layers
    )
    return dataclasses.replace(model, name=f"{model.name}, dense", layers=layers, index=None)


@dataclass(frozen=True)
class CacheBytes:
    """What the caches of one sequence grow by with a token of context."""

    kv_bytes: float
    index_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.kv_bytes + self.index_bytes


def cache_bytes_per_token(model: Architecture) -> CacheBytes:
    """Bytes of main entries and of index keys a token of context.

    Windows are left out: they stop growing after `window` tokens.
    """
    kv = sum(
        model.entry_bytes / (layer.compress_ratio if model.compressed else 1)
        for layer in model.layers
        if layer.stores_kv
    )
    each = 0 if model.index is None else model.index.entry_bytes
    index = sum(each / layer.compress_ratio for layer in model.layers if layer.stores_index)
    return CacheBytes(float(kv), float(index))


def _require_positive(thing: object, *names: str) -> None:
    for name in names:
        if not getattr(thing, name) > 0:
            raise ValueError(f"{name}={getattr(thing, name)}: must be positive")


def _require_not_negative(thing: object, *names: str) -> None:
    for name in names:
        if getattr(thing, name) < 0:
            raise ValueError(f"{name}={getattr(thing, name)}: must not be negative")
