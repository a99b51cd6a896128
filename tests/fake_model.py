"""A model for tests without transformers: seeded tensors per layer, attention by the obvious softmax.

Also here: documents for it, a tally that remembers every row, and a random lot of valid cells. Shapes as in `dense`.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsity_lab.activations import LayerActivations, Observer
from sparsity_lab.cells import Candidate, Cell, Selection
from sparsity_lab.dense import RowTile, row_tiles
from sparsity_lab.documents import Document, Documents
from sparsity_lab.metrics import METRICS
from sparsity_lab.passes import DocumentPass, Tally
from sparsity_lab.scorers import BASELINES, Scorer
from sparsity_lab.topology import NativeSelection

VOCABULARY = 64
FULL = torch.float64


@dataclass
class FakeModel:
    """An `ObservableModel`. `sharpness` scales the logits; `lie` != 1 makes its output another attention's."""

    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    seed: int = 0
    sharpness: float = 2.0
    softcap: float | None = None
    sink: bool = False
    sliding: dict[int, int] = field(default_factory=dict)  # layer -> window
    lie: float = 1.0
    max_length: int | None = 4096
    name: str = "fake"
    fingerprint: str = "fa4e"
    attention: str = "plain"
    dtype: torch.dtype = torch.float32
    hidden_size: int = 24
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    tokenizer: Any = None
    native: NativeSelection | None = None
    observed: list[list[int]] = field(default_factory=list)  # the layers of every forward so far

    def windows(self) -> dict[int, int | None]:
        return {layer: self.sliding.get(layer) for layer in range(self.num_layers)}

    def observe(self, tokens: Tensor, observer: Observer, layers: Collection[int]) -> None:
        self.observed.append(sorted(layers))
        for layer in sorted(layers):
            observer(self.activations(tokens, layer))

    def activations(self, tokens: Tensor, layer: int) -> LayerActivations:
        """Everything of one layer; q, k, v depend on the tokens and their positions."""
        generator = torch.Generator().manual_seed(1000 * self.seed + layer)
        table = torch.randn(VOCABULARY, self.hidden_size, generator=generator)
        places = torch.randn(8192, self.hidden_size, generator=generator)
        x = (table[tokens[0]] + places[: tokens.shape[1]]) * 2**-0.5

        def project(heads: int) -> Tensor:
            matrix = torch.randn(self.hidden_size, heads * self.head_dim, generator=generator)
            flat = x @ matrix * self.hidden_size**-0.5
            return flat.unflatten(-1, (heads, self.head_dim)).transpose(0, 1).unsqueeze(0)

        q, k, v = project(self.num_heads), project(self.num_kv_heads), project(self.num_kv_heads)
        sink = torch.randn(self.num_heads, generator=generator) if self.sink else None
        scale, window = self.sharpness * self.head_dim**-0.5, self.sliding.get(layer)
        output = plain_attention(q[0], k[0], v[0], scale, self.softcap, sink, window).float() * self.lie
        return LayerActivations(layer, q, k, v, x.unsqueeze(0), output, scale, self.softcap, sink, window)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, sink: Tensor | None, window: int | None
) -> Tensor:
    """q [h,s,d], k and v [hk,s,d] -> float64 [1,s,h,dv], a head at a time over the full rectangle."""
    length = q.shape[1]
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    heads = []
    for head in range(q.shape[0]):
        source = head // (q.shape[0] // k.shape[0])
        logits = (q[head].to(FULL) @ k[source].to(FULL).T) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        weights = torch.where(seen, logits.exp(), 0.0)
        denominator = weights.sum(1, keepdim=True) + (0.0 if sink is None else sink[head].to(FULL).exp())
        heads.append((weights / denominator) @ v[source].to(FULL))
    return torch.stack(heads, dim=1).unsqueeze(0)


def documents(count: int = 2, length: int = 47, *, seed: int = 0, indices: Iterable[int] | None = None) -> Documents:
    """Documents of random tokens; `indices` picks some, each the same whatever the count."""
    items = []
    for index in range(count) if indices is None else indices:
        generator = torch.Generator().manual_seed(7919 * seed + index)
        items.append(Document(index, torch.randint(VOCABULARY, (length,), generator=generator), f"random {index}"))
    return Documents(tuple(items), {"name": "random", "length": length, "seed": seed})


class RecordingTally(Tally):
    """A tally that also keeps the value of every row: rows_of[cell, layer] -> {metric: [g, all rows]}."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.parts: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def add(self, cells, layer, rows, values, visible, ks, places):  # type: ignore[no-untyped-def]
        super().add(cells, layer, rows, values, visible, ks, places)
        for cell, at_k, at_pool in zip(cells, *places, strict=True):
            self.parts[cell, layer].append((rows, values[:, at_k, at_pool]))

    def rows_of(self, cell: int, layer: int) -> dict[str, np.ndarray]:
        """In order of position, however the rows were dealt out to tiles."""
        rows, values = (torch.cat(parts, dim=-1) for parts in zip(*self.parts[cell, layer], strict=True))
        return dict(zip(METRICS, values[..., rows.argsort()].numpy(), strict=True))


def tiles_of(model: FakeModel, document: Document, rows: Tensor, tile: int, seed: int = 0) -> list[RowTile]:
    """All row tiles of all layers, in layer order."""
    layers = (model.activations(document.tokens.unsqueeze(0), layer) for layer in range(model.num_layers))
    return [part for acts in layers for part in row_tiles(acts, rows, tile, document.id, seed)]


def run(
    cells: Sequence[Cell],
    tiles: Sequence[RowTile],
    *,
    scorers: Mapping[str, Scorer] | None = None,
    native: NativeSelection | None = None,
    detail_rows: Tensor | None = None,
    checks: bool = True,
) -> RecordingTally:
    """The cells on ready tiles of one document."""
    tally = RecordingTally(len(cells), sorted({t.acts.layer for t in tiles}), tiles[0].length, torch.device("cpu"))
    everything = {name: make() for name, make in BASELINES.items()} | dict(scorers or {})
    evaluator = DocumentPass(
        cells, everything, tally, num_layers=tally.layers[-1] + 1, native=native, detail_rows=detail_rows, checks=checks
    )
    for tile in tiles:
        evaluator.tile(tile)
    return tally


def random_cells(
    count: int, *, seed: int, length: int, num_layers: int, scorers: Sequence[str] = tuple(BASELINES)
) -> list[Cell]:
    """Different valid cells over every option: ratios 1 to 5, k from 1 to beyond n, about half with a pool."""
    draw = random.Random(seed)
    cells: dict[Cell, None] = {}
    while len(cells) < count:
        block_size, topk_blocks = draw.choice([1, 2, 3, 4, 7]), draw.choice([1, 2, 3, 5, 8, 99])
        pool = draw.choice([None, Candidate(draw.randrange(num_layers - 1), topk_blocks, block_size)])
        most = topk_blocks * block_size - (block_size - 1) if pool else length + 5
        try:
            selection = Selection(
                compress_ratio=draw.choice([1, 2, 3, 4, 5]),
                topk=draw.choice([1, 2, 3, 4, 6, 9, 14, most]),
                window=draw.choice([0, 1, 3, 8, 999]),
                share=draw.choice(["layer", "kv_head"]),
                exclude_window=draw.random() < 0.3,
                sinks=draw.choice([0, 0, 0, 1, 3]),
                candidate=pool,
            )
        except ValueError:
            continue
        cells[Cell(draw.choice(list(scorers)), selection)] = None
    return list(cells)


def dyadic_tiles(model: FakeModel, document: Document, rows: Tensor, *, units: int = 256) -> list[RowTile]:
    """One tile a layer whose probabilities are multiples of 1 / units: every sum of them is exact, ties are the rule.

    With a sink, part of each row's mass goes there.
    """
    tiles = []
    for layer in range(model.num_layers):
        acts = model.activations(document.tokens.unsqueeze(0), layer)
        generator = np.random.default_rng([model.seed, layer, document.index])
        p = np.zeros((model.num_heads, len(rows), acts.k.shape[2]), np.float32)
        for head in range(model.num_heads):
            for i, row in enumerate(rows.tolist()):
                weights = generator.dirichlet(np.full(row + 2, 0.3))
                if not model.sink:
                    weights[-2:] = weights[-2:].sum().clip(max=1), 0
                p[head, i, : row + 1] = generator.multinomial(units, weights)[:-1] / units
        tiles.append(RowTile(acts, rows, document.id, 0, torch.from_numpy(p)))
    return tiles


def naive_rows(cell: Cell, tile: RowTile, scores: Tensor, pool_scores: Tensor | None) -> list[dict[str, Any]]:
    """`naive.measure` for probabilities that are given: one dict per (group, row), groups outermost."""
    import naive

    s, p = cell.selection, tile.probabilities.double().numpy()
    heads, kv_heads = p.shape[0], tile.kv_heads
    values = tile.acts.v[0].double().numpy()[[i // (heads // kv_heads) for i in range(heads)]]
    with np.errstate(divide="ignore"):
        logits = np.log(p)
        sinks = np.log(1 - p.sum(-1))
    options = {"ratio": s.compress_ratio, "topk": s.topk, "window": s.window}
    narrow = {"exclude_window": s.exclude_window, "sinks": s.sinks, "topk_blocks": None, "block_size": None}
    if s.candidate is not None:
        narrow |= {"topk_blocks": s.candidate.topk_blocks, "block_size": s.candidate.block_size}
    out = []
    for group, members in enumerate(naive.head_groups(heads, kv_heads, s.share)):
        for i, row in enumerate(tile.rows.tolist()):
            visible = (row + 1) // s.compress_ratio
            result: dict[str, Any] = {"row": row, "visible": visible, "saturated": visible <= s.topk}
            result |= dict.fromkeys(METRICS)
            if visible:
                pool = None if pool_scores is None else pool_scores[group, i].tolist()
                chosen = naive.select(row, visible, scores[group, i].tolist(), pool, **options, **narrow)
                sink = None if tile.acts.sink is None else list(sinks[members, i])
                dense = p[members, i], logits[members, i], values[members], sink
                result |= naive.measure_row(row, *dense, *chosen, **options)
            out.append(result)
    return out
