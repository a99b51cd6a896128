"""Any results folder, whichever experiment wrote it.

load("results/recall/smollm2-pydoc-2048").frame()      # `results.Results`
load("results/ablate_source/...").frame("reuse")       # `ablation_run.AblationResults`
load("results/distill/smollm2").frame()                # `Tables`
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sparsity_lab import results
from sparsity_lab.compare import POOL
from sparsity_lab.results import Results, ResultsError, merge_results
from sparsity_lab.shape import caveats

CELL_FIELDS: dict[str, Any] = {"scorer": str, "scorer_options": (dict, type(None)), "compress_ratio": int, "topk": int}
SHOWN = 3  # folders named in a message
MADE_BY = {
    "measurement": "recall.py",
    "ablation": "ablate_source.py",
    "distillation": "distill.py",
    "pretraining": "pretrain.py",
    "evaluation": "evaluate.py",
    "search": "search_sources.py",
}


@dataclass(frozen=True)
class Tables:
    """What a folder holds as CSV files, by name."""

    manifest: dict[str, Any]
    tables: dict[str, pd.DataFrame]

    def frame(self, name: str | None = None) -> pd.DataFrame:
        """One of the tables, the first by default.

        Raises:
            ValueError: no such table.
        """
        if name is not None and name not in self.tables:
            raise ValueError(f"table={name!r}: must be one of {', '.join(self.tables)}")
        return self.tables[name or next(iter(self.tables))]


def load(folder: str | os.PathLike[str]) -> Any:
    """Read a results folder: cells as `Results`, an ablation of sources as `AblationResults`, an evaluation as
    `EvaluationResults`; a distillation, a pretraining or a search of sources as `Tables`. All have `manifest` and
    `frame()`.

    Raises:
        ValueError: nothing there, nothing measured yet, damaged, foreign or of another version, by its path.
    """
    return _reader(Path(folder))[1](Path(folder))


def load_kind(folder: str | os.PathLike[str], kind: str) -> Any:
    """`load`, of one kind, a key of MADE_BY.

    Raises:
        ValueError: another kind; see also `load`.
    """
    found, read = _reader(Path(folder))
    if found != kind:
        raise ResultsError(f"{folder}: holds {_named(found)}; this needs {_named(kind)}")
    return read(Path(folder))


def load_measurements(folders: Sequence[str | os.PathLike[str]]) -> Results:
    """Measured cells of one or several folders, merged."""
    return merge_results([load_kind(folder, "measurement") for folder in folders])


def notes(folder: str | os.PathLike[str]) -> list[str]:
    """What a reader of the folder's figures should know: an unfinished or failed run, failed cells, weights used beyond
    the length they were distilled on."""
    path = Path(folder)
    out = []
    status = (path / "status").read_text(encoding="utf-8").strip() if (path / "status").is_file() else "complete"
    if status != "complete":
        out.append(f"{path}: {status}; shown is what was measured so far")
    manifest = _manifest(path) if (path / "manifest.json").is_file() else {}
    failed = manifest.get("failed_cells")
    if isinstance(failed, list) and failed:
        first = failed[0].get("reason", "unknown") if isinstance(failed[0], dict) else "unknown"
        out.append(f"{path}: {len(failed)} failed cell{'s' * (len(failed) > 1)} (the first: {first})")
    if isinstance(cells := manifest.get("cells"), dict):
        out += [f"{path}: {caveat}" for caveat in caveats(manifest, cells.values())]
    return out


def _reader(folder: Path) -> tuple[str, Callable[[Path], Any]]:
    """What a folder holds and what reads it."""
    if not (folder / "manifest.json").is_file() and (folder / "placements.csv").is_file():
        return "search", _search
    manifest = _manifest(folder)
    identity = manifest.get("identity")
    identity = identity if isinstance(identity, dict) else {}
    if manifest.get("kind") == "evaluation":
        return "evaluation", _evaluation
    if "ablation" in identity:
        return "ablation", _ablation
    if "recipe" in identity and "indexer" in identity:
        return "distillation", _distillation
    if "recipe" in identity and "world" in identity:
        return "pretraining", _pretraining
    if "cells" in manifest:
        return "measurement", _measurement
    if "recording_schema" in manifest:
        raise ResultsError(f"{folder}: a recording of a model, not results; measure it with model=recorded")
    raise ResultsError(f"{folder}: manifest.json is of none of the experiments ({', '.join(MADE_BY.values())})")


def _named(kind: str) -> str:
    article = "an" if kind[0] in "ae" else "a"
    return f"{article} {kind} (experiments/{MADE_BY[kind]})"


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if not path.is_file():
        below = sorted(str(found.parent) for found in folder.rglob("manifest.json"))
        more = f" and {len(below) - SHOWN} more" if len(below) > SHOWN else ""
        hint = f"; there are some in {', '.join(below[:SHOWN])}{more}" if below else ""
        raise ResultsError(f"{folder}: no results here (no manifest.json){hint}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ResultsError(f"{path}: damaged ({error})") from error
    if not isinstance(manifest, dict):
        raise ResultsError(f"{path}: not a manifest of sparsity_lab")
    return manifest


def _measurement(folder: Path) -> Results:
    path, cells = folder / "manifest.json", _manifest(folder)["cells"]
    results.read_manifest(folder)  # checks the schema first: an older one may describe its cells otherwise
    if not isinstance(cells, dict) or not all(isinstance(cell, dict) for cell in cells.values()):
        raise ResultsError(f"{path}: cells must be described by their ids")
    for key, cell in cells.items():
        wrong = [name for name, kind in CELL_FIELDS.items() if not isinstance(cell.get(name, ...), kind)]
        if wrong := [*wrong, *(name for name in POOL if name not in cell)]:
            raise ResultsError(f"{path}: cell {key} has no proper {', '.join(wrong)}; was another program here?")
    return results.load(folder)


def _ablation(folder: Path) -> Any:
    from sparsity_lab import ablation, ablation_run, attribution

    try:
        found = ablation_run.load(folder)
    except (TypeError, KeyError) as error:
        raise ResultsError(f"{folder}: an ablation that another version wrote ({error})") from error
    means = {"source": ablation.SOURCE_METRICS, "reuse": ablation.REUSE_METRICS}
    keys = {"source": ablation.SOURCE_KEYS, "reuse": ablation.REUSE_KEYS, "attribution": ("layer", "topk", "n")}
    for name, first in keys.items():
        wanted = {*first, *(f"{m}_{end}" for m in means.get(name, ()) for end in ("sum", "n"))}
        wanted |= {f"{step}_sum" for step in attribution.STEPS} if name == "attribution" else set()
        if lacking := sorted(wanted - set(getattr(found, name))):
            raise ResultsError(f"{folder}/{name}: not tables of this version (no {', '.join(lacking)})")
    return found


def _evaluation(folder: Path) -> Any:
    from sparsity_lab.evaluation.summary import load as load_evaluation

    return load_evaluation(folder)


def _distillation(folder: Path) -> Tables:
    from sparsity_lab.figures.training import training_table

    if not (folder / "training.csv").is_file():
        raise ResultsError(f"{folder}: a distillation without training.csv: nothing was evaluated yet")
    return Tables(_manifest(folder), {"training": training_table([folder])})


def _pretraining(folder: Path) -> Tables:
    tables = {
        name: _csv(folder / f"{name}.csv") for name in ("training", "losses") if (folder / f"{name}.csv").is_file()
    }
    if not tables:
        raise ResultsError(f"{folder}: a pretraining without training.csv: nothing was evaluated yet")
    return Tables(_manifest(folder), tables)


def _search(folder: Path) -> Tables:
    return Tables({}, {"placements": _csv(folder / "placements.csv")})


def _csv(path: Path) -> pd.DataFrame:
    try:
        return pd.read_csv(path)
    except ValueError as error:
        raise ResultsError(f"{path}: damaged ({error})") from error
