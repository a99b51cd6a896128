"""One pass: a model, documents and cells in, exact tallies out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from sparsity_lab import __version__
from sparsity_lab.activations import LayerActivations, ObservableModel
from sparsity_lab.cells import Cell, cell_id, check_cell, index_sources, with_envelope
from sparsity_lab.checks import CheckError
from sparsity_lab.dense import RowTile, default_tile, kernel_error, reconstruction_error, row_tiles, with_less_memory
from sparsity_lab.documents import Document, Documents
from sparsity_lab.doubts import Doubts, refuse
from sparsity_lab.passes import DocumentPass, Tally
from sparsity_lab.results import Results, Store, merge, tally_frame
from sparsity_lab.scorers import BASELINES, Scorer
from sparsity_lab.shape import described_model, described_scorers

# Part of every cell id: raise it whenever the same cell would get other numbers, so old results are never mistaken.
NUMBERS_VERSION = 1
ENVELOPE = ("oracle", "recency", "random")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
KERNEL_TOLERANCE = 1e-4  # of a mass, which is at most 1
Progress = Callable[[int, int], None]  # (layers done, layers in all)


def sample_rows(length: int, count: int | None, seed: int, document: str) -> Tensor:
    """Query rows to measure, ascending int64 [min(count, length)].

    Stratified: one row from each of `count` equal spans of positions, drawn with (seed, document id); None = all rows.
    """
    if count is None or count >= length:
        return torch.arange(length)
    if count < 1:
        raise ValueError(f"measure.rows={count}: must be at least 1, or null for all rows")
    key = hashlib.sha256(f"{seed}:{document}".encode()).digest()
    generator = np.random.default_rng(np.frombuffer(key, dtype=np.uint32))
    edges = np.arange(count + 1) * length // count
    return torch.from_numpy(generator.integers(edges[:-1], edges[1:]))


def measured_layers(model: ObservableModel, length: int, layers: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """(layers to measure, layers that do not apply: their sliding window is shorter than the documents, or they are
    layers of a sparse model that select nothing)."""
    windows, native = model.windows(), model.native
    ratios = native.topology.compress_ratios if native is not None and native.compressed else None
    wanted = sorted(windows) if layers is None else sorted(set(layers))
    if not wanted:
        raise ValueError("measure.layers=[]: name at least one layer, or null for all")
    unknown = [layer for layer in wanted if layer not in windows]
    if unknown:
        raise ValueError(f"measure.layers={unknown}: the model has attention layers {sorted(windows)}")
    applicable = [
        layer for layer in wanted if (windows[layer] or length) >= length and (ratios is None or ratios[layer])
    ]
    if not applicable:
        kind = "sliding-window layers, whose window is below" if ratios is None else "layers that select nothing of"
        raise ValueError(f"measure.layers={wanted}: all are {kind} {length} tokens")
    return applicable, [layer for layer in wanted if layer not in applicable]


class Plan:
    """What a pass will compute: its layers, the valid cells with their ids, and the cells that cannot be measured."""

    def __init__(
        self,
        model: ObservableModel,
        source: Mapping[str, Any],
        length: int,
        cells: Sequence[Cell],
        *,
        scorers: Mapping[str, Scorer] | None = None,
        rows: int | None = 128,
        seed: int = 0,
        layers: Sequence[int] | None = None,
        envelope: bool = True,
        detail_rows: int = 16,
    ) -> None:
        if model.max_length is not None and length > model.max_length:
            raise ValueError(f"data.length={length}: {model.name} was made for at most {model.max_length} positions")
        if detail_rows < 0:
            raise ValueError(f"measure.detail_rows={detail_rows}: must be at least 0 (0 = no per-head metrics)")
        if rows is not None and rows < 1:
            raise ValueError(f"measure.rows={rows}: must be at least 1, or null for all rows")
        self.length, self.rows, self.seed, self.detail_rows = length, rows, seed, detail_rows
        self.num_rows = length if rows is None else min(rows, length)
        self.scorers: dict[str, Scorer] = {name: make() for name, make in BASELINES.items()} | dict(scorers or {})
        self.layers, self.skipped_layers = measured_layers(model, length, layers)
        self.context: dict[str, Any] = {
            "numbers": NUMBERS_VERSION,
            "model": model.fingerprint,
            "attention": model.attention,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
            "data": dict(source),
            "rows": rows,
            "seed": seed,
            "layers": self.layers,
            "detail_rows": detail_rows,
        }
        self.cells: dict[str, Cell] = {}
        self.failed: list[dict[str, Any]] = []
        for cell in cells:
            self._admit(cell, model)
        bounds = with_envelope(list(self.cells.values()), ENVELOPE) if envelope else []
        for cell in bounds:
            self._admit(cell, model)
        described = {"model": model.name, "data": source["name"], "length": length}
        described |= {key: self.context[key] for key in ("dtype", "device", "seed")} | {"sampled_rows": rows}
        self.descriptions = {
            key: {**cell.fields(), **described, "scorer_options": self.scorers[cell.scorer].describe()}
            for key, cell in self.cells.items()
        }

    def _admit(self, cell: Cell, model: ObservableModel) -> None:
        if cell.scorer not in self.scorers:
            raise ValueError(f"scorer={cell.scorer!r}: must be one of {', '.join(self.scorers)}")
        sources = index_sources(cell.selection.index_source_layers, self.scorers[cell.scorer])
        try:
            check_cell(
                cell, length=self.length, num_layers=model.num_layers, layers=self.layers, native=model.native,
                sources=sources,
            )  # fmt: skip
        except ValueError as error:
            self.failed.append({**cell.fields(), "reason": str(error)})
            return
        key = cell_id(cell, self.scorers[cell.scorer].describe(), self.context)
        if self.cells.setdefault(key, cell) != cell:
            raise ValueError(
                f"scorer={cell.scorer}: describes itself as {self.cells[key].scorer} does; they would be mixed up"
            )


def measure_document(
    model: ObservableModel,
    document: Document,
    plan: Plan,
    ids: Sequence[str],
    tile: int,
    *,
    checks: bool = True,
    on_layer: Callable[[], None] | None = None,
) -> pd.DataFrame:
    """One forward over one document, `tile` query rows at a time; tallies of the cells `ids`."""
    cells = [plan.cells[i] for i in ids]
    rows = sample_rows(plan.length, plan.rows, plan.seed, document.id).to(model.device)
    spread = torch.arange(min(plan.detail_rows, len(rows)), device=rows.device)
    detail_rows = rows[spread * len(rows) // len(spread)] if len(spread) else None
    tally = Tally(len(cells), plan.layers, plan.length, model.device)
    evaluator = DocumentPass(
        cells, plan.scorers, tally, num_layers=model.num_layers, native=model.native, detail_rows=detail_rows,
        checks=checks,
    )  # fmt: skip

    def observe(acts: LayerActivations) -> None:
        doubts = Doubts()
        for i, part in enumerate(row_tiles(acts, rows, tile, document.id, plan.seed, doubts)):
            if checks and i == 0:
                check_dense(part, model.dtype)
            evaluator.tile(part)
        doubts.settle()
        if on_layer is not None:
            on_layer()

    model.observe(document.tokens.unsqueeze(0), observe, plan.layers)
    columns = tally.columns()
    size = len(columns["cell"])
    columns["cell_id"] = np.asarray(list(ids), dtype=object)[columns.pop("cell")]
    columns["document"] = np.full(size, document.id, dtype=object)
    columns["document_index"] = np.full(size, document.index, dtype=np.int64)
    return tally_frame(columns)


def check_dense(tile: RowTile, dtype: torch.dtype) -> None:
    """Our probabilities times the values must give the layer's own output, else they describe another attention."""
    _at_most(
        TOLERANCE.get(dtype, 3e-2), reconstruction_error(tile), tile,
        "attention rebuilt from its queries and keys differs from the model's own output by {:.2e} (allowed {:.0e}): "
        "its mask or scaling is none that sparsity_lab knows, so nothing measured there would be right",
    )  # fmt: skip
    if tile.has_kernels:
        _at_most(
            KERNEL_TOLERANCE, kernel_error(tile), tile,
            "the kernel's dense mass differs from plain PyTorch's by {:.2e} (allowed {:.0e}): set "
            "SPARSITY_LAB_KERNELS=0 to do without kernels",
        )  # fmt: skip


def _at_most(limit: float, error: Tensor, tile: RowTile, text: str) -> None:
    layer = tile.acts.layer  # a doubt must not keep the tile alive
    refuse(~(error <= limit), lambda: CheckError(f"layer {layer}: {text.format(float(error), limit)}"), tile.doubts)


def measure(
    model: ObservableModel,
    documents: Documents,
    cells: Sequence[Cell],
    *,
    scorers: Mapping[str, Scorer] | None = None,
    rows: int | None = 128,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    envelope: bool = True,
    detail_rows: int = 16,
    checks: bool = True,
    row_tile: int | None = None,
    store: Store | None = None,
    failed: Sequence[Mapping[str, Any]] = (),
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Results:
    """Measure cells on documents with one forward a document.

    Args:
        scorers: name -> scorer, beside the baselines (oracle, recency, random, mean_key, quest) at their defaults.
        rows: query rows a document (None = all); envelope: add oracle, recency and random to every cell.
        layers: attention layers to measure (None = all); sliding-window layers shorter than the documents are skipped.
        detail_rows: how many of the rows get the per-head metrics worst_head_coverage and output_error (0 = none).
        checks: verify invariants while measuring; row_tile: rows at a time (None = by memory).
        store: results folder; what it already holds is not computed again. failed: invalid cells to record there.
    Raises:
        ValueError: bad options, or no cell that can be measured. CheckError: an invariant does not hold.
    """
    if len(documents) == 0:
        raise ValueError("data: no documents to measure")
    length = int(documents[0].tokens.numel())
    if other := next((d for d in documents if d.tokens.numel() != length), None):
        raise ValueError(f"data: document {other.index} has {other.tokens.numel()} tokens, the first one {length}")
    plan = Plan(
        model, documents.source, length, cells, scorers=scorers, rows=rows, seed=seed, layers=layers,
        envelope=envelope, detail_rows=detail_rows,
    )  # fmt: skip
    failed = [*failed, *plan.failed]
    for cell in failed:
        say(f"cell cannot be measured: {cell['reason']}")
    if not plan.cells:
        raise ValueError(failed[0]["reason"] if failed else "no cells to measure")
    if all(c.selection.topk >= length // c.selection.compress_ratio for c in plan.cells.values()):
        say(f"every row is saturated: all cells select everything that {length} tokens show")
    if plan.skipped_layers:
        why = " or they select nothing" if model.native is not None and model.native.compressed else ""
        say(f"layers {plan.skipped_layers} do not apply: their sliding window is shorter than {length} tokens{why}")
    if row_tile is not None and row_tile < 1:
        raise ValueError(f"measure.row_tile={row_tile}: must be at least 1, or null for as many as fit")
    tile = row_tile or rows_at_once(model, length)
    run = _Run(model, plan, tile, checks, progress, say)
    if store is None:
        tallies = merge([run.document(d, list(plan.cells)) for d in run.counted(documents)])
        told = {"model": described_model(model), "scorers": described_scorers(scorers or {})}
        return Results(tallies, plan.descriptions, {"context": plan.context, "version": __version__, **told})
    store.register(plan.descriptions, failed)
    try:
        todo = _missing(plan, documents, store, say)
        for document in run.counted([d for d in documents if todo[d.id]]):
            store.add(run.document(document, todo[document.id]))
        return store.finish().only(plan.cells, [d.id for d in documents])
    except BaseException as error:
        store.set_status(f"failed: {str(error) or type(error).__name__}")
        raise


def rows_at_once(model: ObservableModel, length: int) -> int:
    """Rows a tile that the memory allows."""
    positions = most_positions(model, length)
    return default_tile(model.num_heads, length + positions, None if positions else model.device)


def most_positions(model: ObservableModel, length: int) -> int:
    """Compressed positions that the model's softmax holds beside the tokens, in the layer with most."""
    if model.native is None or not model.native.compressed:
        return 0
    return max(length // ratio for ratio in model.native.topology.compress_ratios if ratio)


def _missing(
    plan: Plan, documents: Sequence[Document], store: Store, say: Callable[[str], None]
) -> dict[str, list[str]]:
    """Document id -> cells that the store does not hold for it."""
    done = store.done()
    for text in store.damaged:
        say(f"set aside and computed again: {text}")
    todo = {d.id: [i for i in plan.cells if (i, d.id) not in done] for d in documents}
    complete = sum(not cells for cells in todo.values())
    if complete:
        say(f"{complete} of {len(todo)} documents are in the results already")
    return todo


class _Run:
    """Measures documents one by one, tells how far it is, and makes do with less memory when a GPU runs out."""

    def __init__(
        self,
        model: ObservableModel,
        plan: Plan,
        tile: int,
        checks: bool,
        progress: Progress | None,
        say: Callable[[str], None],
    ) -> None:
        self.model, self.plan, self.tile, self.checks, self.say = model, plan, tile, checks, say
        self.progress, self.steps, self.total = progress, 0, 0

    def counted(self, documents: Sequence[Document]) -> Sequence[Document]:
        """Announce the documents to come."""
        self.total = len(documents) * len(self.plan.layers)
        return documents

    def document(self, document: Document, ids: Sequence[str]) -> pd.DataFrame:
        """Tallies of one document. Out of device memory, the row tile is halved and the document starts over."""
        start = self.steps

        def work(tile: int) -> pd.DataFrame:
            self.steps = start
            return measure_document(self.model, document, self.plan, ids, tile, checks=self.checks, on_layer=self._step)

        found, self.tile = with_less_memory(work, min(self.tile, self.plan.num_rows), self.say)
        return found

    def _step(self) -> None:
        self.steps += 1
        if self.progress is not None:
            self.progress(self.steps, self.total)
