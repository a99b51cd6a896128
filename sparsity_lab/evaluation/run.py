"""An evaluation: documents and their tasks, dense once and then under each cell, into a store."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsity_lab.activations import ObservableModel
from sparsity_lab.applied import check_layers, layers_to_apply
from sparsity_lab.cells import Cell, cell_id, cell_topology, index_sources
from sparsity_lab.checks import CheckError
from sparsity_lab.documents import Document, Documents
from sparsity_lab.evaluation import likelihood, needles, retrieval
from sparsity_lab.evaluation.needles import Task
from sparsity_lab.evaluation.retrieval import Answer, Trace
from sparsity_lab.evaluation.tables import EvaluationStore
from sparsity_lab.measurement import sample_rows
from sparsity_lab.models import sparse
from sparsity_lab.models.hf import HFModel
from sparsity_lab.passes import bucket_of
from sparsity_lab.scorers import Scorer

# Part of every cell id: raise it whenever the same cell would get other numbers, so old results are never mistaken.
NUMBERS_VERSION = 1
KEY = "evaluation"
Progress = Callable[[int, int], None]
MakeSparse = Callable[..., Any]


@dataclass(frozen=True)
class Options:
    """What to evaluate; see conf/evaluation/default.yaml."""

    layers: tuple[int, ...] | str | None = None
    dense_layers: int = 0
    perplexity: bool = True
    rows: int | None = 128
    seed: int = 0
    tasks: tuple[str, ...] = ()
    lengths: tuple[int, ...] | None = None
    depths: tuple[float, ...] = (0.5,)
    task_documents: int | None = None

    @classmethod
    def read(cls, evaluation: Mapping[str, Any], measure: Mapping[str, Any]) -> Options:
        """From the configuration.

        Raises:
            ValueError: by the field.
        """
        layers, asked = evaluation["layers"], evaluation["retrieval"]
        check_layers(KEY, layers, evaluation["dense_layers"])
        if measure["layers"] is not None:
            raise ValueError(f"measure.layers={measure['layers']}: is recall's; set evaluation.layers")
        if not evaluation["perplexity"] and not asked["tasks"] and not evaluation["harness"]["tasks"]:
            raise ValueError(
                "evaluation.perplexity=false: leaves nothing to evaluate without retrieval or harness tasks"
            )
        if not 0 <= asked["informative"] <= 1:
            raise ValueError(f"evaluation.retrieval.informative={asked['informative']}: must be a score from 0 to 1")
        if asked["documents"] is not None and asked["documents"] < 1:
            raise ValueError(
                f"evaluation.retrieval.documents={asked['documents']}: must be at least 1, or null for all"
            )
        return cls(
            layers=tuple(layers) if isinstance(layers, list) else layers, dense_layers=evaluation["dense_layers"],
            perplexity=evaluation["perplexity"], rows=measure["rows"], seed=measure["seed"],
            tasks=tuple(asked["tasks"]), lengths=None if asked["lengths"] is None else tuple(asked["lengths"]),
            depths=tuple(asked["depths"]), task_documents=asked["documents"],
        )  # fmt: skip

    def applied_layers(self, cell: Cell, scorer: Scorer, available: Sequence[int], num_layers: int) -> list[int]:
        """The layers in which a cell's selection is applied; the others stay dense.

        Raises:
            ValueError: layers that cannot select, or none left.
        """
        return layers_to_apply(KEY, self.layers, self.dense_layers, cell.selection, scorer, available, num_layers)


@dataclass(frozen=True)
class Placed:
    """A cell ready to run: where its selection is applied, and by which scorer."""

    cell: Cell
    scorer: Scorer
    layers: list[int]


class Evaluation:
    """Runs cells over documents. `make_sparse(model, selection, scorer, layers)` gives the sparse model of a cell."""

    def __init__(
        self,
        model: HFModel,
        documents: Documents,
        cells: Mapping[str, Placed],
        options: Options,
        make_sparse: MakeSparse | None = None,
    ) -> None:
        length = int(documents[0].tokens.numel())
        self.model, self.documents, self.cells, self.options = model, documents, dict(cells), options
        self.lengths = options.lengths or (length,)
        needles.check_options(options.tasks, self.lengths, options.depths, length)
        self.make_sparse = make_sparse or _sparse_model
        self.failed: dict[str, str] = {}
        self.finished, self.asked = 0, 0  # documents and tasks that every cell is through with, and all of them
        self.layers = sorted({layer for placed in self.cells.values() for layer in placed.layers})

    def run(
        self,
        store: EvaluationStore,
        *,
        progress: Progress = lambda done, total: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Evaluate what the store lacks. A cell that fails is recorded there with its reason, and the others go on.

        Raises:
            ValueError: every cell failed.
        """
        likelihood.check_head(self.model, self.documents[0].tokens)
        tasks = list(self._tasks()) if self.options.tasks else []
        done, answered = store.done("likelihood", "document"), store.done("retrieval", "task")
        for text in store.damaged:
            say(f"set aside and computed again: {text}")
        todo: list[tuple[Document | Task, list[str]]] = []
        if self.options.perplexity:
            todo += [(d, [i for i in self.cells if (i, d.id) not in done]) for d in self.documents]
        todo += [(t, [i for i in self.cells if (i, t.id) not in answered]) for t in tasks]
        complete = sum(not ids for _, ids in todo)
        if complete:
            say(f"{complete} of {len(todo)} documents and tasks are in the results already")
        step, steps = 0, sum(len(ids) + 1 for _, ids in todo if ids)
        self.finished, self.asked = complete, len(todo)
        for item, ids in ((item, ids) for item, ids in todo if ids):
            for _ in self._item(item, ids, store, say):
                step += 1
                progress(step, steps)
            self.finished += 1
        if self.failed and len(self.failed) == len(self.cells):
            raise ValueError(next(iter(self.failed.values())))

    def progress_made(self) -> str:
        """What a status says of a run that was stopped."""
        return f": {self.finished} of {self.asked} documents and tasks are finished" if self.asked else ""

    def _tasks(self) -> Iterator[Task]:
        o, first = self.options, self.documents.source.get("skip", 0)
        for document in self.documents:
            if o.task_documents is not None and document.index - first >= o.task_documents:
                return  # by its place among all documents, so that shards agree
            for kind in o.tasks:
                for length in self.lengths:
                    for depth in o.depths:
                        yield needles.make_task(self.model.tokenizer, document, kind, length, depth, o.seed)

    def _item(
        self, item: Document | Task, ids: Sequence[str], store: EvaluationStore, say: Callable[[str], None]
    ) -> Iterator[None]:
        """Dense, then every cell; yields after each forward."""
        dense = self._dense(item)
        yield
        for key in ids:
            if key not in self.failed:
                try:
                    store.add(self._cell(key, item, dense))
                except (ValueError, CheckError, torch.cuda.OutOfMemoryError) as error:
                    reason = str(error) or type(error).__name__
                    self.failed[key] = reason
                    say(f"cell failed: {self.cells[key].cell.label()}: {reason}")
                    store.register({}, [{**self.cells[key].cell.fields(), "reason": reason}])
            yield

    def _dense(self, item: Document | Task) -> Any:
        if isinstance(item, Task):
            return retrieval.answer(self.model, item), retrieval.dense_mass(self.model, item, self.layers)
        return likelihood.run(self.model, self.model, item.tokens, self.layers, self._error_rows(item))

    def _cell(self, key: str, item: Document | Task, dense: Any) -> dict[str, list[dict[str, Any]]]:
        """The rows of one cell and document or task, by table."""
        placed = self.cells[key]
        runs = self.make_sparse(self.model, placed.cell.selection, placed.scorer, placed.layers)
        if isinstance(item, Task):
            return self._retrieval(key, item, runs, *dense)
        found = likelihood.run(runs, self.model, item.tokens, placed.layers, self._error_rows(item))
        comparison = likelihood.compare(self.model.model, dense, found, item.tokens)
        where = {"cell_id": key, "document": item.id, "document_index": item.index}
        rows = torch.arange(len(item.tokens) - 1)
        keys = [1 << bucket_of(rows), likelihood.selective(rows, placed.cell.selection).long()]
        sums = likelihood.sums_by(keys, comparison)
        if any(not math.isfinite(value) for row in sums for value in (row["loss_sum"], row["dense_loss_sum"])):
            raise ValueError(f"document {item.name}: the model gives NaN or infinite losses")
        errors = likelihood.output_errors(replace(dense, outputs={i: dense.outputs[i] for i in placed.layers}), found)
        return {
            "layers": [{**where, "layer": layer, "output_error": error} for layer, error in errors.items()],
            "likelihood": [
                {**where, "bucket": row["keys"][0], "selective": bool(row["keys"][1]), **row} for row in sums
            ],
        }

    def _retrieval(
        self, key: str, task: Task, runs: Any, dense: Answer, mass: Mapping[int, Tensor]
    ) -> dict[str, list[dict[str, Any]]]:
        placed = self.cells[key]
        sources = index_sources(placed.cell.selection.index_source_layers, placed.scorer)
        topology = cell_topology(placed.cell.selection.compress_ratio, sources, self.model.num_layers)
        trace = Trace(task, placed.cell.selection, topology)
        with runs.watch(trace):
            given = retrieval.answer(runs, task)
        layers = trace.layers(mass, given.rows(task))
        row = {
            "cell_id": key, "task": task.id, "document": task.document, "document_index": task.document_index,
            "kind": task.kind, "task_length": task.length, "depth": task.depth, "answers": ", ".join(task.answers),
            "dense_text": dense.text, "text": given.text, "dense_score": dense.score, "score": given.score,
            "stage": retrieval.stage(given.score, layers),
            **{name: _mean([layer[name] for layer in layers]) for name in ("in_pool", "in_selection", "attended")},
            "kept_mass": retrieval.kept_mass(layers),
        }  # fmt: skip
        return {"traces": [{"cell_id": key, "task": task.id, **layer} for layer in layers], "retrieval": [row]}

    def _error_rows(self, document: Document) -> Tensor:
        return sample_rows(len(document.tokens), self.options.rows, self.options.seed, document.id)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _sparse_model(model: Any, selection: Any, scorer: Scorer, layers: Sequence[int]) -> Any:
    return sparse.SparseModel(model, selection, scorer, layers)


def place(
    model: ObservableModel,
    source: Mapping[str, Any],
    cells: Sequence[Cell],
    scorers: Mapping[str, Scorer],
    layers: Mapping[Cell, list[int]],
    options: Options,
) -> tuple[dict[str, Placed], dict[str, dict[str, Any]]]:
    """Cells by their ids, and what a manifest says of each."""
    context = {
        "evaluation": [NUMBERS_VERSION, sparse.NUMBERS_VERSION],
        "model": model.fingerprint,
        "attention": model.attention,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "data": dict(source),
        "rows": options.rows,
        "seed": options.seed,
    }
    described = {"model": model.name, "data": source["name"], "length": source["length"]}
    described |= {key: context[key] for key in ("dtype", "device", "seed")}
    placed, descriptions = {}, {}
    for cell in cells:
        scorer = scorers[cell.scorer]
        key = cell_id(cell, scorer.describe(), {**context, "layers": layers[cell]})
        placed[key] = Placed(cell, scorer, layers[cell])
        where = ",".join(map(str, layers[cell]))
        descriptions[key] = {
            **cell.fields(), **described, "applied_layers": where, "scorer_options": scorer.describe()
        }  # fmt: skip
    return placed, descriptions
