"""Cells: one fully resolved selection each, and the plan that lets all cells of a pass share their work."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsity_lab.dense import SHARES

LARGEST = 2**30  # ranks are int32


def _whole(key: str, value: Any, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key}={value!r}: must be a whole number")
    if value < low:
        raise ValueError(f"{key}={value}: must be at least {low}")
    if value > LARGEST:
        raise ValueError(f"{key}={value}: must be at most {LARGEST}")
    return value


@dataclass(frozen=True)
class Candidate:
    """The two-level selection: later layers search only in the pool that `source_layer` publishes."""

    source_layer: int
    topk_blocks: int
    block_size: int

    def __post_init__(self) -> None:
        _whole("selection.candidate.source_layer", self.source_layer, 0)
        _whole("selection.candidate.topk_blocks", self.topk_blocks, 1)
        _whole("selection.candidate.block_size", self.block_size, 1)


@dataclass(frozen=True)
class Selection:
    """What a query may attend to.

    compress_ratio: tokens per compressed position; topk: positions selected; window: last tokens always attended raw;
    share: one selection a `layer` or one a `kv_head`; exclude_window: leave positions that the window covers out of the
    choice; sinks: first compressed positions always kept, inside the budget; candidate: two-level selection or None.
    """

    compress_ratio: int = 1
    topk: int = 64
    window: int = 128
    share: str = "layer"
    exclude_window: bool = False
    sinks: int = 0
    candidate: Candidate | None = None

    def __post_init__(self) -> None:
        _whole("selection.compress_ratio", self.compress_ratio, 1)
        _whole("selection.topk", self.topk, 1)
        _whole("selection.window", self.window, 0)
        _whole("selection.sinks", self.sinks, 0)
        if self.share not in SHARES:
            raise ValueError(f"selection.share={self.share!r}: must be one of {', '.join(SHARES)}")
        if not isinstance(self.exclude_window, bool):
            raise ValueError(f"selection.exclude_window={self.exclude_window!r}: must be true or false")
        if self.sinks > self.topk:
            raise ValueError(f"selection.sinks={self.sinks}: must be at most selection.topk={self.topk}")
        if self.candidate is not None:
            self._check_pool(self.candidate)

    def _check_pool(self, pool: Candidate) -> None:
        # the pinned newest block may hold a single visible position
        least = pool.topk_blocks * pool.block_size - (pool.block_size - 1)
        if least < self.topk:
            raise ValueError(
                f"selection.candidate: topk_blocks={pool.topk_blocks} x block_size={pool.block_size} may hold only "
                f"{least} visible positions, fewer than selection.topk={self.topk}; "
                "topk_blocks * block_size - (block_size - 1) must be at least topk"
            )
        sink_blocks = -(-self.sinks // pool.block_size)
        if sink_blocks + 1 > pool.topk_blocks:
            raise ValueError(
                f"selection.candidate.topk_blocks={pool.topk_blocks}: must hold the {sink_blocks} blocks of "
                f"selection.sinks={self.sinks} and the newest block"
            )


@dataclass(frozen=True)
class Cell:
    """A scorer (by the name it has in the pass) and a selection."""

    scorer: str
    selection: Selection

    def fields(self) -> dict[str, Any]:
        """Flat description, one value a column."""
        flat = dataclasses.asdict(self.selection)
        pool = flat.pop("candidate") or dict.fromkeys(("source_layer", "topk_blocks", "block_size"))
        return {"scorer": self.scorer, **flat, **{f"candidate_{k}": v for k, v in pool.items()}}

    def label(self) -> str:
        """Short name for messages."""
        s = self.selection
        pool = s.candidate
        tail = f" pool {pool.topk_blocks}x{pool.block_size} of layer {pool.source_layer}" if pool else ""
        return f"{self.scorer} ratio {s.compress_ratio} top-{s.topk}{tail}"


def cell_id(cell: Cell, scorer: Mapping[str, Any], context: Mapping[str, Any]) -> str:
    """16 hex digits of everything that changes a cell's numbers: the selection, the scorer's own description, and the
    pass (model, dtype, data, rows, seed ...), and nothing else (not the number of documents, not its neighbours)."""
    fields = {k: v for k, v in cell.fields().items() if k != "scorer"}
    text = json.dumps({"selection": fields, "scorer": scorer, "pass": context}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def expand(scorer: str | Sequence[str], **selection: Any) -> tuple[list[Cell], list[dict[str, Any]]]:
    """Every combination of list-valued fields: the cells, and for each invalid point its fields and the `reason`.

    `candidate` takes None, a dict of `Candidate`'s fields (whose values may be lists too), or a list of those.
    `zipped`, a list of dicts, gives matched values instead of a product, as in
    zipped=[dict(topk=64, compress_ratio=1), dict(topk=16, compress_ratio=4)].

    Raises:
        ValueError: a field that does not exist, or no value at all for one.
    """
    names = {field.name for field in dataclasses.fields(Selection)}
    zipped = _listed(selection.pop("zipped", None) or {})
    if not all(isinstance(matched, Mapping) for matched in zipped):
        raise ValueError(f"selection.zipped={zipped}: must be a list of mappings, each a matched set of fields")
    for key in set(selection).union(*zipped):
        if key not in names:
            raise ValueError(f"selection.{key}: no such field; there are {', '.join(sorted(names))}")
    if not _listed(scorer):
        raise ValueError("scorer=[]: needs at least one value")
    cells: list[Cell] = []
    failed: list[dict[str, Any]] = []
    for matched in zipped:
        values = {**selection, **matched}
        axes = {k: _pools(v) if k == "candidate" else _listed(v) for k, v in values.items()}
        for key, axis in axes.items():
            if not axis:
                raise ValueError(f"selection.{key}=[]: needs at least one value")
        for name, *point in itertools.product(_listed(scorer), *axes.values()):
            fields = dict(zip(axes, point, strict=True))
            try:
                pool = fields.pop("candidate", None)
                cells.append(Cell(name, Selection(**fields, candidate=pool and Candidate(**pool))))
            except ValueError as error:
                flat = {f"candidate_{k}": v for k, v in (pool or {}).items()}
                failed.append({"scorer": name, **fields, **flat, "reason": str(error)})
    return list(dict.fromkeys(cells)), failed


def grid(scorer: str | Sequence[str] = "quest", **selection: Any) -> list[Cell]:
    """Like `expand`, for notebooks: grid("quest", topk=[16, 32], compress_ratio=[1, 4]); an invalid point raises."""
    cells, failed = expand(scorer, **selection)
    if failed:
        raise ValueError(failed[0]["reason"])
    return cells


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _pools(value: Any) -> list[dict[str, Any] | None]:
    """Plain descriptions of pools, lists inside them multiplied out."""
    out: list[dict[str, Any] | None] = []
    wanted = {field.name for field in dataclasses.fields(Candidate)}
    for entry in _listed(value):
        if entry is None:
            out.append(None)
            continue
        if not isinstance(entry, (Candidate, Mapping)):
            raise ValueError(f"selection.candidate={entry!r}: must be null, the fields of a pool, or a list of those")
        entry = dataclasses.asdict(entry) if isinstance(entry, Candidate) else dict(entry)
        if set(entry) != wanted:
            raise ValueError(f"selection.candidate={entry}: needs exactly {', '.join(sorted(wanted))}")
        out += [dict(zip(entry, p, strict=True)) for p in itertools.product(*map(_listed, entry.values()))]
    return out


def with_envelope(cells: Iterable[Cell], scorers: Sequence[str] = ("oracle", "recency", "random")) -> list[Cell]:
    """The cells and, for each, its single-level bounds by other scorers, without repeats."""
    cells = list(cells)
    bounds = [Cell(name, dataclasses.replace(c.selection, candidate=None)) for c in cells for name in scorers]
    return list(dict.fromkeys([*cells, *bounds]))


def check_cell(cell: Cell, *, length: int, num_layers: int, layers: Collection[int]) -> None:
    """Raise ValueError when the cell cannot be measured on documents of `length` tokens and on these layers."""
    ratio, pool = cell.selection.compress_ratio, cell.selection.candidate
    if ratio > length:
        raise ValueError(f"selection.compress_ratio={ratio}: larger than the documents' {length} tokens")
    if pool is None:
        return
    if pool.source_layer >= num_layers:
        raise ValueError(
            f"selection.candidate.source_layer={pool.source_layer}: the model has layers 0 to {num_layers - 1}"
        )
    if pool.source_layer not in layers:
        raise ValueError(
            f"selection.candidate.source_layer={pool.source_layer}: not among the measured layers {sorted(layers)} "
            "(sliding-window layers cannot be a source)"
        )
    if pool.source_layer == max(layers):
        raise ValueError(
            f"selection.candidate.source_layer={pool.source_layer}: no measured layer after it would use its pool"
        )
