"""`FakeModel` with sparse attention of its own, by loops: an indexer, its selections, and outputs of those alone."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import naive
import numpy as np
import torch
from fake_model import FakeModel
from torch import Tensor

from sparsity_lab.activations import CompressedKeys, IndexActivations, LayerActivations
from sparsity_lab.topology import NativeSelection, Topology

MIXED = Topology((0, 2, 2, 1, 1, 1), (1, 3), (1, 3, 4), 3)  # layer 2 reuses 1; 4 searches in the pool of 3; 5 reuses 4
TOKENS = Topology((1, 1, 1), (0, 1, 2), (0, 1, 2))
INDEX_HEADS, INDEX_DIM = 3, 8


@dataclass
class SparseModel(FakeModel):
    """Compressed keys behind a raw window, as in V4.1; with `compressed=False` a selection of tokens, as in V3.2.

    `dense`: attends to all that is visible. `forget`: this many selected positions of each row are not attended to.
    """

    num_layers: int = 6
    num_kv_heads: int = 1
    sink: bool = True
    topology: Topology = MIXED
    topk: int = 4
    raw_window: int = 5
    topk_blocks: int = 3
    block_size: int = 2
    compressed: bool = True
    dense: bool = False
    forget: int = 0
    native: NativeSelection | None = field(init=False)

    def __post_init__(self) -> None:
        window = self.raw_window if self.compressed else 0
        pool = (self.topk_blocks, self.block_size) if self.topology.candidate_source_layer is not None else (None, None)
        self.native = NativeSelection(self.topology, self.topk, window, self.compressed, *pool)
        self.num_layers = self.topology.num_layers
        if self.compressed:
            self.sliding = dict.fromkeys(range(self.num_layers), self.raw_window)

    def windows(self) -> dict[int, int | None]:
        ratios = self.topology.compress_ratios
        return {i: self.raw_window if self.compressed and not ratio else None for i, ratio in enumerate(ratios)}

    def activations(self, tokens: Tensor, layer: int) -> LayerActivations:
        acts, ratio = super().activations(tokens, layer), self.topology.compress_ratios[layer]
        if not ratio:
            return acts
        keys = self.keys(tokens, layer) if self.compressed else None
        source = self.topology.index_source(layer)
        selected = None if self.dense else self.selected(tokens, source)
        output = self.output(acts, keys, selected, ratio)
        index = self.index(tokens, source)
        return dataclasses.replace(acts, output=output, compressed=keys, selected=selected, index=index)

    def keys(self, tokens: Tensor, layer: int) -> CompressedKeys:
        """Means of the KV source's keys and values over each group."""
        ratio = self.topology.compress_ratios[layer]
        source = super().activations(tokens, self.topology.kv_source(layer))
        k, v = (groups(x, ratio).mean(3) for x in (source.k, source.v))
        return CompressedKeys(k, v, ratio)

    def index(self, tokens: Tensor, source: int) -> IndexActivations:
        """Random projections of the index source's input."""
        ratio, x = self.topology.compress_ratios[source], super().activations(tokens, source).x
        generator = torch.Generator().manual_seed(77 + 1000 * self.seed + source)

        def project(y: Tensor, width: int) -> Tensor:
            return y @ torch.randn(self.hidden_size, width, generator=generator) * self.hidden_size**-0.5

        q, w = project(x, INDEX_HEADS * INDEX_DIM).unflatten(-1, (INDEX_HEADS, INDEX_DIM)), project(x, INDEX_HEADS)
        k = groups(project(x, INDEX_DIM).unsqueeze(1), ratio).mean(3)[:, 0]
        return IndexActivations(source, q, w, k, ratio)

    def index_scores(self, tokens: Tensor, source: int) -> np.ndarray:
        """float64 [s, n], a row and position at a time."""
        index = self.index(tokens, source)
        q, w, k = (x[0].double().numpy() for x in (index.q, index.w, index.k))
        return np.array([[(w[s] * np.maximum(q[s] @ k[j], 0)).sum() for j in range(len(k))] for s in range(len(q))])

    def selected(self, tokens: Tensor, source: int) -> Tensor:
        """int32 [1, s, topk]: the index source's selection, position -1 where there is none."""
        ratio, candidate = self.topology.compress_ratios[source], self.topology.candidate_source_layer
        scores, pooled = self.index_scores(tokens, source), candidate is not None and source > candidate
        pool_scores = self.index_scores(tokens, candidate) if pooled else None
        out = torch.full((1, len(scores), self.topk), -1, dtype=torch.int32)
        for row in range(len(scores)):
            visible = (row + 1) // ratio
            if visible:
                chosen, _ = naive.select(
                    row, visible, scores[row], pool_scores[row] if pooled else None, ratio=ratio, topk=self.topk,
                    window=0, topk_blocks=self.topk_blocks, block_size=self.block_size, exclude_window=False, sinks=0,
                )  # fmt: skip
                out[0, row, : len(chosen)] = torch.tensor(chosen)
        return out

    def output(
        self, acts: LayerActivations, keys: CompressedKeys | None, selected: Tensor | None, ratio: int
    ) -> Tensor:
        """[1, s, h, dv]: softmax over window and positions, or over the selected tokens alone."""
        q, k, v = (x[0].double().numpy() for x in (acts.q, acts.k, acts.v))
        t, logits = k.shape[1], naive.attention_logits(q, k, acts.scale, acts.softcap, acts.window)
        if keys is not None:
            more = naive.compressed_logits(q, keys.k[0].double().numpy(), acts.scale, acts.softcap, ratio)
            logits = np.concatenate([logits, more], 2)
            v = np.concatenate([v, keys.v[0].double().numpy()], 1)
        out = np.zeros((1, t, len(q), v.shape[-1]))
        for head in range(len(q)):
            for row in range(t):
                entries = [e for e in range(logits.shape[2]) if logits[head, row, e] > -math.inf]
                if selected is not None:
                    chosen = [int(j) for j in selected[0, row] if j >= 0][self.forget :]
                    raw = [] if keys is None else [e for e in entries if e < t]
                    entries = raw + [j if keys is None else t + j for j in chosen]
                sink = None if acts.sink is None else float(acts.sink[head])
                p = naive.softmax(logits[head, row, entries], sink)
                out[0, row, head] = p @ v[head // (len(q) // len(v)), entries]
        return torch.from_numpy(out).float()


def groups(x: Tensor, ratio: int) -> Tensor:
    """[b, h, t, d] -> [b, h, n, r, d], complete groups only."""
    n = x.shape[2] // ratio
    return x[:, :, : n * ratio].unflatten(2, (n, ratio))
