"""A model replayed from what `sparsity_lab.record` saved of it: its attention can be measured without it.

A recording is a folder with

    manifest.json   what was recorded (see `record.describe`), versions, config; documents: id -> index, name, files
    documents/<id>/tokens.npy   the document's tokens, int64 [t]
    documents/<id>/layer-<i>.safetensors
        q [h, R, d], k [k, t, d], rows int64 [R] (absolute positions, ascending); with `values` v [k, t, dv] and
        output [R, h, dv]; with `inputs` x [t, dim]; sink [h] where the layer has one. All in the model's own dtype.
        Under the metadata key `sparsity_lab_recording` a JSON object with layer, document, scale, softcap and window.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsity_lab.activations import LayerActivations, LeftOut, Observer
from sparsity_lab.documents import Document, Documents
from sparsity_lab.models.loading import resolve_device
from sparsity_lab.topology import NativeSelection

SCHEMA = 1
METADATA_KEY = "sparsity_lab_recording"
TOKENS = "tokens.npy"


class RecordingError(ValueError):
    """A recording that cannot be read, or that does not hold what was asked for."""


def layer_file(layer: int) -> str:
    """Name of a layer's file in its document's folder."""
    return f"layer-{layer:03d}.safetensors"


def document_folder(folder: Path, document: str) -> Path:
    """Where a document's files are; `document` is its id."""
    return folder / "documents" / document


def document_id(tokens: Tensor) -> str:
    """`Document.id` of tokens int64 [t]."""
    return Document(0, tokens.cpu(), "").id


def read_recording(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a recording.

    Raises:
        RecordingError: no recording there, a damaged manifest, or one of another schema version.
    """
    path = Path(folder) / "manifest.json"
    if not path.is_file():
        raise RecordingError(f"{folder}: no recording here (no manifest.json); experiments/record.py makes one")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path}: damaged ({error})") from error
    found = manifest.get("recording_schema") if isinstance(manifest, dict) else None
    if found != SCHEMA:
        raise RecordingError(f"{path}: recording_schema={found}: this version replays recordings of schema {SCHEMA}")
    return manifest


def damage(path: Path, known: Mapping[str, Any], *, whole: bool = True) -> str | None:
    """What is wrong with a recorded file, None when nothing. `known` has its bytes and sha256, which is compared only
    if `whole`, for that reads it all."""
    if not path.is_file():
        return f"{path}: missing"
    size = path.stat().st_size
    if size != known["bytes"]:
        return f"{path}: damaged ({size:,} bytes of {known['bytes']:,})"
    if whole and digest(path) != known["sha256"]:
        return f"{path}: damaged (its content has changed)"
    return None


def digest(path: Path) -> str:
    """sha256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class RecordedModel:
    """What a recording knows of its model. Implements `ObservableModel` for the documents, layers and rows it holds.

    Name, fingerprint and dtype are the recorded model's, so cells get the ids, and on the same type of device the
    numbers, that they would get live. Files are checked against their digests when they are first read.

    Args:
        folder: what `record` wrote.
        device: where to replay: auto, cpu, cuda, cuda:1 ...
    Raises:
        RecordingError: nothing recorded there, or files that are missing or cut short (named).
        ValueError: a device that is not there.
    """

    tokenizer = None
    native: NativeSelection | None = None  # only dense models can be recorded

    def __init__(self, folder: str | os.PathLike[str], *, device: str = "auto") -> None:
        self.folder = Path(folder)
        self.manifest = read_recording(folder)
        self.device = resolve_device(device)
        about = self.manifest["model"]
        self.name: str = about["name"]
        self.fingerprint: str = about["fingerprint"]
        self.attention: str = about["attention"]
        self.dtype: torch.dtype = getattr(torch, about["dtype"])
        self.num_layers: int = about["num_layers"]
        self.num_heads: int = about["num_heads"]
        self.num_kv_heads: int = about["num_kv_heads"]
        self.hidden_size: int = about["hidden_size"]
        self.max_length: int | None = about["max_length"]
        self.layers: list[int] = self.manifest["layers"]
        self._verified: set[Path] = set()
        if not self.manifest["documents"]:
            raise RecordingError(f"{folder}: holds no whole document yet; run experiments/record.py again to go on")
        self._check_files()

    def _check_files(self) -> None:
        found = [
            trouble
            for document, entry in self.manifest["documents"].items()
            for name, known in entry["files"].items()
            if (trouble := damage(document_folder(self.folder, document) / name, known, whole=False))
        ]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise RecordingError(f"{found[0]}{more}; run experiments/record.py again to record it again")

    @property
    def head_dim(self) -> int:
        """Width of the recorded heads."""
        from safetensors import SafetensorError, safe_open

        path = document_folder(self.folder, next(iter(self.manifest["documents"]))) / layer_file(self.layers[0])
        try:
            with safe_open(path, framework="pt") as file:
                return int(file.get_slice("k").get_shape()[-1])
        except (SafetensorError, OSError) as error:
            raise RecordingError(f"{path}: damaged or not a recording's file ({error})") from error

    def windows(self) -> dict[int, int | None]:
        """Layer -> sliding window (None = full causal) of the recorded layers."""
        windows = self.manifest["model"]["windows"]
        return {layer: windows[str(layer)] for layer in self.layers}

    def documents(self, num_documents: int | None = None, *, shard: int = 0, num_shards: int = 1) -> Documents:
        """The recorded documents in order of their index, with the source they came from.

        num_documents: the first so many, over all shards; None = all. shard, num_shards: as in `documents.Cut`.
        On another type of device than the recording's the source says so: the numbers are then not those of a live run
        there, whose cells must not be taken for these.

        Raises:
            ValueError: more documents than were recorded, or an empty shard.
        """
        entries = sorted(self.manifest["documents"].items(), key=lambda pair: pair[1]["index"])
        if num_documents is not None and not 1 <= num_documents <= len(entries):
            raise ValueError(f"data.num_documents={num_documents}: {self.folder} holds {len(entries)} documents")
        if not 0 <= shard < num_shards:
            raise ValueError(f"data.shard={shard}: must be at least 0 and below num_shards={num_shards}")
        chosen = [pair for pair in entries[:num_documents] if pair[1]["index"] % num_shards == shard]
        if not chosen:
            raise ValueError(f"data.num_shards={num_shards}: shard={shard} gets none of the recorded documents")
        source, made_on = dict(self.manifest["data"]), self.manifest["device"]
        if made_on != self.device.type:
            source["recorded_on"] = made_on
        return Documents(tuple(self._document(key, entry) for key, entry in chosen), source)

    def _document(self, key: str, entry: Mapping[str, Any]) -> Document:
        path = document_folder(self.folder, key) / TOKENS
        try:
            document = Document(entry["index"], torch.from_numpy(np.load(path, allow_pickle=False)), entry["name"])
        except (OSError, ValueError) as error:
            raise RecordingError(f"{path}: damaged ({error})") from error
        if document.id != key:
            raise RecordingError(f"{path}: damaged (these are not the tokens of document {key})")
        return document

    def check(
        self,
        documents: Sequence[Document],
        *,
        rows: int | None,
        seed: int,
        layers: Collection[int] | None,
        detail_rows: int,
        scorers: Collection[str] = (),
    ) -> None:
        """Raise ValueError, naming the option, where a measurement needs what was not recorded.

        Any rows and seed will do where all rows were recorded.
        """
        kept, length = self.manifest["rows"], self.manifest["data"]["length"]
        if kept is not None and kept < length:
            if rows != kept:
                raise ValueError(f"measure.rows={rows}: {self.folder} holds {kept} rows a document, set rows={kept}")
            if seed != self.manifest["seed"]:
                raise ValueError(f"measure.seed={seed}: {self.folder} holds the rows of seed={self.manifest['seed']}")
        unknown = sorted(set(layers or ()) - set(self.layers))
        if unknown:
            raise ValueError(f"measure.layers={unknown}: not recorded; {self.folder} holds layers {self.layers}")
        if detail_rows and not self.manifest["values"]:
            raise ValueError(f"measure.detail_rows={detail_rows}: {self._without('v')}; set detail_rows=0")
        if "lightning" in scorers and not self.manifest["inputs"]:
            raise ValueError(f"scorer=lightning: {self._without('x')}")
        for document in documents:
            self._check_document(document.id)

    def _without(self, name: str) -> str:
        option = {"v": "record.values", "x": "record.inputs"}[name]
        return f"needs {name}, but {self.folder} was recorded without ({option}=false)"

    def _check_document(self, key: str) -> None:
        if key not in self.manifest["documents"]:
            raise ValueError(f"document {key}: not among the {len(self.manifest['documents'])} in {self.folder}")

    @torch.inference_mode()
    def observe(self, tokens: Tensor, observer: Observer, layers: Collection[int]) -> None:
        """Read tokens int64 [1, t]'s recording; `observer` is called once for each of `layers`, in order.

        Raises:
            ValueError: a document or layer that was not recorded. RecordingError: a damaged file (named).
        """
        key, wanted = document_id(tokens[0]), sorted(set(layers))
        self._check_document(key)
        unknown = [layer for layer in wanted if layer not in self.layers]
        if unknown:
            raise ValueError(f"layers={unknown}: not recorded; {self.folder} holds layers {self.layers}")
        for layer in wanted:
            observer(self._read(key, layer))

    def _read(self, key: str, layer: int) -> LayerActivations:
        from safetensors import SafetensorError, safe_open

        path = document_folder(self.folder, key) / layer_file(layer)
        if path not in self._verified:
            trouble = damage(path, self.manifest["documents"][key]["files"][path.name])
            if trouble:
                raise RecordingError(f"{trouble}; run experiments/record.py again to record it again")
            self._verified.add(path)
        try:
            with safe_open(path, framework="pt", device=str(self.device)) as file:
                about = json.loads((file.metadata() or {})[METADATA_KEY])
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, OSError) as error:
            raise RecordingError(f"{path}: damaged or not a recording's file ({error})") from error
        missing: Any = {name: LeftOut(f"layer {layer}: {self._without(name)}") for name in ("v", "x")}
        return LayerActivations(
            layer=layer,
            q=found["q"].unsqueeze(0),
            k=found["k"].unsqueeze(0),
            v=found["v"].unsqueeze(0) if "v" in found else missing["v"],
            x=found["x"].unsqueeze(0) if "x" in found else missing["x"],
            output=found["output"].unsqueeze(0) if "output" in found else missing["v"],
            scale=about["scale"],
            softcap=about["softcap"],
            sink=found.get("sink"),
            window=about["window"],
            rows=found["rows"],
        )
