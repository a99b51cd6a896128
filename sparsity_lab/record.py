"""Record what cells need of a model, once; `models.recorded.RecordedModel` then measures any cells without the model.

Per document and layer one safetensors file with the queries and outputs of the sampled rows, and the keys, values and
inputs of all tokens (layout: see `models.recorded`). Files are whole or not there, and `manifest.json` names a document
only when all its files are: stopping at any moment loses at most the document in work, and the same call goes on.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from sparsity_lab import __version__
from sparsity_lab.activations import LayerActivations, ObservableModel
from sparsity_lab.dense import row_tiles
from sparsity_lab.documents import Document, Documents
from sparsity_lab.measurement import Progress, check_dense, measured_layers, sample_rows
from sparsity_lab.models.recorded import (
    METADATA_KEY,
    SCHEMA,
    TOKENS,
    damage,
    digest,
    document_folder,
    layer_file,
    read_recording,
)
from sparsity_lab.models.sparse import SparseModel
from sparsity_lab.results import write_atomically, write_text

CHECKED_ROWS = 16  # rows a layer on which the attention is rebuilt and compared with the model's own
PROBE_TOKENS = 8  # tokens of the short forward that tells the shapes


def record(
    model: ObservableModel,
    documents: Documents,
    folder: str | os.PathLike[str],
    *,
    layers: Sequence[int] | None = None,
    rows: int | None = 128,
    seed: int = 0,
    values: bool = True,
    inputs: bool = True,
    config: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Record a model on documents into `folder`, with one forward a document.

    The size is said before anything is written. What the folder holds already and is sound is not recorded again;
    several processes may fill one folder with different shards of the documents.

    Args:
        layers: attention layers (None = all); sliding-window layers shorter than the documents are left out.
        rows: query rows a document, the sample that `measure` takes with the same `seed` (None = all).
        values: keep v and the attention output, which measure.detail_rows needs; inputs: keep x, which
            scorer=lightning needs.
        config: put into the manifest as it is. dry_run: say the size and stop, nothing is written.
    Raises:
        ValueError: bad options, a folder with another recording, or too little disk space.
        CheckError: the model's attention is none that sparsity_lab knows.
    """
    header = describe(model, documents, layers=layers, rows=rows, seed=seed, values=values, inputs=inputs)
    recording = Recording(Path(folder), header, dict(config or {}))
    recording.check_same()
    sizes = file_sizes(model, documents[0], header)
    todo: dict[str, tuple[Document, list[str]]] = {}
    for document in documents:
        names, troubles = recording.missing(document.id, list(sizes))
        for trouble in troubles:
            say(f"recorded again: {trouble}")
        if names:
            todo.setdefault(document.id, (document, names))
    files = [name for _, names in todo.values() for name in names]
    needed = sum(sizes[name] for name in files)
    whole = sum(sizes.values())
    say(f"{model.name}: {amount(whole)} a document, {amount(whole * len(documents))} for all {len(documents)}")
    say(f"to be written: {amount(needed)} for {len(todo)} of them")
    if dry_run:
        return recording.folder
    check_space(recording.folder, needed + 4096 * len(files))
    recording.create()
    steps = [0, sum(name != TOKENS for name in files)]

    def step() -> None:
        steps[0] += 1
        if progress is not None:
            progress(steps[0], steps[1])

    for document, _ in todo.values():
        recording.add(model, document, list(sizes), step)
    return recording.folder


def describe(
    model: ObservableModel,
    documents: Documents,
    *,
    layers: Sequence[int] | None,
    rows: int | None,
    seed: int,
    values: bool,
    inputs: bool,
) -> dict[str, Any]:
    """What a recording is of: the part of its manifest that stays the same while documents are added.

    Raises:
        ValueError: no documents, documents too long for the model, layers it does not have, rows below 1, a model with
            sparse attention of its own.
    """
    if model.native is not None:
        raise ValueError(
            f"model={model.name}: has sparse attention of its own, of which a recording would hold neither compressed "
            "keys nor index scores; measure it live with experiments/recall.py"
        )
    if isinstance(model, SparseModel):
        raise ValueError(
            "model.attention=sparse: a recording would not hold what its outputs attend to; measure it live with "
            "experiments/recall.py"
        )
    if not len(documents):
        raise ValueError("data: no documents to record")
    length = int(documents[0].tokens.numel())
    if model.max_length is not None and length > model.max_length:
        raise ValueError(f"data.length={length}: {model.name} was made for at most {model.max_length} positions")
    if rows is not None and rows < 1:
        raise ValueError(f"record.rows={rows}: must be at least 1, or null for all rows")
    try:
        kept, _ = measured_layers(model, length, layers)
    except ValueError as error:
        raise ValueError(str(error).replace("measure.layers", "record.layers")) from error
    about = {
        name: getattr(model, name)
        for name in ("name", "fingerprint", "attention", "num_layers", "num_heads", "num_kv_heads")
    }
    about |= {"hidden_size": model.hidden_size, "max_length": model.max_length}
    about |= {"dtype": str(model.dtype).removeprefix("torch."), "windows": model.windows()}
    header = {
        "recording_schema": SCHEMA,
        "model": about,
        "device": model.device.type,
        "data": documents.source,
        "rows": rows,
        "seed": seed,
        "layers": kept,
        "values": values,
        "inputs": inputs,
    }
    return json.loads(json.dumps(header))


def file_sizes(model: ObservableModel, document: Document, header: Mapping[str, Any]) -> dict[str, int]:
    """File of a document -> bytes of its tensors, from a forward over a few tokens; headers add about 1 KB a file."""
    length = document.tokens.numel()
    kept = len(sample_rows(length, header["rows"], header["seed"], document.id))
    sizes = {TOKENS: 8 * length}

    def observe(acts: LayerActivations) -> None:
        per_row = [acts.q, acts.output] if header["values"] else [acts.q]
        per_token = [acts.k, *([acts.v] if header["values"] else []), *([acts.x] if header["inputs"] else [])]
        size = 8 * kept + (0 if acts.sink is None else acts.sink.nbytes)
        size += kept * sum(t.nbytes for t in per_row) // acts.q.shape[2]
        sizes[layer_file(acts.layer)] = size + length * sum(t.nbytes for t in per_token) // acts.k.shape[2]

    model.observe(document.tokens[:PROBE_TOKENS].unsqueeze(0), observe, header["layers"])
    return sizes


def check_space(folder: Path, needed: int) -> None:
    """Raise ValueError when the disk of `folder` has fewer than `needed` bytes left."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ValueError(f"record.folder={folder}: needs {amount(needed)}, but only {amount(free)} are free there")


def amount(size: int) -> str:
    """Bytes for people: 1.23 GB (1,234,567,890 bytes)."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.2f} {unit} ({size:,} bytes)"
    return f"{size} bytes"


class Recording:
    """A recording being filled."""

    def __init__(self, folder: Path, header: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self.folder, self.header, self.config = folder, header, config

    @property
    def started(self) -> bool:
        return (self.folder / "manifest.json").exists()

    def check_same(self) -> None:
        """Raise ValueError when the folder holds a recording of something else, or made otherwise."""
        if not self.started:
            return
        found = read_recording(self.folder)
        for key, value in self.header.items():
            if found[key] != value:
                raise ValueError(
                    f"record.folder={self.folder}: holds a recording with {key}={found[key]}, not {key}={value}; "
                    "give another folder"
                )

    def create(self) -> None:
        """Write a manifest without documents unless there is one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(str(self.folder / ".lock")):
            self.check_same()
            if not self.started:
                self._write({**self.header, "versions": versions(), "config": self.config, "documents": {}})

    def _write(self, manifest: Mapping[str, Any]) -> None:
        write_text(self.folder / "manifest.json", json.dumps(manifest, indent=1, sort_keys=True) + "\n")

    def missing(self, document: str, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """(files of a document that must be written, what is wrong with those of them that were there)."""
        entry = read_recording(self.folder)["documents"].get(document) if self.started else None
        if entry is None:
            return list(names), []
        where = document_folder(self.folder, document)
        found = {name: damage(where / name, entry["files"][name]) for name in names}
        troubles = {name: trouble for name, trouble in found.items() if trouble}
        return list(troubles), list(troubles.values())

    def add(self, model: ObservableModel, document: Document, names: Sequence[str], step: Callable[[], None]) -> None:
        """Record what is missing of a document, then name it in the manifest; `step` is called after each layer."""
        where = document_folder(self.folder, document.id)
        where.mkdir(parents=True, exist_ok=True)
        with FileLock(str(where / ".lock")):
            todo, _ = self.missing(document.id, names)  # again: another process may have recorded it meanwhile
            for stale in where.glob(".*.*"):  # temporary files of a killed process
                stale.unlink()
            files = {}
            if TOKENS in todo:
                array = document.tokens.numpy().astype("<i8")
                files[TOKENS] = _write_file(where / TOKENS, lambda temporary: _save_tokens(temporary, array))
            layers = [layer for layer in self.header["layers"] if layer_file(layer) in todo]
            rows = sample_rows(document.tokens.numel(), self.header["rows"], self.header["seed"], document.id)
            rows = rows.to(model.device)

            def observe(acts: LayerActivations) -> None:
                files[layer_file(acts.layer)] = self._write_layer(where, acts, rows, document.id, model.dtype)
                step()

            if layers:
                model.observe(document.tokens.unsqueeze(0), observe, layers)
            self._enter(document, files)

    def _write_layer(
        self, where: Path, acts: LayerActivations, rows: Tensor, document: str, dtype: torch.dtype
    ) -> dict[str, Any]:
        from safetensors.torch import save_file

        some = rows.flip(0)[:: -(-len(rows) // CHECKED_ROWS)].flip(0)  # spread, with the last
        check_dense(next(row_tiles(acts, some, CHECKED_ROWS, document, self.header["seed"])), dtype)
        tensors = {"q": acts.query_rows(rows), "k": acts.k[0], "rows": rows}
        if self.header["values"]:
            tensors |= {"v": acts.v[0], "output": acts.output_rows(rows)}
        if self.header["inputs"]:
            tensors["x"] = acts.x[0]
        if acts.sink is not None:
            tensors["sink"] = acts.sink
        # copies: safetensors takes neither views nor tensors that share memory
        packed = {k: t.detach().cpu().clone(memory_format=torch.contiguous_format) for k, t in tensors.items()}
        about = {name: getattr(acts, name) for name in ("layer", "scale", "softcap", "window")} | {"document": document}
        metadata = {METADATA_KEY: json.dumps(about, sort_keys=True)}
        path = where / layer_file(acts.layer)
        return _write_file(path, lambda temporary: save_file(packed, temporary, metadata=metadata))

    def _enter(self, document: Document, files: Mapping[str, Any]) -> None:
        with FileLock(str(self.folder / ".lock")):
            manifest = read_recording(self.folder)
            entry = manifest["documents"].setdefault(document.id, {"files": {}})
            entry |= {"index": document.index, "name": document.name, "files": {**entry["files"], **files}}
            self._write(manifest)


def _write_file(path: Path, write: Callable[[Path], Any]) -> dict[str, Any]:
    """`write_atomically`, and what the manifest says of the file: its bytes and sha256."""
    known: dict[str, Any] = {}

    def write_and_measure(temporary: Path) -> None:
        write(temporary)
        known.update(bytes=temporary.stat().st_size, sha256=digest(temporary))

    write_atomically(path, write_and_measure)
    return known


def _save_tokens(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:  # np.save would append .npy to a name
        np.save(file, array, allow_pickle=False)


def versions() -> dict[str, str]:
    """Versions that made a recording."""
    libraries = {name: version(name) for name in ("torch", "transformers", "safetensors", "numpy")}
    return {"sparsity_lab": __version__, "python": platform.python_version(), **libraries}
