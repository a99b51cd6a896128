"""Token documents, and cutting a stream of text into them.

Shapes: t tokens of a document. A document's tokens depend on the source, the tokenizer, `length` and `seed`, never on
how many documents are asked for or on the shard that asks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, overload

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Document:
    """One fixed-length piece of a source. `index` is its place there, the same for every count, skip and shard."""

    index: int
    tokens: Tensor  # int64 [t], on the CPU
    name: str  # for people: the source and the file or topic in which the document starts

    @property
    def id(self) -> str:
        """First 16 hex digits of the sha256 over the tokens as little-endian int64: the same tokens, the same id."""
        return hashlib.sha256(self.tokens.numpy().astype("<i8").tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Documents(Sequence[Document]):
    """Documents of one source, in order of their index.

    `source` says where they come from (name, length, seed, skip, and a digest of the content) but not how many there
    are nor which shard this is, so runs that differ only in those can be merged.
    """

    items: tuple[Document, ...]
    source: dict[str, Any]

    @overload
    def __getitem__(self, key: int) -> Document: ...
    @overload
    def __getitem__(self, key: slice) -> Documents: ...
    def __getitem__(self, key: int | slice) -> Document | Documents:
        return Documents(self.items[key], self.source) if isinstance(key, slice) else self.items[key]

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"Documents({len(self)} of {self.source})"


class CutOptions(TypedDict, total=False):
    """The options that every source takes besides `num_documents`, `length` and `seed`; see `Cut`."""

    skip: int
    shard: int
    num_shards: int
    vocab_size: int | None


@dataclass(frozen=True)
class Cut:
    """Which documents to cut.

    num_documents: how many, over all shards.  length: tokens of each.  seed: the order of files or topics.
    skip: documents to leave out at the start (a held-out split).  shard, num_shards: keep those whose index i has
    i % num_shards == shard.  vocab_size: token ids must be below it; taken from the tokenizer when None.
    """

    num_documents: int
    length: int
    seed: int = 0
    skip: int = 0
    shard: int = 0
    num_shards: int = 1
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        least = {"num_documents": 1, "length": 2, "seed": 0, "skip": 0, "shard": 0, "num_shards": 1}
        if self.vocab_size is not None:
            least["vocab_size"] = 1
        for key, low in least.items():
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"data.{key}={value!r}: must be an integer")
            if value < low:
                raise ValueError(f"data.{key}={value}: must be at least {low}")
        if self.shard >= self.num_shards:
            raise ValueError(f"data.shard={self.shard}: must be below num_shards={self.num_shards}")
        if not self.indices:
            raise ValueError(
                f"data.num_shards={self.num_shards}: shard={self.shard} gets none of the "
                f"num_documents={self.num_documents} documents"
            )

    @property
    def stop(self) -> int:
        """One past the last index over all shards."""
        return self.skip + self.num_documents

    @property
    def indices(self) -> list[int]:
        """The indices of this shard, ascending."""
        return [i for i in range(self.skip, self.stop) if i % self.num_shards == self.shard]

    def describe(self, name: str, digest: str, **more: Any) -> dict[str, Any]:
        """The `source` of `Documents`."""
        return {"name": name, "length": self.length, "seed": self.seed, "skip": self.skip, "digest": digest, **more}

    def too_little(self, name: str, tokens: int, fit: int) -> ValueError:
        """The error for a source that ends before document `stop`."""
        skipped = f" after skip={self.skip}" if self.skip else ""
        return ValueError(
            f"data={name} holds {tokens:,} tokens, in which {fit:,} documents of length={self.length} fit; asked for "
            f"num_documents={self.num_documents}{skipped}. Lower data.num_documents, data.length or data.skip, or give "
            "more text"
        )


@dataclass(frozen=True)
class Item:
    """One file, topic or line of a source. `pieces` yields its text in order, read only when called."""

    name: str
    pieces: Callable[[], Iterable[str]]


def shuffled(count: int, seed: int) -> list[int]:
    """A fixed order of `count` sorted things: a permutation from a numpy Generator with this seed."""
    return [int(i) for i in np.random.default_rng(seed).permutation(count)]


def cut_text(tokenizer: Any, items: Iterable[Item], cut: Cut, name: str, source: dict[str, Any]) -> Documents:
    """Tokenises `items` one after the other and cuts the stream; stops as soon as the last document is full.

    Between items stands the tokenizer's end-of-text token, or a newline when it has none.
    Raises ValueError: too little text (with how much there is); a token id outside the vocabulary.
    """
    vocab_size = cut.vocab_size if cut.vocab_size is not None else vocabulary(tokenizer)
    wanted, end = set(cut.indices), cut.stop
    found: list[Document] = []
    carry = np.empty(0, dtype=np.int64)
    started = ""  # the item in which the carried tokens begin
    seen = index = 0
    for item_name, ids in _token_runs(tokenizer, items):
        check_ids(ids, vocab_size, f"data={name}, {item_name}")
        seen += len(ids)
        if not len(carry):
            started = item_name
        carry = np.concatenate([carry, ids])
        while len(carry) >= cut.length and index < end:
            if index in wanted:
                tokens = torch.from_numpy(carry[: cut.length].copy())
                found.append(Document(index, tokens, f"{name}/{index} {started}".strip()))
            carry, index, started = carry[cut.length :], index + 1, item_name
        if index == end:
            return Documents(tuple(found), source)
    raise cut.too_little(name, seen, index)


def _token_runs(tokenizer: Any, items: Iterable[Item]) -> Iterator[tuple[str, np.ndarray]]:
    """(item name, token ids int64 [n]) in stream order, the separator counted with the item it ends."""
    eos = getattr(tokenizer, "eos_token_id", None)
    separator = np.array([eos], dtype=np.int64) if eos is not None else encode(tokenizer, "\n")
    last: Item | None = None
    for item in items:
        for piece in item.pieces():
            ids = encode(tokenizer, piece)
            if not len(ids):
                continue
            if last is not None and last is not item:
                yield last.name, separator
            yield item.name, ids
            last = item


def encode(tokenizer: Any, text: str) -> np.ndarray:
    """Token ids int64 [n] of a text, nothing added. verbose=False: a stream may be longer than the model's context."""
    return np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)


def vocabulary(tokenizer: Any) -> int | None:
    """Number of token ids that the tokenizer knows (added tokens included), None when it does not say."""
    try:
        return len(tokenizer)
    except TypeError:
        return None


def check_ids(ids: np.ndarray, vocab_size: int | None, where: str) -> None:
    """Raises ValueError when a token id is negative or not below `vocab_size`."""
    if not len(ids):
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0:
        raise ValueError(f"{where}: token id {low} is negative")
    if vocab_size is not None and high >= vocab_size:
        raise ValueError(f"{where}: token id {high} is outside the vocabulary, must be below vocab_size={vocab_size}")
