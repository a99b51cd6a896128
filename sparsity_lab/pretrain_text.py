"""Permissively licensed text that a Python installation brings along: its standard library and installed packages.

A package counts only if its own metadata names nothing but licences of `ALLOWED`; what was taken and what was refused,
with version, licence and bytes, goes into the record of a training. Files are ordered by the hash of their content,
equal ones are kept once, and the same hash decides what is held out, so the split depends on nothing else.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from sparsity_lab.data import python_files

ALLOWED = frozenset(
    {"MIT", "MIT-0", "BSD-2-Clause", "BSD-3-Clause", "0BSD", "Apache-2.0", "PSF-2.0", "Python-2.0", "ISC", "Zlib"}
    | {"CC0-1.0", "Unlicense"}
)
# what the metadata of older packages says -> the same in SPDX's words; "BSD" is one of the two BSD licences
_CLASSIFIERS = {
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "BSD License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "ISC License (ISCL)": "ISC",
}
_NAMES = {
    "mit": "MIT", "mit license": "MIT", "the mit license": "MIT", "expat": "MIT", "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause", "new bsd": "BSD-3-Clause", "modified bsd": "BSD-3-Clause",
    "bsd-3": "BSD-3-Clause", "bsd-3-clause": "BSD-3-Clause", "bsd 3-clause": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause", "3-clause bsd license": "BSD-3-Clause", "bsd-2-clause": "BSD-2-Clause",
    "apache": "Apache-2.0", "apache 2": "Apache-2.0", "apache 2.0": "Apache-2.0", "apache-2.0": "Apache-2.0",
    "apache license": "Apache-2.0", "apache license 2.0": "Apache-2.0", "apache license, version 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0", "apache software license": "Apache-2.0", "psf": "PSF-2.0",
    "psf-2.0": "PSF-2.0", "python software foundation license": "PSF-2.0", "isc": "ISC",
}  # fmt: skip
_CODE, _PROSE = {".py"}, {".md", ".rst", ".txt"}
# other people's code, under other licences
_FOREIGN = re.compile(r"(^|/)(_?vendor|_?vendored|third_?party|extern|externals?|_externals?|licenses?)(/|$)", re.I)
_LICENCE_FILE = re.compile(r"(licen[cs]e|copying|notice|authors|entry_points|top_level|sources|record)[^/]*$", re.I)
LONGEST_FILE, LONGEST_LINE = 400_000, 2_000  # bytes and characters; beyond lie tables and generated code


@dataclass(frozen=True)
class TextFile:
    """One file: `kind` is code or prose, `package` where it comes from, `digest` the sha256 of its text."""

    package: str
    kind: str
    text: str
    digest: str

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.text.encode())

    def held_out(self, percent: int) -> bool:
        """Whether its hash puts it into the held-out `percent`."""
        return int(self.digest[-8:], 16) % 100 < percent


@dataclass
class Corpus:
    """Files by hash, and where they come from."""

    files: list[TextFile]
    packages: dict[str, dict[str, Any]] = field(default_factory=dict)  # taken: version, licence, files, bytes
    refused: dict[str, str] = field(default_factory=dict)  # not taken: what their metadata says

    def split(self, percent: int) -> tuple[list[TextFile], list[TextFile]]:
        """(training, held out)."""
        held = [file for file in self.files if file.held_out(percent)]
        return [file for file in self.files if not file.held_out(percent)], held


def licence(meta: Any) -> tuple[str | None, str]:
    """(SPDX expression of allowed licences, or None; what the metadata says). An expression counts before classifiers,
    these before the free text; all licences that are named must be allowed."""
    if expression := meta.get("License-Expression"):
        names = [part for part in re.split(r"\s+(?:AND|OR)\s+|[()]", expression) if part.strip()]
        known = all(part.strip() in ALLOWED for part in names)
        return (expression if known else None), expression
    prefix = "License :: "
    given = [line.removeprefix(prefix) for line in meta.get_all("Classifier") or [] if line.startswith(prefix)]
    given = [line.removeprefix("OSI Approved").removeprefix(" :: ") for line in given]
    if given := [line for line in given if line]:
        found = [_CLASSIFIERS.get(line) for line in given]
        return (None if None in found else " AND ".join(sorted({str(x) for x in found}))), "; ".join(given)
    text = (meta.get("License") or "").strip()
    found_name = _NAMES.get(text.lower()) or (text if text in ALLOWED else None)
    return found_name, text.splitlines()[0][:80] if text else "nothing"


def collect(max_package_bytes: int, stdlib: bool = True, packages: Iterable[str] | None = None) -> Corpus:
    """Everything this Python brings that may be used, at most `max_package_bytes` of each package (the standard library
    whole), those files whose names hash lowest.

    Args:
        packages: only these distributions; None = all installed.
    """
    corpus, found = Corpus([]), dict[str, TextFile]()
    if stdlib:
        files = _unique(_stdlib(), found)
        corpus.packages["python"] = _about(platform.python_version(), "PSF-2.0", files)
    admitted: dict[str, tuple[metadata.Distribution, str]] = {}
    for name, distribution in sorted(_distributions(packages).items()):
        allowed, said = licence(distribution.metadata)
        if allowed is None:
            corpus.refused[name] = said
        else:
            admitted[name] = distribution, allowed
    with ThreadPoolExecutor(8) as pool:  # reading many small files waits for the disk
        texts = pool.map(lambda name: _some(_package(name, admitted[name][0]), max_package_bytes), admitted)
        for (name, (distribution, allowed)), files in zip(admitted.items(), texts, strict=True):
            if kept := _unique(files, found):
                corpus.packages[name] = _about(distribution.version, allowed, kept)
    corpus.files = [found[digest] for digest in sorted(found)]
    return corpus


def _about(version: str, name: str, files: list[TextFile]) -> dict[str, Any]:
    return {"version": version, "licence": name, "files": len(files), "bytes": sum(file.size for file in files)}


def _some(files: Iterable[TextFile], max_bytes: int) -> list[TextFile]:
    """The first that fit; reading ends soon after."""
    kept, size = [], 0
    for file in files:
        if size + file.size > max_bytes:
            break
        kept.append(file)
        size += file.size
    return kept


def _unique(files: Iterable[TextFile], found: dict[str, TextFile]) -> list[TextFile]:
    """Those not seen before; they are added to `found`."""
    new = []
    for file in files:
        if file.digest not in found:
            found[file.digest] = file
            new.append(file)
    return new


def _distributions(names: Iterable[str] | None) -> dict[str, metadata.Distribution]:
    """Installed distributions by normalised name, the first of a name."""
    found: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        try:
            name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        except Exception:  # a damaged installation of something: not ours to judge
            continue
        if name and (names is None or name in names):
            found.setdefault(name, distribution)
    found.pop("sparsity-lab", None)  # what a checkout happens to hold
    return found


def _stdlib() -> Iterator[TextFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(python_files(root)):
        yield from _read("python", "code", path)
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for _, body in sorted(topics.items()):
        yield _text_file("python", "prose", body)


def _package(name: str, distribution: metadata.Distribution) -> Iterator[TextFile]:
    """The description in a package's metadata, then its code and texts, in the order of their names' hashes."""
    meta: Any = distribution.metadata
    description = meta.get("Description", "")
    if len(description) > 500:
        yield _text_file(name, "prose", description)
    for path in sorted(distribution.files or [], key=lambda path: hashlib.sha256(path.as_posix().encode()).digest()):
        suffix, place = path.suffix.lower(), path.as_posix()
        kind = "code" if suffix in _CODE else "prose" if suffix in _PROSE else None
        if kind is None or _FOREIGN.search(place) or (kind == "prose" and _LICENCE_FILE.search(place)):
            continue
        yield from _read(name, kind, Path(str(path.locate())))


def _read(package: str, kind: str, path: Path) -> Iterator[TextFile]:
    """The file, unless it cannot be read as text or looks like a table."""
    try:
        if not 100 <= path.stat().st_size <= LONGEST_FILE:
            return
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    if "\0" not in text and max(map(len, text.splitlines()), default=0) <= LONGEST_LINE:
        yield _text_file(package, kind, text)


def _text_file(package: str, kind: str, text: str) -> TextFile:
    content = text.encode("utf-8", "replace")  # metadata may hold half characters
    return TextFile(package, kind, content.decode(), hashlib.sha256(content).hexdigest())
