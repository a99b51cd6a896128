"""Results: exact tallies per (cell, document, layer, bucket), what they describe, and the averages made from them.

A results folder holds

    manifest.json    what was measured: configuration, cells, documents, versions, device, git state, seed
    tallies.parquet  the tallies (columns: see TALLY_COLUMNS)
    summary.csv      a row a cell and layer, with 95 % intervals
    status           running, complete, or failed and why
    parts/           tallies of documents measured since tallies.parquet was last written

Cells and documents are added, never overwritten: running again computes what is missing.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from sparsity_lab.metrics import METRICS

SCHEMA = 1
KINDS = {None: "measurements of experiments/recall.py", "evaluation": "an evaluation of experiments/evaluate.py"}
KEYS = ["cell_id", "document", "layer", "bucket"]
ORDER = (
    "model",
    "data",
    "scorer",
    "share",
    "compress_ratio",
    "candidate_source_layer",
    "candidate_block_size",
    "candidate_topk_blocks",
    "window",
    "sinks",
    "exclude_window",
    "topk",
)
TALLY_COLUMNS = {
    "cell_id": pa.string(),  # see cells.cell_id
    "document": pa.string(),  # Document.id, a hash of its tokens
    "document_index": pa.int64(),  # place of the document in its source
    "layer": pa.int32(),
    "bucket": pa.int64(),  # rows with bucket <= s < 2 * bucket (row 0 is in bucket 1)
    "rows": pa.int64(),  # (row, group) pairs that count in averages: more visible than k
    "saturated": pa.int64(),  # pairs with 0 < visible <= k: everything is selected, left out of averages
    "empty": pa.int64(),  # pairs with nothing visible
    **{f"{name}_sum": pa.float64() for name in METRICS},  # sum over the pairs where the metric is defined
    **{f"{name}_n": pa.int64() for name in METRICS},  # how many those are
}
TALLY_SCHEMA = pa.schema(TALLY_COLUMNS.items())


class ResultsError(ValueError):
    """A results folder that cannot be read or does not hold what was asked for."""


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Write through a temporary file in the same folder, fsync, rename: the file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """`write_atomically` for text."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_table(table: pd.DataFrame, path: Path) -> None:
    """`write_atomically` for a CSV table, six significant digits."""
    write_atomically(path, lambda temporary: table.to_csv(temporary, index=False, float_format="%.6g"))


def tally_frame(columns: Mapping[str, Any]) -> pd.DataFrame:
    """Columns of a tally as a frame in the documented column order and types."""
    return pa.table({name: columns[name] for name in TALLY_COLUMNS}, schema=TALLY_SCHEMA).to_pandas()


def tally_files(folder: Path) -> list[Path]:
    """Every file of tallies in a results folder, the parts first: one may be folded into the last file meanwhile."""
    whole = folder / "tallies.parquet"
    return [*sorted((folder / "parts").glob("*.parquet")), *([whole] if whole.exists() else [])]


def read_tallies(path: Path) -> pd.DataFrame:
    """Read one parquet file of tallies.

    Raises:
        ResultsError: damaged, or another program's or version's file; the message names the file.
    """
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ResultsError(f"{path}: damaged or not a parquet file ({str(error).splitlines()[0]})") from error
    if not table.schema.equals(TALLY_SCHEMA):
        missing = sorted(set(TALLY_SCHEMA.names) ^ set(table.schema.names))
        raise ResultsError(f"{path}: not tallies of this version (columns that differ: {missing or 'their types'})")
    return table.to_pandas()


def write_tallies(path: Path, frame: pd.DataFrame) -> None:
    """Write tallies in a fixed order, so equal tallies are equal bytes."""
    ordered = frame.sort_values(KEYS, ignore_index=True)
    table = pa.Table.from_pandas(ordered, schema=TALLY_SCHEMA, preserve_index=False).replace_schema_metadata(None)
    write_atomically(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))


class Results:
    """Tallies with the description of their cells."""

    def __init__(
        self, tallies: pd.DataFrame, cells: Mapping[str, Mapping[str, Any]], manifest: Mapping[str, Any]
    ) -> None:
        self.tallies = tallies
        self.cells = {key: dict(value) for key, value in cells.items()}
        self.manifest = dict(manifest)

    def cell_frame(self) -> pd.DataFrame:
        """One row a cell: its id and every field of its scorer, selection, model and data."""
        frame = pd.DataFrame([{"cell_id": key, **value} for key, value in self.cells.items()])
        frame = frame[
            [c for c in ("cell_id", *ORDER) if c in frame] + [c for c in frame if c not in ("cell_id", *ORDER)]
        ]
        pool = [name for name in frame.columns if str(name).startswith("candidate_")]
        return frame.astype(dict.fromkeys(pool, "Int64"))

    def only(self, cells: Iterable[str], documents: Iterable[str] | None = None) -> Results:
        """Just these cells (ids) and, if given, these documents (ids)."""
        kept = {key: self.cells[key] for key in cells if key in self.cells}
        rows = self.tallies["cell_id"].isin(set(kept))
        if documents is not None:
            rows &= self.tallies["document"].isin(set(documents))
        return Results(self.tallies[rows].reset_index(drop=True), kept, self.manifest)

    def per_document(self, by: Sequence[str] = ("layer",)) -> pd.DataFrame:
        """Average of every metric within each document over its rows, per cell and `by` (layer, bucket)."""
        keys = ["cell_id", *by, "document"]
        sums = self.tallies.groupby(keys, sort=True).sum(numeric_only=True)
        out = sums[["rows", "saturated", "empty"]].copy()
        for name in METRICS:
            out[name] = sums[f"{name}_sum"] / sums[f"{name}_n"].where(sums[f"{name}_n"] > 0)
        return out.reset_index()

    def frame(
        self,
        by: Sequence[str] = ("layer",),
        *,
        resamples: int = 1000,
        seed: int = 0,
        intervals: Sequence[str] = METRICS,
    ) -> pd.DataFrame:
        """Tidy table: a row per cell and `by`, each metric as its mean over documents, `<metric>_low` and
        `<metric>_high` (95 % bootstrap interval over documents; NaN with a single document), the cell's fields, and
        rows / saturated / empty / documents.

        by=("layer",) or ("layer", "bucket") or (): with no layer, layers are averaged within each document first.
        intervals: the metrics that get theirs; few are much faster than all.
        """
        keys = ["cell_id", *by]
        per_document = self.per_document(by if "layer" in by else [*by, "layer"])
        if "layer" not in by:
            within = per_document.groupby([*keys, "document"], sort=True)
            counts = within[["rows", "saturated", "empty"]].sum()
            per_document = within[list(METRICS)].mean().join(counts).reset_index()
        if per_document.empty:
            return pd.DataFrame()
        wide = per_document.pivot(index=keys, columns="document", values=list(METRICS))
        values = wide.to_numpy(dtype=float).reshape(len(wide), len(METRICS), -1)
        with_interval = [name in intervals for name in METRICS]
        low, high = np.full((2, *values.shape[:2]), np.nan)
        low[:, with_interval], high[:, with_interval] = bootstrap_interval(values[:, with_interval], resamples, seed)
        out = per_document.groupby(keys, sort=True)[["rows", "saturated", "empty"]].sum()
        out["documents"] = per_document.groupby(keys, sort=True).size()
        for i, name in enumerate(METRICS):
            out[name] = mean_of_defined(values[:, i])
            out[f"{name}_low"], out[f"{name}_high"] = low[:, i], high[:, i]
        table = self.cell_frame().merge(out.reset_index(), on="cell_id")
        return table.sort_values([c for c in (*ORDER, *by) if c in table], ignore_index=True)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write (or extend) a results folder."""
        store = Store(Path(folder), self.manifest)
        store.register(self.cells)
        store.add(self.tallies)
        store.finish()
        return store.folder


def mean_of_defined(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis, leaving NaN out; NaN where nothing is defined."""
    defined = np.isfinite(values)
    total = np.where(defined, values, 0.0).sum(-1)
    return np.divide(total, defined.sum(-1), out=np.full(total.shape, np.nan), where=defined.any(-1))


def resampled(documents: int, resamples: int, seed: int) -> np.ndarray:
    """How often each document is drawn in each bootstrap sample, float64 [resamples, documents]."""
    picks = np.random.default_rng(seed).integers(documents, size=(resamples, documents))
    return np.stack([np.bincount(row, minlength=documents) for row in picks]).astype(float)


def bootstrap_interval(values: np.ndarray, resamples: int = 1000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """95 % percentile interval of the mean over documents, [..., documents] -> low and high [...].

    Documents are resampled, not rows: rows of one document are not independent. NaN (undefined) values are left out of
    each mean; where fewer than two documents are defined there is no interval (NaN).
    """
    flat = values.reshape(-1, values.shape[-1])
    documents = flat.shape[1]
    times = resampled(documents, resamples, seed)
    low, high = np.full(len(flat), np.nan), np.full(len(flat), np.nan)
    some = np.flatnonzero(np.isfinite(flat).sum(1) >= 2)
    for part in np.array_split(some, max(1, len(some) // 2000)):  # bounds memory at resamples x 2000
        defined = np.isfinite(flat[part])
        weight = defined @ times.T
        sums = np.where(defined, flat[part], 0.0) @ times.T
        means = np.divide(sums, weight, out=np.full(sums.shape, np.nan), where=weight > 0)
        if len(part):
            percentile = np.nanpercentile if np.isnan(means).any() else np.percentile  # the former is far slower
            low[part], high[part] = percentile(means, [2.5, 97.5], axis=1)
    return low.reshape(values.shape[:-1]), high.reshape(values.shape[:-1])


class Store:
    """A results folder being filled. Every write is atomic; several processes may fill one folder."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder = folder
        self.manifest = dict(manifest)
        self.lock = FileLock(str(folder / ".lock"))
        folder.mkdir(parents=True, exist_ok=True)
        self.damaged: list[str] = []

    def register(self, cells: Mapping[str, Mapping[str, Any]], failed: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write the manifest with these cells added to those it has, and set the status to running."""
        with self.lock:
            there = (self.folder / "manifest.json").exists()
            old = read_manifest(self.folder, self.manifest.get("kind")) if there else {}
            merged = {**old, **self.manifest, "schema": SCHEMA}
            merged["cells"] = dict(sorted({**old.get("cells", {}), **cells}.items()))
            merged["scorers"] = {**old.get("scorers", {}), **self.manifest.get("scorers", {})}
            all_failed = [*old.get("failed_cells", []), *failed]
            merged["failed_cells"] = list({json.dumps(f, sort_keys=True): dict(f) for f in all_failed}.values())
            write_text(self.folder / "manifest.json", json.dumps(merged, indent=1, sort_keys=True) + "\n")
            self.set_status("running")

    def set_status(self, status: str) -> None:
        """running, complete, or failed: reason."""
        write_text(self.folder / "status", status + "\n")

    def tallies(self) -> pd.DataFrame:
        """Everything measured so far. A damaged file is set aside, named in `damaged`, and so computed again."""
        frames = []
        for path in tally_files(self.folder):
            try:
                frames.append(read_tallies(path))
            except ResultsError as error:
                self.damaged.append(str(error))
                path.replace(path.with_suffix(".damaged"))
        return merge(frames)

    def done(self) -> set[tuple[str, str]]:
        """(cell id, document id) pairs that need no computing."""
        with self.lock:  # else another process may fold a part in between its listing and its reading
            tallies = self.tallies()
        return set(zip(tallies["cell_id"], tallies["document"], strict=True))

    def add(self, tallies: pd.DataFrame) -> None:
        """Add one or more documents' tallies as a part of their own."""
        if tallies.empty:
            return
        name = f"{tallies['document'].iloc[0]}-{os.getpid()}-{os.urandom(4).hex()}.parquet"
        write_tallies(self.folder / "parts" / name, tallies)

    def finish(self, status: str = "complete") -> Results:
        """Fold the parts into tallies.parquet, write summary.csv and the status."""
        with self.lock:
            parts = sorted((self.folder / "parts").glob("*.parquet"))
            tallies = self.tallies()
            write_tallies(self.folder / "tallies.parquet", tallies)
            for part in parts:
                part.unlink(missing_ok=True)
            results = load(self.folder)
            write_table(results.frame(), self.folder / "summary.csv")
            self.set_status(status)
        return results


def merge(frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate tallies; a (cell, document, layer, bucket) measured twice counts once."""
    frames = [f for f in frames if not f.empty]
    if not frames:
        return TALLY_SCHEMA.empty_table().to_pandas()
    return pd.concat(frames, ignore_index=True).drop_duplicates(KEYS, ignore_index=True)


def read_manifest(folder: Path, kind: str | None = None) -> dict[str, Any]:
    """The manifest of a results folder of a kind (see KINDS).

    Raises:
        ResultsError: no such folder, no manifest, damaged, another schema version or kind.
    """
    path = Path(folder) / "manifest.json"
    if not path.exists():
        raise ResultsError(f"{folder}: no results here (no manifest.json)")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: damaged ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        found = manifest.get("schema") if isinstance(manifest, dict) else None
        raise ResultsError(f"{path}: schema={found}: this version reads schema {SCHEMA}")
    if (found := manifest.get("kind")) != kind:
        raise ResultsError(f"{folder}: holds {KINDS.get(found, found)}, not {KINDS[kind]}")
    return manifest


def load(folder: str | os.PathLike[str]) -> Results:
    """Read a results folder.

    Raises:
        ResultsError: nothing there, nothing measured yet, damaged or foreign files.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    tallies = _read_folder(folder)
    if tallies.empty:
        status = (folder / "status").read_text().strip() if (folder / "status").exists() else "unknown"
        raise ResultsError(f"{folder}: nothing measured yet (status: {status})")
    known = set(tallies["cell_id"])
    cells = {key: value for key, value in manifest["cells"].items() if key in known}
    lost = known - set(cells)
    if lost:
        raise ResultsError(f"{folder}: tallies of {len(lost)} cells that manifest.json does not describe")
    return Results(tallies, cells, manifest)


def _read_folder(folder: Path, attempts: int = 5) -> pd.DataFrame:
    """All tallies of a folder. A run may fold its parts while they are listed; vanished files are looked up again."""
    for attempt in range(attempts):
        paths = tally_files(folder)
        try:
            return merge([read_tallies(path) for path in paths])
        except ResultsError:
            if all(path.exists() for path in paths) or attempt == attempts - 1:
                raise
    raise AssertionError("unreachable")


def merge_results(parts: Sequence[Results]) -> Results:
    """Several results as one; what was measured twice counts once.

    Raises:
        ResultsError: nothing to merge.
    """
    if not parts:
        raise ResultsError("no results to merge")
    cells = {key: about for part in parts for key, about in part.cells.items()}
    return Results(merge(part.tallies for part in parts), cells, parts[0].manifest)


def collect(path: str | os.PathLike[str]) -> Results:
    """Merge every results folder at or below `path` that holds tallies, for example the shards of a run.

    Raises:
        ResultsError: none there, or one that cannot be read.
    """
    folders = sorted(manifest.parent for manifest in Path(path).rglob("manifest.json"))
    measured = [folder for folder in folders if tally_files(folder)]
    if not measured:
        begun = f"; begun but empty: {', '.join(map(str, folders))}" if folders else ""
        raise ResultsError(f"{path}: nothing measured here or below{begun}")
    return merge_results([load(folder) for folder in measured])
