"""A dense Hugging Face model run sparse: in chosen layers each query attends to window ∪ tail ∪ selected tokens only.

Positions are chosen by the same `selecting.Selector` that measures them. Prefill and decoding go through the model's
own forward and KV cache; what selections need of earlier calls (index keys, key summaries) is kept here, layer by
layer, so a text may be read at once, in chunks, or token by token.

Shapes: g groups, R rows of a tile, n compressed positions, t tokens so far.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sparsity_lab.activations import LayerActivations, ObservableModel, Observer
from sparsity_lab.cells import Cell, Selection, cell_topology, check_cell, index_sources
from sparsity_lab.lightning import Lightning
from sparsity_lab.models.hf import HFModel
from sparsity_lab.models.hf_attention import intercepted
from sparsity_lab.models.sparse_text import Text, Watcher
from sparsity_lab.scorers import Scorer
from sparsity_lab.topology import NativeSelection

NUMBERS_VERSION = 1  # part of `attention`: raise it when the same selection would give other outputs


class SparseModel:
    """Applies one selection to a dense model. Implements `ObservableModel`: what later layers show is then made of the
    sparse outputs of earlier ones.

    Sliding-window layers and those before the first index source stay dense.

    Args:
        scorer: made for `model`; a selection whose `index_source_layers` are None takes those of the scorer, if any.
        layers: in which the selection is applied; None = all that have one. The others stay dense, but select where
            applied layers follow them.
    Raises:
        ValueError: a model with sparse attention of its own, layers that cannot select, or a selection that does not
            fit the model.
    """

    name: str
    native: NativeSelection | None = None

    def __init__(
        self, model: ObservableModel, selection: Selection, scorer: Scorer, layers: Collection[int] | None = None
    ) -> None:
        if isinstance(model, SparseModel):
            raise ValueError(f"model.attention=sparse: {model.name} has a selection applied already")
        if model.native is not None:
            raise ValueError(
                f"model.attention=sparse: {model.name} has sparse attention of its own; take model.attention=native"
            )
        if not isinstance(model, HFModel):
            raise ValueError(f"model.attention=sparse: {model.name} is no Hugging Face model that can be run")
        self.model, self.selection, self.scorer = model, selection, scorer
        self.cell = Cell(scorer.name, selection)
        full = [layer for layer, window in model.windows().items() if window is None]
        if not full:
            raise ValueError(f"model.attention=sparse: all layers of {model.name} have a sliding window")
        sources = index_sources(selection.index_source_layers, scorer)
        length = model.max_length or selection.compress_ratio
        check_cell(self.cell, length=length, num_layers=model.num_layers, layers=full, sources=sources)
        topology = cell_topology(selection.compress_ratio, sources, model.num_layers)
        if unable := sorted(set(layers or ()) - set(full)):
            raise ValueError(f"layers={unable}: no full attention there; layers of {model.name} with it are {full}")
        wanted = full if layers is None else sorted(set(layers))
        self.layers = [layer for layer in wanted if topology.index_source(layer) is not None]
        if not self.layers:
            raise ValueError(f"layers={wanted}: none of them selects; sources are {list(sources or full)}")
        self.selecting = self._selecting(topology.index_source)
        if isinstance(scorer, Lightning):
            scorer.check(self.selecting, selection.compress_ratio)
        self.name, self.fingerprint, self.tokenizer = model.name, model.fingerprint, model.tokenizer
        self.num_layers, self.num_heads, self.num_kv_heads = model.num_layers, model.num_heads, model.num_kv_heads
        self.hidden_size, self.head_dim, self.max_length = model.hidden_size, model.head_dim, model.max_length
        self.attention: str = f"{model.attention}, sparse {json.dumps(self.describe(), sort_keys=True)}"
        self._watcher: Watcher | None = None

    def _selecting(self, source_of: Callable[[int], int | None]) -> list[int]:
        """The layers that score positions, for themselves, for a layer that reuses them, or for their pool."""
        found = {source for layer in self.layers if (source := source_of(layer)) is not None}
        pool = self.selection.candidate
        if pool is not None and any(source > pool.source_layer for source in found):
            found.add(pool.source_layer)
        return sorted(found)

    def describe(self) -> dict[str, Any]:
        """Everything that changes what later layers see."""
        return {
            "version": NUMBERS_VERSION,
            "selection": dataclasses.asdict(self.selection),
            "scorer": self.scorer.describe(),
            "layers": self.layers,
        }

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def windows(self) -> dict[int, int | None]:
        """Layer -> sliding window (None = full causal), as of the dense model."""
        return self.model.windows()

    @contextmanager
    def applied(self) -> Iterator[Text]:
        """While open, forwards of the underlying model are sparse. Those that start at position 0 begin a new text;
        others must go on where the last one ended, with its KV cache.

        Raises:
            ValueError: when a forward has more than one text, padding, or a gap before it.
        """
        text = Text(self.cell, self.scorer, self.layers, self.selecting, self.num_layers, self._watcher)
        modules = {layer: self.model.attention_module(layer) for layer in text.needed}
        with torch.inference_mode(), intercepted(modules, text.around, unpadded=True):
            yield text
        text.check_complete(self.name)

    def logits(self, tokens: Tensor) -> Tensor:
        """Next-token logits of one document: int64 [1, t] -> float32 [t, vocabulary]."""
        with self.applied():
            return self.model.logits(tokens)

    def generate(self, tokens: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        """Continue one document with the selection applied in prefill and in decoding: see `HFModel.generate`."""
        with self.applied():
            return self.model.generate(tokens, max_new_tokens, **options)

    def observe(self, tokens: Tensor, observer: Observer, layers: Collection[int]) -> None:
        """See `HFModel.observe`; `output` of an applied layer is that over what it attended to (`attended`)."""
        with self.applied() as text:

            def seen(acts: LayerActivations) -> None:
                if acts.layer in self.layers:
                    acts = dataclasses.replace(acts, attended=text.attended(acts.layer))
                observer(acts)

            self.model.observe(tokens, seen, layers)

    @contextmanager
    def watch(self, callback: Watcher) -> Iterator[None]:
        """While open, every call of the model tells what its applied layers choose, row tile by row tile.

        callback(layer, rows, picks, pool): rows int64 [R], positions; picks int64 [g, R, k], -1 = nothing; pool bool
        [g, R, n], the candidate pool its choice was restricted to, or None.
        """
        before, self._watcher = self._watcher, callback
        try:
            yield
        finally:
            self._watcher = before
