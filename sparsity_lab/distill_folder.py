"""The folder of a distillation.

ratio<r>.safetensors   the indexers of one ratio (schema: see `lightning`); `scorer.weights=FOLDER` takes them all
training.csv           a row an evaluation, held-out source, layer and ratio (columns: see `distill_run.LOG_COLUMNS`)
manifest.json          settings, data, versions, device, git state, time, held-out figures
status                 running, complete, interrupted, or failed and why
checkpoint.pt          while unfinished: everything needed to go on to the very weights of an unbroken run
"""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from sparsity_lab.distill_data import differing
from sparsity_lab.results import write_atomically, write_table, write_text

SCHEMA = 1


class RunFolder:
    """What is kept of one distillation. Every file is written whole or not at all.

    Args:
        identity: the settings that decide the weights, ready for JSON; a folder never mixes runs that differ in them.
        what: for messages, what kind of run it is.
    """

    def __init__(self, path: Path, identity: dict[str, Any], what: str = "a distillation") -> None:
        self.path, self.identity, self.what = path, identity, what

    def finished(self) -> dict[str, Any] | None:
        """The manifest of a complete run with these settings, None when there is none yet.

        Raises:
            ValueError: the folder holds a run with other settings, or something else.
        """
        path, status = self.path / "manifest.json", self.path / "status"
        if not path.exists():
            return None
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            self._check_same(manifest["identity"])
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not the manifest of {self.what} ({error!r})") from error
        done = status.exists() and status.read_text(encoding="utf-8").strip() == "complete"
        return manifest if done else None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Claim the folder, and note in `status` how the work inside ends unless `finish` did."""
        self._write_manifest({})
        self._status("running")
        try:
            yield
        except KeyboardInterrupt:
            self._status("interrupted")
            raise
        except Exception as error:
            self._status(f"failed: {str(error) or type(error).__name__}")
            raise

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """The run is complete: describe it and drop the checkpoint."""
        self._write_manifest(manifest)
        self._status("complete")
        (self.path / "checkpoint.pt").unlink(missing_ok=True)

    def write_log(self, table: pd.DataFrame) -> None:
        """Replace training.csv."""
        write_table(table, self.path / "training.csv")

    def save_checkpoint(self, content: Mapping[str, Any]) -> None:
        """Replace the checkpoint: plain values, containers and tensors."""
        content = {**content, "identity": json.dumps(self.identity)}
        write_atomically(self.path / "checkpoint.pt", lambda temporary: torch.save(content, temporary))

    def load_checkpoint(self, device: torch.device) -> dict[str, Any] | None:
        """The last checkpoint, its tensors on `device`; None when there is none.

        Raises:
            ValueError: damaged, or of a run with other settings.
        """
        path = self.path / "checkpoint.pt"
        if not path.exists():
            return None
        try:
            content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
            self._check_same(json.loads(content["identity"]))
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: damaged, or not a checkpoint of this version; remove it ({error!r})") from error
        return content

    def _check_same(self, found: Mapping[str, Any]) -> None:
        for part in differing(found, self.identity, list(self.identity)):
            old, new, name = found.get(part), self.identity[part], part
            if isinstance(old, dict) and isinstance(new, dict):
                key = differing(old, new, sorted({*old, *new}))[0]
                old, new, name = old.get(key), new.get(key), f"{part}.{key}"
            raise ValueError(f"{self.path}: holds a run with {name}={old}, not {new}; give this run another name")

    def _write_manifest(self, more: Mapping[str, Any]) -> None:
        manifest = {"schema": SCHEMA, "identity": self.identity, **more}
        write_text(self.path / "manifest.json", json.dumps(manifest, indent=1) + "\n")

    def _status(self, text: str) -> None:
        write_text(self.path / "status", text + "\n")
