"""One text being read by a sparse model: what its layers keep from call to call, and what they choose in each call.

From call to call: the group keys of layers that score, and what their scorer needs of the group still filling. Within a
call, for its s rows: the block ranks of the candidate source, int32 [g, s, nb], and the latest choice, int32 [g, s, k].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparsity_lab.activations import LayerActivations
from sparsity_lab.cells import Cell
from sparsity_lab.dense import RowTile, default_tile
from sparsity_lab.index_state import KeyCache
from sparsity_lab.models.sparse_attention import attend, attended_tokens
from sparsity_lab.scorers import GroupKeys, Scorer, keys_name
from sparsity_lab.selecting import Selector

# (layer, rows int64 [R], picks int64 [g, R, k], pool bool [g, R, n] or None): see `SparseModel.watch`
Watcher = Callable[[int, Tensor, Tensor, "Tensor | None"], None]
DOCUMENT = "0"  # of scorer=random: a text has the same scores whatever comes after it


class Memory:
    """A layer's group keys, growing call by call, and the inputs of the group that is still filling."""

    def __init__(self, scorer: GroupKeys, ratio: int) -> None:
        self.scorer, self.ratio = scorer, ratio
        self.caches: list[KeyCache] = []
        self.pending: Tensor | None = None  # [1, < ratio, dim]

    def extend(self, acts: LayerActivations) -> tuple[Tensor, ...]:
        """Read the tokens of a call; the keys of all groups so far, each [.., n, d]."""
        x = acts.x if self.pending is None else torch.cat([self.pending, acts.x], dim=1)
        done, complete = (self.caches[0].length if self.caches else 0), acts.k.shape[2] // self.ratio
        fresh = (complete - done) * self.ratio
        if fresh or not self.caches:
            k = acts.k[:, :, done * self.ratio : complete * self.ratio]
            keys = self.scorer.group_keys(acts.layer, x[:, :fresh], k, self.ratio, done)
            self.caches = self.caches or [KeyCache() for _ in keys]
            for cache, more in zip(self.caches, keys, strict=True):
                cache.append(more)
        self.pending = x[:, fresh:].clone()
        return tuple(view for cache in self.caches if (view := cache.view()) is not None)


class Text:
    """Stands around the attention of the layers it needs, during the calls of a model that read one text.

    Args:
        layers: in which the selection is applied; selecting: that score, for themselves or for others; both ascending.
    """

    def __init__(
        self,
        cell: Cell,
        scorer: Scorer,
        layers: Sequence[int],
        selecting: Sequence[int],
        num_layers: int,
        watcher: Watcher | None = None,
    ) -> None:
        self.cell, self.scorer, self.layers, self.selecting = cell, scorer, layers, selecting
        self.needed = sorted({*layers, *selecting})
        self.num_layers, self.watcher = num_layers, watcher
        self.length = 0  # tokens of the text, those of the present call included
        self.start = 0  # of the present call
        self.seen: list[int] = []
        self.memories: dict[int, Memory] = {}
        self.selector = self._selector()
        self._last: tuple[int, Tensor] | None = None  # layer and what it chose in this call, int32 [g, s, k]

    def _selector(self) -> Selector:
        return Selector([self.cell], self.scorer, self.needed, self.num_layers)

    def around(self, acts: LayerActivations, own: Callable[[], tuple]) -> tuple:
        """A layer's output over what it attends to, [1, s, h, dv]; the model's own where it only selects for others."""
        layer = acts.layer
        if layer == self.needed[0]:
            self._begin(acts)
        self._check(acts)
        rows = torch.arange(self.start, self.length, device=acts.q.device)
        acts = dataclasses.replace(acts, rows=rows).contiguous()
        layer_cache = self._layer_cache(acts)
        outputs, orders = [], []
        size = default_tile(acts.q.shape[1], self.length)
        for number, part in enumerate(rows.split(size)):
            tile = RowTile(acts, part, DOCUMENT, 0, layer_cache=layer_cache, number=number)
            order = self._choose(tile)
            if layer in self.layers:
                selection = self.cell.selection
                outputs.append(attend(acts, part, order, selection.compress_ratio, selection.window))
                orders.append(order.int())
        if layer not in self.layers:
            return own()
        self._last = layer, torch.cat(orders, dim=1)
        return torch.cat(outputs).unsqueeze(0).to(acts.q.dtype), None

    def _begin(self, acts: LayerActivations) -> None:
        length, rows = acts.k.shape[2], acts.q.shape[2]
        start = length - rows
        if start == 0:
            self.memories.clear()
        elif start != self.length:
            raise ValueError(
                f"a call with {rows} tokens and a cache of {start}: the text has {self.length} tokens so far; calls "
                "must follow each other without a gap, with one growing cache"
            )
        self.start, self.length, self.seen, self.selector = start, length, [], self._selector()

    def _check(self, acts: LayerActivations) -> None:
        if acts.q.shape[0] != 1:
            raise ValueError(f"a batch of {acts.q.shape[0]}: sparse attention takes one text at a time")
        if (acts.k.shape[2], acts.q.shape[2]) != (self.length, self.length - self.start):
            raise ValueError(
                f"layer {acts.layer}: has {acts.q.shape[2]} rows over {acts.k.shape[2]} keys, the layers before it "
                f"{self.length - self.start} over {self.length}"
            )
        self.seen.append(acts.layer)

    def _layer_cache(self, acts: LayerActivations) -> dict:
        """What the tiles of a layer find ready: the keys of all groups, earlier calls' among them."""
        if acts.layer not in self.selecting or not isinstance(self.scorer, GroupKeys):
            return {}
        ratio = self.cell.selection.compress_ratio
        memory = self.memories.setdefault(acts.layer, Memory(self.scorer, ratio))
        return {keys_name(self.scorer, ratio): memory.extend(acts)}

    def _choose(self, tile: RowTile) -> Tensor:
        """int64 [g, R, ≤ k]."""
        layer = tile.acts.layer
        pool = self.selector.pool(layer, self.cell.selection.candidate)
        order = self.selector.select(tile)[pool].long()
        if self.watcher is not None and layer in self.layers:
            inside = None
            if pool is not None:
                kept = self.selector.ranks(tile, pool) < pool.topk_blocks
                inside = kept.repeat_interleave(pool.block_size, dim=-1)[
                    ..., : tile.length // self.selector.variant.ratio
                ]
            self.watcher(layer, tile.rows, order, inside)
        return order

    def attended(self, layer: int) -> Callable[[Tensor], Tensor]:
        """What a layer attended to in this call, as `LayerActivations.attended` has it; for the layer that has just
        been, to be used before the next one."""
        if self._last is None or self._last[0] != layer:
            raise ValueError(f"layer {layer}: is not the one whose attention was last computed")
        order, start, selection, length = self._last[1], self.start, self.cell.selection, self.length

        def tokens(rows: Tensor) -> Tensor:
            chosen = order[:, rows - start].long()
            return attended_tokens(chosen, rows, selection.compress_ratio, selection.window, length)

        return tokens

    def check_complete(self, name: str) -> None:
        """Raise ValueError unless every layer came by in the last call."""
        if self.seen != self.needed:
            raise ValueError(
                f"model={name}: attention of layers {self.needed} was to be sparse, but {self.seen} came by; this "
                "family does not run them through transformers' attention interface"
            )
