"""Results folders as a report sees them: what each holds, how it was made, how to make it again."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sparsity_lab.folders import load, notes
from sparsity_lab.report.blocks import Code, Facts, Section, table, word


@dataclass(frozen=True)
class Folder:
    """One folder of results, whatever experiment made it. found: as `sparsity_lab.folders.load` gives it."""

    path: Path
    found: Any
    status: str

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self.found.manifest


def read(paths: Sequence[Path]) -> tuple[list[Folder], list[str]]:
    """The folders that hold results, and why the others cannot be shown."""
    folders, refused = [], []
    for path in paths:
        try:
            folders.append(Folder(path, load(path), _status(path)))
        except (ValueError, OSError) as error:
            refused.append(str(error))
    return folders, refused


def _status(path: Path) -> str:
    try:
        return (path / "status").read_text(encoding="utf-8").strip()
    except OSError:
        return "complete"  # experiments that keep no status write their results when they are done


def troubles(folders: Sequence[Folder], refused: Sequence[str]) -> list[str]:
    """What stands over the page: folders that are not complete, or not shown."""
    return [*(note for f in folders for note in notes(f.path)), *(f"Not shown: {reason}" for reason in refused)]


def of_type(folders: Sequence[Folder], kind: type) -> list[Any]:
    """What those folders hold that are of one kind."""
    return [folder.found for folder in folders if isinstance(folder.found, kind)]


def failed_section(folders: Sequence[Folder]) -> list[Any]:
    """Cells that could not be measured, with the reasons."""
    rows = []
    for folder in folders:
        for cell in folder.manifest.get("failed_cells") or []:
            fields = {key: value for key, value in cell.items() if key != "reason" and value is not None}
            told = ", ".join(f"{key}={value}" for key, value in fields.items())
            rows.append([word(told), word(cell.get("reason", "unknown"))])
    return [table("Cells that could not be measured", ["cell", "reason"], rows)] if rows else []


def provenance(folders: Sequence[Folder]) -> Section:
    """Versions, source, hashes and device of every folder, as far as they were kept."""
    blocks: list[Any] = []
    for folder in folders:
        m = {**(folder.manifest.get("identity") or {}), **folder.manifest}
        git, model = m.get("git") or {}, m.get("model") or {}
        dirty = ", with uncommitted changes" if git.get("dirty") else ""
        told = [
            ("folder", f"{folder.path} ({folder.status})"),
            ("device", m.get("device")),
            ("versions", _pairs(m.get("versions"))),
            ("source", f"git {git['sha']}{dirty}" if git.get("sha") else "unknown (not a git checkout)"),
            ("model", _pairs({key: model[key] for key in ("name", "fingerprint", "dtype") if model.get(key)})),
            ("data", _pairs(m.get("data"))),
            ("seed", m.get("seed")),
            ("schema", m.get("schema")),
            *((f"sha256 of {file.name}", _digest(file)) for file in sorted(folder.path.glob("*.parquet"))),
        ]
        blocks.append(Facts([(name, str(value)) for name, value in told if value not in (None, "")]))
    return Section("provenance", "Provenance", blocks)


def _pairs(fields: Any) -> str:
    return ", ".join(f"{key} {value}" for key, value in fields.items()) if isinstance(fields, Mapping) else ""


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def reproduction(folders: Sequence[Folder], own: str) -> Section:
    """The commands that made the folders, this page's, and the configurations in full."""
    lines, configurations = [], []
    for folder in folders:
        found = commands(folder.path)
        lines += found or [f"# {folder.path}: no command was kept; its configuration is below"]
        if config := folder.manifest.get("config"):
            text = yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False).splitlines()
            configurations.append(Code(text, f"Configuration of {folder.path}, in full"))
    sha = next((sha for f in folders if (sha := (f.manifest.get("git") or {}).get("sha"))), None)
    checkout = [f"git checkout {sha}"] if sha else []
    return Section("reproduce", "How to reproduce", [Code([*checkout, *lines, own]), *configurations])


def commands(folder: Path) -> list[str]:
    """The command lines whose Hydra folders lie in a results folder: the last single run's and the last sweep's."""
    out, jobs = [], folder / "jobs"
    for kept in (folder / ".hydra" / "hydra.yaml", jobs / "single" / ".hydra" / "hydra.yaml", jobs / "multirun.yaml"):
        try:
            hydra = yaml.safe_load(kept.read_text(encoding="utf-8"))["hydra"]
            out.append(_command(hydra))
        except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError):
            continue
    return out


def _command(hydra: Mapping[str, Any]) -> str:
    sweep = str(hydra.get("mode")) == "MULTIRUN" or "hydra.mode=MULTIRUN" in hydra["overrides"]["hydra"]
    own = [word for word in hydra["overrides"]["hydra"] if not word.startswith("hydra.mode=")]
    given = [s["path"] for s in hydra["runtime"].get("config_sources") or [] if s["provider"] == "command-line"]
    folders = [part for path in given for part in ("--config-dir", path)]
    words = [*folders, *(["-m"] if sweep else []), *own, *hydra["overrides"]["task"]]
    return shlex.join(["python", f"experiments/{hydra['job']['name']}.py", *words])
