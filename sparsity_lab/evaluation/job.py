"""From jobs to evaluations, as `sparsity_lab.job` does it for recall: one `Workspace`, folders, failures, dry runs."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from sparsity_lab.cells import Cell, check_cell, index_sources, with_envelope
from sparsity_lab.config import Job
from sparsity_lab.config import read_job as read_any_job
from sparsity_lab.estimate import MIB, by_pass, flops_per_second, minutes, model_size
from sparsity_lab.evaluation.needles import check_options
from sparsity_lab.evaluation.run import Evaluation, Options, Placed, place
from sparsity_lab.evaluation.summary import METRICS, EvaluationResults, load
from sparsity_lab.evaluation.tables import EvaluationStore
from sparsity_lab.job import Workspace, build_scorer, provenance
from sparsity_lab.measurement import ENVELOPE, measured_layers
from sparsity_lab.models.hf import HFModel
from sparsity_lab.models.sparse import SparseModel
from sparsity_lab.results import ResultsError, write_table
from sparsity_lab.scorers import Scorer
from sparsity_lab.shape import described_scorers

log = logging.getLogger("sparsity_lab")


def read_job(config: DictConfig) -> Job:
    """Check a composed configuration of evaluate.py.

    Raises:
        ValueError: a value out of range, by its key.
    """
    job = read_any_job(config, METRICS)
    if job.model.get("kind") == "recorded":
        raise ValueError("model=recorded: a recording cannot be run with a selection applied; give the model itself")
    options = Options.read(job.config["evaluation"], job.measure)
    length = job.data["length"]
    check_options(options.tasks, options.lengths or (length,), options.depths, length)
    return job


def wanted(job: Job) -> list[Cell]:
    """The job's cells, with their bounds where asked for."""
    return with_envelope(job.cells, ENVELOPE) if job.measure["envelope"] else list(job.cells)


class EvaluationWorkspace(Workspace):
    """Jobs that share a folder, model and data are evaluated together: one dense forward a document serves them all."""

    @staticmethod
    def read(config: DictConfig) -> Job:
        return read_job(config)

    def _measure(self, jobs: Sequence[Job]) -> Any:
        first = jobs[0]
        model = self.model(first.model)
        if not isinstance(model, HFModel):
            raise ValueError(f"model={model.name}: only transformers models can be run with a selection applied")
        documents = self.documents(first.data, model, json.dumps(first.model, sort_keys=True))
        options = Options.read(first.config["evaluation"], first.measure)
        placed, described, failed = self._place(jobs, model, documents.source, options)
        evaluation = Evaluation(model, documents, placed, options)
        settings = {job.scorer_label: job.scorer for job in jobs}
        told = described_scorers({each.cell.scorer: each.scorer for each in placed.values()}, settings)
        store = EvaluationStore(first.folder, {**provenance(first, model, documents), "scorers": told})
        store.register(described, failed)
        for cell in failed:
            log.warning("cell cannot be evaluated: %s", cell["reason"])
        if not placed:
            raise ValueError(failed[0]["reason"])
        try:
            with self.progress(f"{model.name}, {len(documents)} documents, {len(placed)} cells") as progress:
                evaluation.run(store, progress=progress, say=log.warning)
            self._harness(first, model, placed, store)
            store.finish()
        except KeyboardInterrupt:
            store.set_status(f"interrupted{evaluation.progress_made()}")
            with contextlib.suppress(ResultsError):  # there is nothing yet
                _write_tables(first.folder)
            raise
        except BaseException as error:
            store.set_status(f"failed: {str(error) or type(error).__name__}")
            raise
        whole = _write_tables(first.folder)
        return whole.only(key for key in evaluation.cells if key not in evaluation.failed)

    def _place(
        self, jobs: Sequence[Job], model: Any, source: dict[str, Any], options: Options
    ) -> tuple[dict[str, Placed], dict[str, dict[str, Any]], list[dict[str, Any]]]:
        """Cells that can run, what they are, and those that cannot with the reason. A job without any fails alone."""
        available = measured_layers(model, source["length"], None)[0]
        cells: dict[Cell, list[int]] = {}
        failed = [cell for job in jobs for cell in job.failed]
        scorers: dict[str, Scorer] = {}
        for job in jobs:
            reasons = []
            for cell in wanted(job):
                try:
                    if cell.scorer not in scorers:
                        own = cell.scorer == job.scorer_label
                        scorers[cell.scorer] = build_scorer(job.scorer if own else {"name": cell.scorer}, model)
                    layers = options.applied_layers(cell, scorers[cell.scorer], available, model.num_layers)
                    _check_length(cell, scorers[cell.scorer], source["length"], available, model.num_layers)
                    cells[cell] = SparseModel(model, cell.selection, scorers[cell.scorer], layers).layers
                except ValueError as error:
                    reasons.append(error)
                    failed.append({**cell.fields(), "reason": str(error)})
            if len(reasons) == len(wanted(job)):
                self._unable[job.pass_key, job.cells] = reasons[0]
        return (*place(model, source, list(cells), scorers, cells, options), failed)

    def _harness(self, job: Job, model: Any, placed: dict[str, Placed], store: EvaluationStore) -> None:
        settings = job.config["evaluation"]["harness"]
        if settings["tasks"]:
            from sparsity_lab.evaluation.harness import run as run_harness

            run_harness(model, placed, store, progress=self.progress, **settings)

    def results(self, job: Job) -> Any:
        """The job's own cells of the pass that served it. Raises what the pass raised."""
        if job.pass_key not in self._passes:
            self.measure([job])
        found: Any = self._unable.get((job.pass_key, job.cells)) or self._passes[job.pass_key]
        if isinstance(found, Exception):
            raise found
        mine = [cell.fields() for cell in wanted(job)]
        own = [key for key, about in found.cells.items() if {name: about[name] for name in mine[0]} in mine]
        if not own:
            raise ValueError("every cell of this job failed; the manifest's failed_cells say why")
        return found.only(own)


def _write_tables(folder: Path) -> EvaluationResults:
    """Everything in a folder, as tables for people."""
    whole = load(folder)
    tables = {"summary": whole.frame(), "by_layer": whole.by_layer(), "by_task": whole.by_task()}
    for name, table in {**tables, "by_harness": whole.by_harness()}.items():
        if not table.empty:
            write_table(table, folder / f"{name}.csv")
    return whole


def _check_length(cell: Cell, scorer: Scorer, length: int, layers: Sequence[int], num_layers: int) -> None:
    """Raise ValueError where documents are too short for a cell."""
    sources = index_sources(cell.selection.index_source_layers, scorer)
    check_cell(cell, length=length, num_layers=num_layers, layers=layers, sources=sources)


def objective(results: EvaluationResults, job: Job) -> float:
    """The metric `objective` averaged over the job's own cells (not their bounds), for sweepers."""
    table = results.frame(resamples=1)
    if table.empty:
        return float("nan")
    return float(table.loc[table["scorer"] == job.scorer_label, job.objective].mean())


def describe(jobs: Sequence[Job]) -> str:
    """What a dry run prints: a line a folder and model, then the whole."""
    lines, known = by_pass(jobs, _describe_pass)
    return "\n".join(
        [
            *lines,
            "A cell changes what the model computes, so no forward serves two cells; they share the loaded model, the "
            "documents and tasks, and each document's or task's dense run, kept as its final hidden states.",
            f"{len(jobs)} jobs{known} (nothing was evaluated: dry_run=true)",
        ]
    )


def _describe_pass(jobs: Sequence[Job]) -> tuple[str, float | None]:
    first = jobs[0]
    options = Options.read(first.config["evaluation"], first.measure)
    cells = len(dict.fromkeys(cell for job in jobs for cell in wanted(job)))
    data, length = first.data, first.data["length"]
    documents = -(-data["num_documents"] // data.get("num_shards", 1))
    holding = documents if options.task_documents is None else min(documents, options.task_documents)
    lengths = options.lengths or (length,)
    tasks = holding * len(options.tasks) * len(options.depths)
    forwards = {length: documents * (1 + cells) * options.perplexity}
    for task_length in lengths:  # a task: dense once more, to see where it attends
        forwards[task_length] = forwards.get(task_length, 0) + tasks * (2 + cells)
    failed = sum(len(job.failed) for job in jobs)
    head = (
        f"{first.model['name']} on {data['name']}, {documents} documents x {length} tokens, "
        f"{tasks * len(lengths)} retrieval tasks; {cells} cells" + (f", {failed} impossible" if failed else "")
        + f": {sum(forwards.values())} forwards"
    )  # fmt: skip
    size = model_size(first.model)
    if size is None:
        return f"{head}; time and memory unknown (no model configuration at hand)", None
    flops = sum(
        count * 2 * (size.parameters * t + size.layers * size.heads * size.head_dim * t * t)
        for t, count in forwards.items()
    )
    seconds = flops / (0.5 * flops_per_second(first.model["device"]))  # whole models reach half of a plain product
    memory = size.weights_bytes + 4 * length * length * size.heads
    return f"{head}; at least {minutes(seconds)} and {memory / MIB:,.0f} MiB beside the libraries", seconds
