"""FLOPs and bytes of a decode step and of a prefill, part by part and kind of layer by kind of layer.

A row with n visible tokens (its own included) sees v = n // r compressed positions. Reading is counted by tiles of rows
that share what they read: a tile reads what its rows read one by one, or all that its last row sees, whichever is
less. So scans and dense attention read a cache once a tile, while selected entries are gathered for each row as long
as that is less. A decode step is a tile of one row.

Where selected tokens and the window's may overlap, they are counted as if they did not, up to all visible tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sparsity_lab.cost.architecture import INDEXED, SELECTIVE, Architecture, IndexShape, Layer, LayerKind

Part = Literal["index_projection", "index_scan", "block_level", "attention"]
ID_BYTES = 4  # of a block number in a candidate pool
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class PartCost:
    """Cost of one part, summed over the `layers` layers of one kind and ratio.

    Parts: "index_projection" makes index queries, head weights and keys; "index_scan" scores every visible position;
    "block_level" is, at the source, one comparison a score for the block maxima and writing the pool, and at a
    consumer, reading the pool and scoring it (it has no index_scan); "attention" is over window and selection.
    """

    part: Part
    layer_kind: LayerKind
    compress_ratio: int
    layers: int
    flops: float
    bytes: float


def decode_costs(model: Architecture, context_tokens: int, *, batch: int = 1) -> list[PartCost]:
    """Of one token that sees `context_tokens` tokens, its own included.

    Making index keys is averaged: a compressed position is completed by every r-th token only.

    Args:
        batch: sequences decoded together; they share one read of the indexer's weights, costs stay those of a token.
    Raises:
        ValueError: context_tokens or batch below 1.
    """
    _require_at_least_one("context_tokens", context_tokens)
    _require_at_least_one("batch", batch)
    return _costs(model, _Rows(context_tokens, context_tokens, 1), batch)


def prefill_costs(model: Architecture, tokens: int, *, query_tile: int = 128) -> list[PartCost]:
    """Of a whole prefill: its FLOPs are those of decoding token by token, its bytes are shared in tiles of rows.

    Args:
        query_tile: rows that share one read; kernels have 64 to 128.
    Raises:
        ValueError: tokens or query_tile below 1.
    """
    _require_at_least_one("tokens", tokens)
    _require_at_least_one("query_tile", query_tile)
    return _costs(model, _Rows(1, tokens, query_tile), 1)


class _Rows:
    """Rows with `first` to `last` visible tokens, cut into tiles."""

    def __init__(self, first: int, last: int, tile: int) -> None:
        self.visible: Counts = np.arange(first, last + 1, dtype=np.int64)
        self.starts: Counts = np.arange(0, len(self.visible), tile, dtype=np.int64)
        self.sizes: Counts = np.diff(np.append(self.starts, len(self.visible)))
        self.last_visible: Counts = self.visible[self.starts] + self.sizes - 1

    def per_tile(self, counts: Counts) -> Counts:
        """Sums over the rows of each tile."""
        return np.add.reduceat(counts, self.starts)

    def span(self, local: Counts) -> Counts:
        """Tokens that a tile reads, when each row looks at its latest `local` ones."""
        joint = np.minimum(local[self.starts] + self.sizes - 1, self.last_visible)
        return np.minimum(joint, self.per_tile(local))

    def read(self, counts: Counts, ratio: int) -> int:
        """Positions read, when each row looks at `counts` of them."""
        return int(np.minimum(self.per_tile(counts), self.last_visible // ratio).sum())


def _costs(model: Architecture, rows: _Rows, batch: int) -> list[PartCost]:
    sums: dict[tuple[Part, LayerKind, int], tuple[int, float, float]] = {}
    for layer, number in Counter(model.layers).items():
        for part, flops, size in _layer_parts(model, layer, rows, batch):
            key = (part, layer.kind, layer.compress_ratio)
            layers, flops_before, size_before = sums.get(key, (0, 0.0, 0.0))
            sums[key] = (layers + number, flops_before + number * flops, size_before + number * size)
    return [PartCost(*key, *values) for key, values in sums.items()]


def _layer_parts(model: Architecture, layer: Layer, rows: _Rows, batch: int) -> Iterator[tuple[Part, float, float]]:
    """(part, flops, bytes) of one layer."""
    if layer.kind in INDEXED:
        assert model.index is not None, "checked by Architecture"
        flops, size = _projection(model.index, layer, len(rows.visible))
        yield "index_projection", flops, size / batch
        yield from _index_parts(model, model.index, layer, rows)
    yield ("attention", *(_compressed_attention if model.compressed else _token_attention)(model, layer, rows))


def _index_parts(
    model: Architecture, index: IndexShape, layer: Layer, rows: _Rows
) -> Iterator[tuple[Part, float, float]]:
    """The same for scoring positions and for the block level."""
    ratio = layer.compress_ratio
    positions = rows.visible // ratio
    scored = positions if layer.kind != "consumer" else np.minimum(positions, _pool_size(model)[0])
    flops, size = index.flops_per_key * int(scored.sum()), index.entry_bytes * rows.read(scored, ratio)
    if layer.kind != "consumer":
        yield "index_scan", flops, size
    if layer.kind != "scan":
        block_size, blocks = _pool_size(model)[1:]
        ids = ID_BYTES * int(np.minimum(-(-positions // block_size), blocks).sum())
        yield ("block_level", int(scored.sum()), ids) if layer.kind == "source" else ("block_level", flops, size + ids)


def _projection(index: IndexShape, layer: Layer, rows: int) -> tuple[float, float]:
    """(flops, bytes) of making index queries and head weights and, at a key owner, keys; weights are read once."""
    ratio, owns = layer.compress_ratio, int(layer.stores_index)
    each_row = index.query_parameters + owns * (index.key_token_parameters + index.key_position_parameters / ratio)
    positions_share = min(1.0, rows / ratio)  # a step completes a position, and reads these weights, every r-th time
    read = index.query_parameters + owns * (
        index.key_token_parameters + index.key_position_parameters * positions_share
    )
    return 2 * rows * each_row, index.weight_bytes * read


def _pool_size(model: Architecture) -> tuple[int, int, int]:
    """Positions a pool holds, its block size, its number of blocks."""
    assert model.topk_blocks is not None, "checked by Architecture"
    assert model.block_size is not None, "checked by Architecture"
    return model.topk_blocks * model.block_size, model.block_size, model.topk_blocks


def _compressed_attention(model: Architecture, layer: Layer, rows: _Rows) -> tuple[int, int]:
    """(flops, bytes) of attention to the raw window and to compressed entries."""
    raw = np.minimum(rows.visible, model.window)
    size = model.window_entry_bytes * int(rows.span(raw).sum())
    attended = int(raw.sum())
    if layer.kind != "window":
        entries = rows.visible // layer.compress_ratio
        if layer.kind in SELECTIVE:
            entries = np.minimum(entries, model.topk)
        attended += int(entries.sum())
        size += model.entry_bytes * rows.read(entries, layer.compress_ratio)
    return model.flops_per_entry * attended, size


def _token_attention(model: Architecture, layer: Layer, rows: _Rows) -> tuple[int, int]:
    """(flops, bytes) of attention to tokens: window, incomplete tail group, and those of the selected positions."""
    local, chosen = rows.visible, np.zeros_like(rows.visible)
    if layer.kind == "window":
        local = np.minimum(rows.visible, model.window)
    if layer.kind in SELECTIVE:
        ratio = layer.compress_ratio
        local = np.maximum(np.minimum(rows.visible, model.window), rows.visible % ratio)
        chosen = np.minimum(rows.visible - local, np.minimum(rows.visible // ratio, model.topk) * ratio)
    read = np.minimum(rows.span(local) + rows.per_tile(chosen), rows.last_visible)
    return model.flops_per_entry * int((local + chosen).sum()), model.entry_bytes * int(read.sum())


def _require_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}={value}: must be at least 1")
