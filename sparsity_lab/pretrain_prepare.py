"""From the text on this machine to what training reads: a tokenizer, streams of tokens, and held-out sequences.

Made once and kept in a folder:

tokenizer/          as transformers saves it
code.npy, prose.npy training streams, int32
held_out.npz        sequences that training never sees, by kind: uint16 or int32 [n, length + 1]
corpus.json         the settings, and every package taken or refused with version, licence and bytes
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsity_lab import textfiles
from sparsity_lab.pretrain_data import encode_files, train_tokenizer
from sparsity_lab.pretrain_text import Corpus, TextFile, collect
from sparsity_lab.results import write_atomically, write_text

STREAMS = ("code", "prose")
log = logging.getLogger("sparsity_lab")


@dataclass(frozen=True)
class TextSettings:
    """See `data` in conf/pretrain.yaml."""

    stdlib: bool = True
    packages: tuple[str, ...] | None = None
    files: str | None = None
    max_package_bytes: int = 6_000_000
    held_out_percent: int = 2
    held_out_sequences: int = 32
    tokenizer_bytes: int = 30_000_000

    def __post_init__(self) -> None:
        if self.packages is not None:
            object.__setattr__(self, "packages", tuple(self.packages))
        if not 1 <= self.held_out_percent <= 50:
            raise ValueError(f"data.held_out_percent={self.held_out_percent}: must lie between 1 and 50")
        for name in ("max_package_bytes", "held_out_sequences", "tokenizer_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name}={getattr(self, name)}: must be at least 1")


@dataclass(frozen=True)
class Prepared:
    """What training reads."""

    tokenizer: Any
    streams: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]
    corpus: dict[str, Any]  # settings, counts, packages

    def held(self, kinds: tuple[str, ...] = STREAMS, limit: int | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and targets of held-out sequences, int64 [n, t]; `limit`: at most so many, taken evenly."""
        rows = np.concatenate([self.held_out[kind] for kind in kinds if kind in self.held_out]).astype(np.int64)
        if limit is not None and len(rows) > limit:
            rows = rows[np.linspace(0, len(rows) - 1, limit).astype(int)]
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def prepare(
    folder: Path, settings: TextSettings, *, vocab_size: int, length: int, start: Path | None = None
) -> Prepared:
    """Take what the folder holds, or make it.

    Args:
        start: checkpoint folder whose tokenizer is used; None = train one.
    Raises:
        ValueError: too little text; a folder made with other settings; a checkpoint without a tokenizer.
    """
    given = {"vocab_size": vocab_size, "length": length, "tokenizer": _digest(start)}
    wanted = json.loads(json.dumps({**vars(settings), **given}))
    if not (folder / "corpus.json").exists():
        _make(folder, settings, wanted, vocab_size, length, start)
    return _load(folder, wanted)


def _load(folder: Path, wanted: Mapping[str, Any]) -> Prepared:
    from transformers import PreTrainedTokenizerFast

    try:
        corpus = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        for key, value in wanted.items():
            if corpus["settings"].get(key) != value:
                raise ValueError(
                    f"data.{key}={value}: {folder} was made with {corpus['settings'].get(key)}; remove it, or give "
                    "this run another name"
                )
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
        streams = {kind: np.load(folder / f"{kind}.npy", allow_pickle=False) for kind in STREAMS}
        with np.load(folder / "held_out.npz", allow_pickle=False) as held:
            held_out = {kind: held[kind] for kind in held.files}
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder}: holds no whole training text ({error!r}); remove it") from error
    return Prepared(tokenizer, streams, held_out, corpus)


def _digest(start: Path | None) -> str | None:
    """Of a checkpoint's tokenizer."""
    if start is None:
        return None
    if not (start / "tokenizer.json").is_file():
        raise ValueError(f"model.path={start}: holds no tokenizer.json, which training needs")
    return hashlib.sha256((start / "tokenizer.json").read_bytes()).hexdigest()[:16]


def _make(
    folder: Path,
    settings: TextSettings,
    wanted: dict[str, Any],
    vocab_size: int,
    length: int,
    start: Path | None,
) -> None:
    from transformers import PreTrainedTokenizerFast

    log.info("collecting text")
    corpus = collect(settings.max_package_bytes, settings.stdlib, settings.packages)
    if settings.files is not None:
        _add_files(corpus, settings.files)
    train, held = corpus.split(settings.held_out_percent)
    if not train or not held:
        raise ValueError(f"data: {len(corpus.files)} files of text are too few; allow more packages or give data.files")
    log.info(
        "%d files, %.1f MB of %d packages%s",
        len(corpus.files), sum(file.size for file in corpus.files) / 1e6, len(corpus.packages),
        "; training the tokenizer" if start is None else "",
    )  # fmt: skip
    if start is None:
        tokenizer = train_tokenizer(train, vocab_size, settings.tokenizer_bytes)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(start)
    log.info("encoding")
    streams = {kind: encode_files(tokenizer, [f for f in train if f.kind == kind]) for kind in STREAMS}
    held_out = {
        kind: _sequences(encode_files(tokenizer, [f for f in held if f.kind == kind]), length, settings)
        for kind in STREAMS
    }
    if not any(len(rows) for rows in held_out.values()):
        raise ValueError(f"recipe.length={length}: the held-out text is too short; raise data.held_out_percent")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder / "tokenizer")
    for kind, stream in streams.items():
        write_atomically(folder / f"{kind}.npy", partial(_save, array=stream))
    write_atomically(
        folder / "held_out.npz", lambda path: _save_all(path, {k: v for k, v in held_out.items() if len(v)})
    )
    about = {
        "settings": wanted,
        "files": dict(Counter(file.kind for file in train)),
        "bytes": {kind: sum(f.size for f in train if f.kind == kind) for kind in STREAMS},
        "tokens": {kind: len(stream) for kind, stream in streams.items()},
        "held_out_sequences": {kind: len(rows) for kind, rows in held_out.items()},
        "digest": textfiles.digest((file.digest, [b""]) for file in corpus.files),
        "packages": corpus.packages,
        "refused": corpus.refused,
    }
    write_text(folder / "corpus.json", json.dumps(about, indent=1) + "\n")  # last: it marks the folder as whole


def _add_files(corpus: Corpus, path: str) -> None:
    """Text files of the user's own, whatever their licence."""
    seen = {file.digest for file in corpus.files}
    added = 0
    for _, file in textfiles.find(path, "data.files"):
        text = "".join(textfiles.pieces(file)) if textfiles.is_text(file) else ""
        digest = hashlib.sha256(text.encode()).hexdigest()
        if text and digest not in seen:
            seen.add(digest)
            kind = "code" if file.suffix == ".py" else "prose"
            corpus.files.append(TextFile("files", kind, text, digest))
            added += len(text.encode())
    corpus.files.sort(key=lambda file: file.digest)
    corpus.packages["files"] = {"version": None, "licence": "given by the user", "bytes": added}


def _sequences(stream: np.ndarray, length: int, settings: TextSettings) -> np.ndarray:
    """The first whole sequences of a stream, [n, length + 1]; neighbours share a token."""
    count = min((len(stream) - 1) // length if len(stream) else 0, settings.held_out_sequences)
    rows = [stream[i * length : (i + 1) * length + 1] for i in range(count)]
    kind = np.uint16 if stream.size and stream.max() < 1 << 16 else np.int32
    return np.stack(rows).astype(kind) if rows else np.empty((0, length + 1), dtype=kind)


def _save(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, array)


def _save_all(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
