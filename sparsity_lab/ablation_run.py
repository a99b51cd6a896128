"""An ablation over documents, and the folder it leaves.

    manifest.json                 settings, versions, device, git state; `identity` is what changes numbers
    source/<document>.parquet     sums of `ablation.SOURCE_METRICS`; written last, so its presence means done
    reuse/<document>.parquet      sums of `ablation.REUSE_METRICS`
    joint/<document>.parquet      sums of `ablation_joint.JOINT_METRICS`, where joint pools were asked for
    attribution/<document>.parquet  sums of `attribution.STEPS`

One set of files a document: running again measures the documents that lack, and more documents can be added.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from sparsity_lab import measurement
from sparsity_lab.ablation import Ablation, AblationPass, kept_bytes
from sparsity_lab.ablation_joint import JointPass
from sparsity_lab.activations import LayerActivations, ObservableModel
from sparsity_lab.attribution import AttributionPass
from sparsity_lab.cells import Candidate, Cell, cell_topology, index_sources
from sparsity_lab.dense import row_tiles, with_less_memory
from sparsity_lab.documents import Document, Documents
from sparsity_lab.lightning import Lightning
from sparsity_lab.measurement import Plan, Progress, sample_rows
from sparsity_lab.native import Native
from sparsity_lab.results import write_atomically, write_text
from sparsity_lab.scorers import Scorer

VERSION = 1  # part of the identity: raise it when the same settings would get other numbers
Tables = dict[str, pd.DataFrame]


def _tables(ablation: Ablation) -> tuple[str, ...]:
    """In the order they are written."""
    return ("attribution", "reuse", *(("joint",) if ablation.joint_pools else ()), "source")


@dataclass(frozen=True)
class AblationResults:
    """What a folder holds; every table has a column `document`; `joint` is empty without joint pools."""

    manifest: dict[str, Any]
    source: pd.DataFrame
    reuse: pd.DataFrame
    attribution: pd.DataFrame
    joint: pd.DataFrame

    @property
    def ablation(self) -> Ablation:
        return Ablation(**self.manifest["identity"]["ablation"])

    def frame(self, table: str = "source") -> pd.DataFrame:
        """Means over rows, a row a document and cell: "source" or "reuse" (columns: see `ablation_table`), or
        "attribution" (`attribution.waterfall`, means over documents too).

        Raises:
            ValueError: no such table.
        """
        from sparsity_lab.ablation_table import reuse_means, source_means
        from sparsity_lab.attribution import waterfall

        made = {"source": source_means, "reuse": reuse_means, "attribution": lambda found: waterfall(found.attribution)}
        if table not in made:
            raise ValueError(f"table={table!r}: must be one of {', '.join(made)}")
        return made[table](self)


class AblationRun:
    """What will be measured of a model, checked before anything is.

    Args:
        scorer, label: the scorer and its name in results.
        candidate, index_source_layers: the selection whose losses are attributed.
        rows, seed, layers, checks, row_tile: as for `measurement.measure`. Layers without scores of their own (those
            of a sparse model that reuse or select nothing, with scorer=native) take no part.
    Raises:
        ValueError: what cannot be measured, by its key.
    """

    def __init__(
        self,
        model: ObservableModel,
        documents: Documents,
        ablation: Ablation,
        scorer: Scorer,
        label: str,
        *,
        candidate: Candidate | None = None,
        index_source_layers: Sequence[int] | None = None,
        rows: int | None = 128,
        seed: int = 0,
        layers: Sequence[int] | None = None,
        checks: bool = True,
        row_tile: int | None = None,
    ) -> None:
        if len(documents) == 0:
            raise ValueError("data: no documents to measure")
        length = int(documents[0].tokens.numel())
        cells = [Cell(label, ablation.selection(k)) for k in ablation.topk]
        options: dict[str, Any] = {"rows": rows, "seed": seed, "layers": layers, "envelope": False, "detail_rows": 0}
        self.plan = Plan(model, documents.source, length, cells, scorers={label: scorer}, **options)
        if self.plan.failed:
            raise ValueError(
                self.plan.failed[0]["reason"]
                .replace("selection.", "ablation.")
                .replace("take selection=native, or ", "")
            )
        self.model, self.documents, self.ablation, self.scorer, self.checks = model, documents, ablation, scorer, checks
        own = index_sources(None, scorer)
        selecting = cell_topology(ablation.compress_ratio, own, model.num_layers, model.native).index_source_layers
        self.layers = [layer for layer in self.plan.layers if layer in selecting]
        if len(self.layers) < 2:
            raise ValueError(f"measure.layers={self.plan.layers}: needs two layers with scores of their own")
        if isinstance(scorer, Native):
            scorer.check(cells[0].selection)
        if isinstance(scorer, Lightning):
            scorer.check(self.layers, ablation.compress_ratio)
        self.candidate, self.index_source_layers = candidate, index_source_layers
        self._attribution()
        if row_tile is not None and row_tile < 1:
            raise ValueError(f"measure.row_tile={row_tile}: must be at least 1, or null for as many as fit")
        self.tile = row_tile or measurement.rows_at_once(model, length)

    def _attribution(self) -> AttributionPass:
        return AttributionPass(
            self.ablation, self.scorer, self.layers, self.model.num_layers, native=self.model.native,
            candidate=self.candidate, index_source_layers=self.index_source_layers,
        )  # fmt: skip

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that changes the numbers of a document."""
        pool = self.candidate
        plain = {
            "version": VERSION,
            **self.plan.context,
            "layers": self.layers,
            "scorer": self.scorer.describe(),
            "ablation": self.ablation.describe(),
            "candidate": None if pool is None else [pool.source_layer, pool.topk_blocks, pool.block_size],
            "index_source_layers": self.index_source_layers and list(self.index_source_layers),
        }
        found: dict[str, Any] = json.loads(json.dumps(plain))  # as it will be read back
        return found

    def document(self, document: Document, on_layer: Callable[[], None] = lambda: None) -> Tables:
        """One forward over one document: a folder's tables."""
        rows = sample_rows(self.plan.length, self.plan.rows, self.plan.seed, document.id).to(self.model.device)
        found, losses = AblationPass(self.ablation, self.scorer, self.layers, checks=self.checks), self._attribution()
        joint = JointPass(self.ablation, self.scorer, self.layers)

        def observe(acts: LayerActivations) -> None:
            for i, part in enumerate(row_tiles(acts, rows, self.tile, document.id, self.plan.seed)):
                if self.checks and i == 0:
                    measurement.check_dense(part, self.model.dtype)
                found.tile(part)
                losses.tile(part)
                joint.tile(part)
            on_layer()

        self.model.observe(document.tokens.unsqueeze(0), observe, self.layers)
        source, reuse = found.frames()
        tables = {"attribution": losses.frame(), "reuse": reuse, "source": source}
        return tables | ({"joint": joint.frame()} if self.ablation.joint_pools else {})

    def run(
        self,
        folder: Path,
        manifest: Mapping[str, Any],
        *,
        progress: Progress = lambda done, total: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> AblationResults:
        """Measure the documents that the folder lacks.

        Raises:
            ValueError: the folder holds results of other settings. CheckError: an invariant does not hold.
        """
        begin(folder, self.identity, manifest)
        todo = [d for d in self.documents if not _file(folder, "source", d.id).exists()]
        if len(todo) < len(self.documents):
            say(f"{len(self.documents) - len(todo)} of {len(self.documents)} documents are in the results already")
        each, total = len(self.layers), len(todo) * len(self.layers)
        for i, document in enumerate(todo):
            tables = self._within_memory(document, say, lambda done: progress(done, total), i * each)
            for name in _tables(self.ablation):
                _write(_file(folder, name, document.id), tables[name])
        return load(folder)

    def _within_memory(
        self, document: Document, say: Callable[[str], None], progress: Callable[[int], None], before: int
    ) -> Tables:
        """`document` with a row tile that fits; `before`: layers done before it."""

        def work(tile: int) -> Tables:
            self.tile, steps = tile, itertools.count(before + 1)
            return self.document(document, lambda: progress(next(steps)))

        return with_less_memory(work, min(self.tile, self.plan.num_rows), say)[0]


def begin(folder: Path, identity: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Write the manifest, or make sure that the one there is of the same settings."""
    path = folder / "manifest.json"
    if path.exists():
        old = _read_manifest(folder)["identity"]
        differ = sorted(key for key in {*old, *identity} if old.get(key) != identity.get(key))
        if differ:
            raise ValueError(f"{folder}: holds results of other settings ({', '.join(differ)}); give another name")
    whole = {**manifest, "identity": dict(identity)}
    write_text(path, json.dumps(whole, indent=1, sort_keys=True) + "\n")


def load(folder: Path) -> AblationResults:
    """Read a folder.

    Raises:
        ValueError: nothing there, or files that cannot be read.
    """
    manifest = _read_manifest(folder)
    documents = sorted(path.stem for path in (folder / "source").glob("*.parquet"))
    if not documents:
        raise ValueError(f"{folder}: nothing measured yet")
    names = _tables(Ablation(**manifest["identity"]["ablation"]))
    tables = {name: pd.concat([_read(folder, name, d) for d in documents], ignore_index=True) for name in names}
    return AblationResults(manifest, **{"joint": pd.DataFrame(), **tables})


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if "ablation" in manifest["identity"]:
            return manifest
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: no ablation that can be read ({error!r})") from None
    raise ValueError(f"{folder}: no ablation (made by experiments/ablate_source.py)")


def _file(folder: Path, table: str, document: str) -> Path:
    return folder / table / f"{document}.parquet"


def _write(path: Path, frame: pd.DataFrame) -> None:
    write_atomically(path, lambda temporary: frame.to_parquet(temporary, index=False, compression="zstd"))


def _read(folder: Path, table: str, document: str) -> pd.DataFrame:
    path = _file(folder, table, document)
    try:
        return pd.read_parquet(path).assign(document=document)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path}: damaged; remove it and run again ({str(error).splitlines()[0]})") from error


def pool_of(source_layer: int | None, topk_blocks: int | None, block_size: int | None) -> Candidate | None:
    """The candidate pool of an attribution; None where no source layer is given.

    Raises:
        ValueError: one of the fields, but not all.
    """
    if source_layer is None and topk_blocks is None and block_size is None:
        return None
    if source_layer is None or topk_blocks is None or block_size is None:
        raise ValueError(
            f"attribution: source_layer={source_layer}, topk_blocks={topk_blocks}, block_size={block_size}: give all "
            "three, or null for all"
        )
    return Candidate(source_layer, topk_blocks, block_size)


def describe(ablation: Ablation, settings: Mapping[str, Any]) -> str:
    """What a run will compare, and the memory it keeps beside that of a plain measurement, from its settings alone."""
    from sparsity_lab.estimate import model_size

    length, rows = settings["data"]["length"], settings["measure"]["rows"]
    cells = len(ablation.cells("", 0))
    text = f"{cells} cells (pool size x block size x k) for every pair of layers"
    size = model_size(settings["model"]) if settings["model"].get("kind") != "recorded" else None
    if size is None or ablation.share != "layer":
        return f"{text}; memory unknown before the model is loaded (nothing was measured: dry_run=true)"
    layers = settings["measure"]["layers"]
    count = size.layers if layers is None else len(layers)
    pairs, triples = math.comb(count, 2), math.comb(count + 1, 3)
    kept = kept_bytes(ablation, count, min(rows or length, length), length)
    joint = [f"{positions} in blocks of {block}" for positions, block in ablation.joint_pools]
    reused = f", {triples} triples in pools of {', '.join(joint)}" if joint else ""
    return (
        f"{text}: {pairs} pairs{reused}; {kept / 2**20:.1f} MiB kept between layers "
        "(nothing was measured: dry_run=true)"
    )
