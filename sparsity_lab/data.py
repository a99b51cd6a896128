"""Where documents come from: text shipped with Python, files of text, JSON lines, saved tokens, or the text held out
from the training of the model that comes along.

    docs = pydoc(tokenizer, num_documents=4, length=2048)          # English prose
    docs = text(tokenizer, path="books/*.txt", num_documents=4, length=2048, seed=1)

Every text source works the same way: its items (topics, files, lines) are sorted by name, shuffled with `seed`,
tokenised one by one and joined; the stream is cut into documents of `length` tokens. Document i is the same however
many are asked for, and no more text is tokenised than they need. Files are read through once beforehand, to check them
and to take the digest that stands in `Documents.source`, so edited text never passes for the old.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch

from sparsity_lab import textfiles
from sparsity_lab.documents import Cut, CutOptions, Document, Documents, Item, check_ids, cut_text, shuffled, vocabulary

__all__ = ["Document", "Documents", "held_out", "jsonl", "load", "pydoc", "stdlib", "text", "tokens"]

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}


def pydoc(tokenizer: Any, num_documents: int, length: int, seed: int = 0, **options: Unpack[CutOptions]) -> Documents:
    """English prose shipped with Python: the language reference behind `help("topics")`, about 0.5 MB.

    Documents have tokens [t = length]. The text differs a little between Python versions; the digest tells them apart.
    Options: see `documents.Cut`. Raises ValueError: too little text, or an option out of range.
    """
    cut = Cut(num_documents, length, seed, **options)
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError("data=pydoc: this Python comes without pydoc_data; use data=text") from error
    pairs = sorted(topics.items())
    items = [Item(name, partial(_one, body)) for name, body in pairs]
    return _cut_items(tokenizer, items, textfiles.digest((n, [b.encode()]) for n, b in pairs), cut, "pydoc")


def stdlib(tokenizer: Any, num_documents: int, length: int, seed: int = 0, **options: Unpack[CutOptions]) -> Documents:
    """Python source: the .py files of the standard library, without tests and installed packages, about 10 MB.

    Documents have tokens [t = length]. Files that are not UTF-8 are left out. Options and errors as in `pydoc`.
    """
    cut = Cut(num_documents, length, seed, **options)
    root = Path(sysconfig.get_paths()["stdlib"])
    named = sorted((path.relative_to(root).as_posix(), path) for path in python_files(root))
    files = [(name, path) for name, path in named if textfiles.is_text(path)]
    return _cut_items(tokenizer, *_file_items(files, "data=stdlib"), cut, "stdlib")


def text(
    tokenizer: Any,
    path: str | os.PathLike[str],
    num_documents: int,
    length: int,
    seed: int = 0,
    **options: Unpack[CutOptions],
) -> Documents:
    """Text files (UTF-8): one file, every file in a folder and below it, or a glob ("books/**/*.txt").

    Documents have tokens [t = length]. Hidden files and folders are left out. Options as in `pydoc`.
    Raises ValueError: nothing at `path`, a file that is not text (named), too little text, an option out of range.
    """
    cut = Cut(num_documents, length, seed, **options)
    files = textfiles.find(path, "data=text")
    return _cut_items(tokenizer, *_file_items(files, "data=text"), cut, "text")


def jsonl(
    tokenizer: Any,
    path: str | os.PathLike[str],
    num_documents: int,
    length: int,
    seed: int = 0,
    field: str = "text",
    **options: Unpack[CutOptions],
) -> Documents:
    """JSON lines: `field` of every object, each line an item of its own. A file, a folder of *.jsonl, or a glob.

    Documents have tokens [t = length]. Blank lines are left out. All lines are checked, whatever the count.
    Raises ValueError: broken JSON, or `field` missing or not a string (with file and line number); else as in `text`.
    """
    cut = Cut(num_documents, length, seed, **options)
    items: list[Item] = []
    digests: list[tuple[str, list[bytes]]] = []
    for name, file in textfiles.find(path, "data=jsonl", suffix=".jsonl"):
        spots, digest = textfiles.scan_json_lines(file, field, "data=jsonl")
        digests.append((name, [digest]))
        items += [Item(f"{name}:{n}", partial(textfiles.json_line, file, offset, field)) for n, offset in spots]
    return _cut_items(tokenizer, items, textfiles.digest(digests), cut, "jsonl", field=field)


def tokens(
    path: str | os.PathLike[str], num_documents: int, length: int, seed: int = 0, **options: Unpack[CutOptions]
) -> Documents:
    """Saved token ids: a .npy file, or a .safetensors file with one array (or one called "tokens").

    A 1-D array is one stream, cut in its own order. Of a 2-D array [n, t] every row is cut by itself (no document
    crosses rows), rows in the order given by `seed`. Documents have tokens [t = length]. Pickles are never read.
    Raises ValueError: no such file, another format, not integers, ids out of range, too few tokens.
    """
    cut = Cut(num_documents, length, seed, **options)
    file = Path(path).expanduser()
    array = _read_array(file)
    return _cut_rows(array[None] if array.ndim == 1 else array, cut, "tokens", file)


def held_out(
    tokenizer: Any, num_documents: int, length: int, seed: int = 0, **options: Unpack[CutOptions]
) -> Documents:
    """What `v41_mini` never saw in training, as its tokens: sequences of code and some of prose, cut like `tokens`.

    Documents have tokens [t = length]. Raises ValueError: another vocabulary, too few tokens, an option out of range.
    """
    from sparsity_lab.models.deepseek_v41.checkpoint import SHIPPED, read_config
    from sparsity_lab.pretrain_card import read_held_out

    cut = Cut(num_documents, length, seed, **options)
    size, own = None if tokenizer is None else vocabulary(tokenizer), read_config("shipped").vocab_size
    if size != own:
        raise ValueError(f"data=held_out: holds tokens of model=v41_mini, vocabulary {own}; this model's is {size}")
    kinds = read_held_out("shipped", None)
    return _cut_rows(np.concatenate([kinds[name] for name in sorted(kinds)]), cut, "held_out", SHIPPED / "held_out.npz")


_SOURCES: dict[str, Callable[..., Documents]] = {
    "pydoc": pydoc,
    "stdlib": stdlib,
    "text": text,
    "jsonl": jsonl,
    "tokens": tokens,
    "held_out": held_out,
}


def load(kind: str, tokenizer: Any, **options: Any) -> Documents:
    """The documents of the source called `kind` (a function of this module) with that function's options.

    With `tokens`, the tokenizer (None is allowed) only gives the vocabulary that ids are checked against.
    Raises ValueError: an unknown kind or option, a missing option, and whatever the source raises.
    """
    if kind not in _SOURCES:
        raise ValueError(f"data={kind!r}: unknown, must be one of {', '.join(_SOURCES)}")
    needed = ["num_documents", "length"] + ["path"] * (kind in ("text", "jsonl", "tokens"))
    allowed = {*needed, "seed", *CutOptions.__annotations__} | ({"field"} if kind == "jsonl" else set())
    if unknown := sorted(options.keys() - allowed):
        raise ValueError(
            f"data.{unknown[0]}: not an option of data={kind}, must be one of {', '.join(sorted(allowed))}"
        )
    if missing := [key for key in needed if options.get(key) is None]:
        raise ValueError(f"data.{missing[0]}: missing, data={kind} needs it")
    if kind != "tokens":
        return _SOURCES[kind](tokenizer, **options)
    if options.get("vocab_size") is None and tokenizer is not None:
        options["vocab_size"] = vocabulary(tokenizer)
    return tokens(**options)


def _cut_items(tokenizer: Any, items: list[Item], digest: str, cut: Cut, name: str, **more: Any) -> Documents:
    order = shuffled(len(items), cut.seed)
    return cut_text(tokenizer, (items[i] for i in order), cut, name, cut.describe(name, digest, **more))


def _cut_rows(rows: np.ndarray, cut: Cut, name: str, file: Path) -> Documents:
    """Documents of token ids [rows, tokens]."""
    order = shuffled(len(rows), cut.seed)
    per_row = rows.shape[1] // cut.length
    if not per_row and len(rows) > 1:
        raise ValueError(
            f"data.length={cut.length}: data={name} has sequences of {rows.shape[1]:,} tokens, and no document crosses "
            "from one to the next"
        )
    if len(rows) * per_row < cut.stop:
        raise cut.too_little(name, rows.size, len(rows) * per_row)
    found = []
    for index in cut.indices:
        row, place = divmod(index, per_row)
        ids = np.asarray(rows[order[row], place * cut.length : (place + 1) * cut.length], dtype=np.int64)
        check_ids(ids, cut.vocab_size, f"data={name}, {file}")
        found.append(Document(index, torch.from_numpy(ids.copy()), f"{name}/{index} {file.name}"))
    # row by row, so that a memory-mapped file is never held whole
    digest = textfiles.digest((str(rows.shape), [row.astype("<i8").tobytes()]) for row in rows)
    return Documents(tuple(found), cut.describe(name, digest))


def _file_items(files: list[tuple[str, Path]], what: str) -> tuple[list[Item], str]:
    """Whole files as items, and the digest of them all."""
    items = [Item(name, partial(textfiles.pieces, file)) for name, file in files]
    return items, textfiles.digest((name, textfiles.checked(file, what)) for name, file in files)


def _one(body: str) -> Iterator[str]:
    yield body


def python_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        # config-* and _sysconfigdata* describe one machine's build, not Python
        folders[:] = [name for name in folders if name not in _NOT_SOURCE and not name.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield Path(folder, name)


def _read_array(file: Path) -> np.ndarray:
    """Integer array [t] or [n, t] from a .npy or .safetensors file."""
    if file.suffix not in (".npy", ".safetensors"):
        raise ValueError(f"data=tokens, path={str(file)!r}: must be a .npy or .safetensors file (pickles are not read)")
    if not file.is_file():
        raise ValueError(f"data=tokens, path={str(file)!r}: no such file")
    try:
        if file.suffix == ".npy":
            array = np.load(file, allow_pickle=False, mmap_mode="r")
        else:
            array = _read_safetensors(file)
    except Exception as error:  # each reader has its own error types; whatever it was, the file is the trouble
        raise ValueError(f"data=tokens, {file}: cannot be read ({error})") from error
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not array.size:
        raise ValueError(
            f"data=tokens, {file}: must hold integers [tokens] or [rows, tokens], holds {array.dtype} {array.shape}"
        )
    return array


def _read_safetensors(file: Path) -> np.ndarray:
    from safetensors.numpy import load_file

    arrays = load_file(file)
    key = "tokens" if "tokens" in arrays else next(iter(arrays), None)
    if key is None or (key != "tokens" and len(arrays) > 1):
        raise ValueError(f"needs one array, or one called 'tokens'; has {', '.join(sorted(arrays)) or 'none'}")
    return arrays[key]
