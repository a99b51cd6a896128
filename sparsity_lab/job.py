"""From jobs to results. One `Workspace` serves any number of jobs: those that share a pass are measured in one."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from sparsity_lab import __version__
from sparsity_lab.activations import ObservableModel
from sparsity_lab.applied import sparse_model
from sparsity_lab.cells import Cell, cell_topology, check_cell, index_sources, with_envelope
from sparsity_lab.config import Job, read_job
from sparsity_lab.documents import Documents
from sparsity_lab.measurement import ENVELOPE, measure, measured_layers
from sparsity_lab.models.recorded import RecordedModel
from sparsity_lab.native import Native
from sparsity_lab.results import Results, Store, write_table, write_text
from sparsity_lab.scorers import BASELINES, Scorer
from sparsity_lab.shape import described_model, described_scorers

log = logging.getLogger("sparsity_lab")
ProgressFactory = Callable[[str], contextlib.AbstractContextManager[Callable[[int, int], None]]]
_current: ContextVar[Workspace | None] = ContextVar("workspace", default=None)


@contextlib.contextmanager
def _silent(label: str) -> Iterator[Callable[[int, int], None]]:
    yield lambda done, total: None


class Workspace:
    """Loaded models, cut documents and measured passes of this process, each made once."""

    def __init__(self, progress: ProgressFactory = _silent) -> None:
        self.progress = progress
        self._models: dict[str, ObservableModel] = {}
        self._documents: dict[str, Documents] = {}
        self._passes: dict[str, Results | Exception] = {}
        self._unable: dict[tuple[str, tuple[Cell, ...]], ValueError] = {}  # (pass, a job's cells) -> what is wrong

    @staticmethod
    def read(config: DictConfig) -> Job:
        """What a configuration asks for."""
        return read_job(config)

    @classmethod
    def current(cls, progress: ProgressFactory = _silent) -> Workspace:
        """The workspace that the fused launcher opened around its jobs, or a new one."""
        return _current.get() or cls(progress)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Workspace]:
        """Make this the current workspace."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)

    def model(self, settings: Mapping[str, Any]) -> ObservableModel:
        """Load (once) the model of a job."""
        key = json.dumps(settings, sort_keys=True)
        if key not in self._models:
            log.info("loading model %s", settings["name"])
            self._models[key] = _load_model(settings)
        return self._models[key]

    def documents(self, settings: Mapping[str, Any], model: ObservableModel, model_key: str) -> Documents:
        """Cut (once) the documents of a job with the model's tokenizer, or take those of a recording."""
        from sparsity_lab import data

        key = json.dumps([dict(settings), model_key], sort_keys=True)
        if key not in self._documents and isinstance(model, RecordedModel):
            self._documents[key] = _recorded_documents(settings, model)
        if key not in self._documents:
            options = dict(settings)
            self._documents[key] = data.load(options.pop("name"), model.tokenizer, **options)
        return self._documents[key]

    def measure(self, jobs: Sequence[Job]) -> None:
        """Measure the cells of jobs that share one pass, with one forward a document. What fails is kept for `results`,
        which raises it for every job of the pass."""
        key = jobs[0].pass_key
        try:
            self._passes[key] = self._measure(jobs)
        except Exception as error:
            self._passes[key] = error.with_traceback(None)  # its frames hold the pass's tensors

    def _measure(self, jobs: Sequence[Job]) -> Results:
        first = jobs[0]
        model = self.model(first.model)
        documents = self.documents(first.data, model, json.dumps(first.model, sort_keys=True))
        cells, failed, scorers = self._admit(jobs, model)
        if isinstance(model, RecordedModel):
            needs = {name: first.measure[name] for name in ("rows", "seed", "layers", "detail_rows")}
            model.check(documents, **needs, scorers=[scorer.name for scorer in scorers.values()])
        told = described_scorers(scorers, {job.scorer_label: job.scorer for job in jobs})
        store = Store(first.folder, {**provenance(first, model, documents), "scorers": told})
        options = dict(first.measure)
        with self.progress(f"{model.name}, {len(documents)} documents") as progress:
            try:
                return measure(
                    model, documents, cells, scorers=scorers, store=store, failed=failed, progress=progress,
                    say=log.warning, **options,
                )  # fmt: skip
            except KeyboardInterrupt:
                store.set_status("interrupted")
                raise

    def _admit(
        self, jobs: Sequence[Job], model: ObservableModel
    ) -> tuple[list[Cell], list[dict[str, Any]], dict[str, Scorer]]:
        """What jobs that share a pass want measured: the cells, those that cannot be (with the reason), and label ->
        scorer. A job that is left without a cell fails alone: see `_unable`."""
        layers = measured_layers(model, jobs[0].data["length"], jobs[0].measure["layers"])[0]
        cells: dict[Cell, None] = {}
        failed = [cell for job in jobs for cell in job.failed]
        scorers: dict[str, Scorer] = {}
        for job in jobs:
            reasons = []
            for cell in job.cells:
                try:
                    if cell.scorer not in scorers:
                        scorers[cell.scorer] = build_scorer(job.scorer, model)
                    _check(cell, scorers[cell.scorer], model, job.data["length"], layers)
                    cells[cell] = None
                except ValueError as error:
                    reasons.append(error)
                    failed.append({**cell.fields(), "reason": str(error)})
            if len(reasons) == len(job.cells):
                self._unable[job.pass_key, job.cells] = reasons[0]
        return list(cells), failed, scorers

    def results(self, job: Job) -> Results:
        """The job's own cells (and their envelope), measured now unless they were before.

        Raises:
            what the pass raised; ValueError with the reason when no cell of the job could be measured.
        """
        if job.pass_key not in self._passes:
            self.measure([job])
        found = self._unable.get((job.pass_key, job.cells)) or self._passes[job.pass_key]
        if isinstance(found, Exception):
            raise found
        cells = set(with_envelope(job.cells, ENVELOPE) if job.measure["envelope"] else job.cells)
        mine = {json.dumps(cell.fields(), sort_keys=True) for cell in cells}
        names = next(iter(cells)).fields()

        def own(about: Mapping[str, Any]) -> bool:
            return json.dumps({name: about[name] for name in names}, sort_keys=True) in mine

        return found.only(key for key, about in found.cells.items() if own(about))


def _load_model(settings: Mapping[str, Any]) -> ObservableModel:
    from sparsity_lab.models import load_model, loading

    if "applied" in settings:
        dense = {k: v for k, v in settings.items() if k != "applied"} | {"attention": "native"}
        return sparse_model(_load_model(dense), settings["applied"])
    if settings.get("kind") == "recorded":
        return RecordedModel(settings["path"], device=settings["device"])
    if "size" in settings:
        return _load_deepseek_v41(settings)
    return loading.load(**settings) if "path" in settings else load_model(**settings)


def _load_deepseek_v41(settings: Mapping[str, Any]) -> ObservableModel:
    """Under torchrun only the first process goes on to measure; the others compute their part and end with it."""
    from sparsity_lab.models import deepseek_v41

    model = deepseek_v41.load(**settings)
    if model.follows:
        model.serve()
        raise SystemExit(0)
    return model


def _recorded_documents(settings: Mapping[str, Any], model: RecordedModel) -> Documents:
    """The documents that `data=recorded` asks for."""
    length = model.manifest["data"]["length"]
    if settings["length"] != length:
        raise ValueError(f"data.length={settings['length']}: {model.folder} holds documents of {length} tokens")
    return model.documents(settings["num_documents"], shard=settings["shard"], num_shards=settings["num_shards"])


def _check(cell: Cell, scorer: Scorer, model: ObservableModel, length: int, layers: Sequence[int]) -> None:
    """Raise ValueError where a cell cannot be measured or an indexer cannot serve it, before a pass begins."""
    from sparsity_lab.lightning import Lightning

    if isinstance(scorer, Native):
        scorer.check(cell.selection)
    ratio, sources = cell.selection.compress_ratio, index_sources(cell.selection.index_source_layers, scorer)
    check_cell(cell, length=length, num_layers=model.num_layers, layers=layers, native=model.native, sources=sources)
    if isinstance(scorer, Lightning):
        selecting = cell_topology(ratio, sources, model.num_layers, model.native).index_source_layers
        scorer.check([layer for layer in selecting if layer in layers], ratio)


def execute(
    config: DictConfig, folder: Path, progress: ProgressFactory = _silent, workspace: type[Workspace] = Workspace
) -> tuple[Job, Results]:
    """Run one Hydra job: measure (or take from the pass that served it), and leave `summary.csv` and `status` in
    `folder`. What goes wrong is logged there too, then raised."""
    try:
        job = workspace.read(config)
        results = workspace.current(progress).results(job)
        write_table(results.frame(), folder / "summary.csv")
    except Exception as error:
        log.error("%s", error)
        write_text(folder / "status", f"failed: {str(error) or type(error).__name__}\n")
        raise
    except KeyboardInterrupt:
        log.error("interrupted; the same command goes on from here")
        write_text(folder / "status", "interrupted\n")
        raise
    write_text(folder / "status", "complete\n")
    return job, results


def objective(results: Results, job: Job) -> float:
    """The metric `objective` averaged over the job's own cells (not their envelope) and layers, for sweepers."""
    table = results.frame((), resamples=1)
    return float(table.loc[table["scorer"] == job.scorer_label, job.objective].mean())


def build_scorer(settings: Mapping[str, Any], model: ObservableModel) -> Scorer:
    """The scorer a configuration names.

    Raises:
        ValueError: unknown name or options.
    """
    options = dict(settings)
    name = options.pop("name")
    if name in BASELINES:
        try:
            return BASELINES[name](**options)
        except TypeError as error:
            raise ValueError(f"scorer.name={name}: does not take the options {options} ({error})") from error
    if name == "native":
        return Native(model)
    if name == "lightning":
        from sparsity_lab.lightning import IndexerConfig, Lightning

        weights, seed = options.pop("weights"), options.pop("seed", 0)
        return Lightning(model, IndexerConfig(**options), weights=weights, seed=seed)
    raise ValueError(f"scorer.name={name!r}: must be one of {', '.join([*BASELINES, 'lightning', 'native'])}")


def provenance(job: Job, model: ObservableModel, documents: Documents) -> dict[str, Any]:
    """What a manifest says of a run beside its cells."""
    return {
        "config": job.config,
        "model": described_model(model),
        "data": documents.source,
        "seed": job.measure["seed"],
        **machine(),
    }


def machine() -> dict[str, Any]:
    """Device, versions and git state of this process."""
    import numpy
    import torch
    import transformers

    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            "sparsity_lab": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
        },
        "git": git_state(),
    }


def git_state() -> dict[str, Any]:
    """Commit and dirty flag of the source tree; nothing outside a checkout. SPARSITY_LAB_GIT_SHA overrides them: the
    commit of a copy on a machine without the history."""
    if sha := os.environ.get("SPARSITY_LAB_GIT_SHA"):
        return {"sha": sha, "dirty": False}
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10)
        if done.returncode:
            raise OSError(done.stderr)
        return done.stdout.strip()

    try:
        return {"sha": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {}
