"""What an evaluation leaves in its folder:

    manifest.json       what was evaluated: configuration, cells, documents, versions, device, git state
    likelihood.parquet  sums over rows by cell, document, position bucket and whether the selection could leave
                        something out there
    layers.parquet      error of the attention output by cell, document and layer
    retrieval.parquet   a row a cell and task: what was generated dense and sparse, scores, where a miss was lost
    traces.parquet      by cell, task and layer: what the selection held of the needle
    harness.parquet     results of lm-evaluation-harness tasks, dense and by cell
    summary.csv         a row a cell, with 95 % intervals;  by_layer.csv, by_task.csv, by_harness.csv: by layer, kind
                        of task, task of the harness; written when a run ends or is interrupted
    status              running, complete, interrupted and how much is finished, or failed and why
    parts/              what was measured since the tables were last written

Cells, documents and tasks are added, never overwritten: running again computes what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from sparsity_lab.results import ResultsError, Store, write_atomically

_DOCUMENT = {"cell_id": pa.string(), "document": pa.string(), "document_index": pa.int64()}
COLUMNS: dict[str, dict[str, pa.DataType]] = {
    "layers": {**_DOCUMENT, "layer": pa.int32(), "output_error": pa.float64()},
    "likelihood": {
        **_DOCUMENT,
        "bucket": pa.int64(),  # rows with bucket <= s < 2 * bucket (row 0 is in bucket 1)
        "selective": pa.bool_(),  # the selection may leave something out at these rows
        "rows": pa.int64(),
        "dense_loss_sum": pa.float64(),  # nats
        "loss_sum": pa.float64(),
        "kl_sum": pa.float64(),  # KL(dense || sparse), nats
        "agreement_sum": pa.float64(),  # rows whose likeliest token is the same
    },
    "traces": {
        "cell_id": pa.string(),
        "task": pa.string(),
        "layer": pa.int32(),
        "in_pool": pa.float64(),  # shares of the needle's tokens, mean over the answer's rows
        "in_selection": pa.float64(),
        "attended": pa.float64(),  # in selection or window
        "dense_mass": pa.float64(),  # of the dense model's attention, on the needle
        "pool_lost": pa.float64(),  # of it, not attended because of ...
        "scorer_lost": pa.float64(),
        "reuse_lost": pa.float64(),
    },
    "retrieval": {
        "cell_id": pa.string(),
        "task": pa.string(),
        "document": pa.string(),
        "document_index": pa.int64(),
        "kind": pa.string(),
        "task_length": pa.int64(),  # tokens of prompt and generation at most
        "depth": pa.float64(),
        "answers": pa.string(),
        "dense_text": pa.string(),
        "text": pa.string(),
        "dense_score": pa.float64(),  # share of the answers that were found
        "score": pa.float64(),
        "stage": pa.string(),  # found, or where the needle was lost: see retrieval.stage
        "in_pool": pa.float64(),  # mean over the layers with a selection; see traces
        "in_selection": pa.float64(),
        "attended": pa.float64(),
        "kept_mass": pa.float64(),  # share of the dense mass on the needle that was attended, over these layers
    },
    "harness": {
        "cell_id": pa.string(),
        "task": pa.string(),
        "metric": pa.string(),
        "dense": pa.float64(),
        "value": pa.float64(),
        "items": pa.int64(),
    },
}
SCHEMAS = {name: pa.schema(columns.items()) for name, columns in COLUMNS.items()}
KEYS = {
    "layers": ["cell_id", "document", "layer"],
    "likelihood": ["cell_id", "document", "bucket", "selective"],
    "traces": ["cell_id", "task", "layer"],
    "retrieval": ["cell_id", "task"],
    "harness": ["cell_id", "task", "metric"],
}
Rows = Sequence[Mapping[str, Any]]


class EvaluationStore:
    """An evaluation's folder being filled. Every write is atomic; several processes may fill one folder."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder = folder
        self._store = Store(folder, {**manifest, "kind": "evaluation"})
        self.damaged: list[str] = []

    def register(self, cells: Mapping[str, Mapping[str, Any]], failed: Rows = ()) -> None:
        """Add cells, and those that could not be evaluated with their `reason`, to the manifest."""
        self._store.register(cells, failed)

    def set_status(self, status: str) -> None:
        """running, complete, or failed: reason."""
        self._store.set_status(status)

    def done(self, table: str, item: str) -> set[tuple[str, str]]:
        """(cell id, `item`) pairs in a table: those that need no computing. Damaged files are set aside."""
        with self._store.lock:
            frame = self._table(table)
        return set(zip(frame["cell_id"], frame[item], strict=True))

    def add(self, tables: Mapping[str, Rows]) -> None:
        """Add rows, table by table in the given order: put last what tells that the others are there."""
        for name, rows in tables.items():
            if rows:
                whole = {column: [row[column] for row in rows] for column in COLUMNS[name]}
                _write(self._parts(name) / f"{os.getpid()}-{os.urandom(6).hex()}.parquet", name, pd.DataFrame(whole))

    def finish(self, status: str = "complete") -> None:
        """Fold the parts into the tables and set the status."""
        with self._store.lock:
            for name in COLUMNS:
                parts = _files(self.folder, name)[:-1]
                frame = self._table(name)
                if not frame.empty:
                    _write(self.folder / f"{name}.parquet", name, frame.sort_values(KEYS[name], ignore_index=True))
                for part in parts:
                    part.unlink(missing_ok=True)
            self.set_status(status)

    def _parts(self, name: str) -> Path:
        return self.folder / "parts" / name

    def _table(self, name: str) -> pd.DataFrame:
        frames = []
        for path in _files(self.folder, name):
            if not path.exists():
                continue
            try:
                frames.append(_read(path, name))
            except ResultsError as error:
                self.damaged.append(str(error))
                path.replace(path.with_suffix(".damaged"))
        return _merged(name, frames)


def _files(folder: Path, name: str) -> list[Path]:
    """Every file of a table, the parts first: one may be folded into the last meanwhile."""
    return [*sorted((folder / "parts" / name).glob("*.parquet")), folder / f"{name}.parquet"]


def _read(path: Path, name: str) -> pd.DataFrame:
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ResultsError(f"{path}: damaged or not a parquet file ({str(error).splitlines()[0]})") from error
    if not table.schema.equals(SCHEMAS[name]):
        raise ResultsError(f"{path}: not the {name} of an evaluation of this version")
    return table.to_pandas()


def _write(path: Path, name: str, frame: pd.DataFrame) -> None:
    table = pa.Table.from_pandas(frame, schema=SCHEMAS[name], preserve_index=False).replace_schema_metadata(None)
    write_atomically(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))


def _merged(name: str, frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Concatenated; what was measured twice counts once."""
    frames = [frame for frame in frames if not frame.empty]
    if not frames:
        return SCHEMAS[name].empty_table().to_pandas()
    return pd.concat(frames, ignore_index=True).drop_duplicates(KEYS[name], ignore_index=True)


def read_tables(folder: Path, attempts: int = 5) -> dict[str, pd.DataFrame]:
    """All tables of a folder. A run may fold its parts while they are listed; vanished files are looked up again.

    Raises:
        ResultsError: a file that cannot be read.
    """
    for attempt in range(attempts):
        files = {name: [path for path in _files(folder, name) if path.exists()] for name in COLUMNS}
        try:
            return {name: _merged(name, [_read(path, name) for path in paths]) for name, paths in files.items()}
        except ResultsError:
            if all(path.exists() for paths in files.values() for path in paths) or attempt == attempts - 1:
                raise
    raise AssertionError("unreachable")
