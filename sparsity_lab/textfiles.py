"""Finding, checking and reading text files; nothing here holds a whole file in memory.

Errors are ValueErrors that begin with `what` (for example "data=text") and name the file.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_CHUNK = 1 << 20  # bytes checked at a time
_PIECE = 1 << 16  # characters handed out at a time, up to the end of the line
_BOM = "\ufeff"


def find(path: str | os.PathLike[str], what: str, suffix: str = "") -> list[tuple[str, Path]]:
    """(name within the common folder, file), sorted by name: one file, all of a folder that end in `suffix`, or a glob.

    Hidden files and folders are left out unless `path` names them. Raises ValueError when there is nothing.
    """
    if not str(path):
        raise ValueError(f"{what}, path='': must name a file, a folder or a glob")
    given = Path(path).expanduser()
    if given.is_file():
        return [(given.name, given)]
    if given.is_dir():
        inside = (p for p in given.rglob("*") if p.is_file() and p.name.endswith(suffix))
        files = [p for p in inside if not any(part.startswith(".") for part in p.relative_to(given).parts)]
    elif glob.has_magic(str(given)):
        files = [Path(p) for p in glob.glob(str(given), recursive=True) if os.path.isfile(p)]
    else:
        raise ValueError(f"{what}, path={str(path)!r}: no such file or folder")
    if not files:
        raise ValueError(f"{what}, path={str(path)!r}: no {suffix or 'text'} file there")
    common = given if given.is_dir() else Path(os.path.commonpath([p.parent for p in files]))
    return sorted((p.relative_to(common).as_posix(), p) for p in files)


def digest(contents: Iterable[tuple[str, Iterable[bytes]]]) -> str:
    """First 16 hex digits of a sha256 over names and contents, each content given in chunks."""
    total = hashlib.sha256()
    for name, chunks in contents:
        one = hashlib.sha256()
        for chunk in chunks:
            one.update(chunk)
        total.update(name.encode("utf-8", "surrogateescape") + b"\0" + one.digest())
    return total.hexdigest()[:16]


def checked(file: Path, what: str) -> Iterator[bytes]:
    """The bytes of a file in chunks. Raises ValueError when it cannot be read or is not text (NUL bytes, not UTF-8)."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                if b"\0" in chunk:
                    raise _not_text(file, what, "it has NUL bytes")
                decoder.decode(chunk)
                yield chunk
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise _not_text(file, what, f"not UTF-8: {error.reason}") from error
    except OSError as error:
        raise ValueError(f"{what}: cannot read {file} ({error.strerror})") from error


def is_text(file: Path) -> bool:
    """Whether `checked` accepts the file."""
    try:
        for _ in checked(file, ""):
            pass
    except ValueError:
        return False
    return True


def pieces(file: Path) -> Iterator[str]:
    """The text of a file in pieces that end with a line; line ends are read as \\n, so checkouts do not matter."""
    with file.open(encoding="utf-8-sig") as stream:
        while piece := stream.read(_PIECE):
            yield piece + stream.readline(_PIECE)


def scan_json_lines(file: Path, field: str, what: str) -> tuple[list[tuple[int, int]], bytes]:
    """(line number, byte offset) of every line that is not blank, all of them checked, and a sha256 of the file.

    Raises ValueError: broken JSON, or `field` missing or not a string (with the line's number); not text.
    """
    spots: list[tuple[int, int]] = []
    content = hashlib.sha256()
    for chunk in checked(file, what):
        content.update(chunk)
    offset = 0
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip() and line.strip() != _BOM.encode():
                _field(line, field, f"{what}, {file}, line {number}")
                spots.append((number, offset))
            offset += len(line)
    return spots, content.digest()


def json_line(file: Path, offset: int, field: str) -> Iterator[str]:
    """The text in `field` of the JSON line that starts at byte `offset`."""
    with file.open("rb") as stream:
        stream.seek(offset)
        yield _field(stream.readline(), field, f"{file} at byte {offset}")


def _field(line: bytes, field: str, where: str) -> str:
    try:
        record = json.loads(line.decode("utf-8").lstrip(_BOM))
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: must be an object with field={field!r}, is a {type(record).__name__}")
    if field not in record:
        raise ValueError(f"{where}: no field={field!r}, it has {', '.join(sorted(record)) or 'none'}")
    if not isinstance(record[field], str):
        raise ValueError(f"{where}: field={field!r} must be a string, is {type(record[field]).__name__}")
    return record[field]


def _not_text(file: Path, what: str, why: str) -> ValueError:
    return ValueError(f"{what}: {file} is not text ({why}); a glob such as '*.txt' leaves such files out")
