"""Cells: one fully resolved selection each, and the plan that lets all cells of a pass share their work."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsity_lab.dense import SHARES
from sparsity_lab.topology import NativeSelection, Topology, check_pool

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
    choice; sinks: first compressed positions always kept, inside the budget; candidate: two-level selection or None;
    index_source_layers: layers that select, each later one reusing what the latest of them selected (layers before the
    first are left out), or None = every layer for itself.
    """

    compress_ratio: int = 1
    topk: int = 64
    window: int = 128
    share: str = "layer"
    exclude_window: bool = False
    sinks: int = 0
    candidate: Candidate | None = None
    index_source_layers: tuple[int, ...] | None = None

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
        if self.index_source_layers is not None:
            object.__setattr__(self, "index_source_layers", _source_layers(self.index_source_layers))

    def settings(self) -> dict[str, Any]:
        """The values under `selection` in a configuration that give this one."""
        pool = self.candidate
        names = [field.name for field in dataclasses.fields(Candidate)]
        return dataclasses.asdict(self) | {
            "index_source_layers": None if self.index_source_layers is None else list(self.index_source_layers),
            "candidate": {name: pool and getattr(pool, name) for name in names},
        }

    def _check_pool(self, pool: Candidate) -> None:
        try:
            check_pool(self.topk, pool.topk_blocks, pool.block_size)
        except ValueError as error:
            text = str(error).replace("candidate_", "selection.candidate.").replace(" topk=", " selection.topk=")
            raise ValueError(text) from None
        sink_blocks = -(-self.sinks // pool.block_size)
        if sink_blocks + 1 > pool.topk_blocks:
            raise ValueError(
                f"selection.candidate.topk_blocks={pool.topk_blocks}: must hold the {sink_blocks} blocks of "
                f"selection.sinks={self.sinks} and the newest block"
            )


def _source_layers(value: Any) -> tuple[int, ...]:
    key = "selection.index_source_layers"
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{key}={value!r}: must be null or a list of layers")
    layers = tuple(_whole(key, layer, 0) for layer in value)
    if list(layers) != sorted(set(layers)):
        raise ValueError(f"{key}={list(layers)}: must be ascending, each layer once")
    return layers


@dataclass(frozen=True)
class Cell:
    """A scorer (by the name it has in the pass) and a selection."""

    scorer: str
    selection: Selection

    def fields(self) -> dict[str, Any]:
        """Flat description, one value a column; index_source_layers as text (0,8,16)."""
        flat = dataclasses.asdict(self.selection)
        pool = flat.pop("candidate") or dict.fromkeys(("source_layer", "topk_blocks", "block_size"))
        sources = flat["index_source_layers"]
        flat["index_source_layers"] = None if sources is None else ",".join(map(str, sources))
        return {"scorer": self.scorer, **flat, **{f"candidate_{k}": v for k, v in pool.items()}}

    def label(self) -> str:
        """Short name for messages."""
        s = self.selection
        pool = s.candidate
        tail = f" pool {pool.topk_blocks}x{pool.block_size} of layer {pool.source_layer}" if pool else ""
        if s.index_source_layers is not None:
            tail += f" sources {','.join(map(str, s.index_source_layers))}"
        return f"{self.scorer} ratio {s.compress_ratio} top-{s.topk}{tail}"


def cell_id(cell: Cell, scorer: Mapping[str, Any], context: Mapping[str, Any]) -> str:
    """16 hex digits of everything that changes a cell's numbers: the selection, the scorer's own description, and the
    pass (model, dtype, data, rows, seed ...), and nothing else (not the number of documents, not its neighbours)."""
    fields = {k: v for k, v in cell.fields().items() if k != "scorer"}
    if fields["index_source_layers"] is None:
        del fields["index_source_layers"]  # younger than the first results, whose ids must stay
    text = json.dumps({"selection": fields, "scorer": scorer, "pass": context}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def expand(scorer: str | Sequence[str], **selection: Any) -> tuple[list[Cell], list[dict[str, Any]]]:
    """Every combination of list-valued fields: the cells, and for each invalid point its fields and the `reason`.

    `candidate` takes None, a dict of `Candidate`'s fields (whose values may be lists too), or a list of those;
    `index_source_layers` None, a list of layers, or a list of those.
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
        axes = {k: _AXES.get(k, _listed)(v) for k, v in values.items()}
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


def _source_lists(value: Any) -> list[Any]:
    """A flat list of layers is one value; a list that holds lists or null is several."""
    several = isinstance(value, (list, tuple)) and (
        not value or any(v is None or isinstance(v, (list, tuple)) for v in value)
    )
    return list(value) if several else [value]


_AXES: dict[str, Callable[[Any], list[Any]]] = {"candidate": _pools, "index_source_layers": _source_lists}


def with_envelope(cells: Iterable[Cell], scorers: Sequence[str] = ("oracle", "recency", "random")) -> list[Cell]:
    """The cells and, for each, its bounds by other scorers, single-level and each layer for itself, without repeats."""
    cells = list(cells)
    free = [dataclasses.replace(c.selection, candidate=None, index_source_layers=None) for c in cells]
    return list(dict.fromkeys([*cells, *(Cell(name, selection) for selection in free for name in scorers)]))


def index_sources(named: Sequence[int] | None, scorer: Any) -> tuple[int, ...] | None:
    """The layers that select: those a selection names, else those of its scorer (`native` has some); None = all."""
    found = getattr(scorer, "index_source_layers", None) if named is None else named
    return None if found is None else tuple(found)


def cell_topology(
    ratio: int, sources: Sequence[int] | None, num_layers: int, native: NativeSelection | None = None
) -> Topology:
    """Who selects for whom in a cell. Layers to which it does not apply have ratio 0: those before its first source
    and, where the model compresses keys itself, those of another ratio.

    Raises:
        ValueError: sources that the model does not have, or none that selects at this ratio.
    """
    if sources and sources[-1] >= num_layers:
        raise ValueError(f"selection.index_source_layers={list(sources)}: the model has layers 0 to {num_layers - 1}")
    if native is None or not native.compressed:
        return Topology.attached(num_layers, ratio, sources)
    own = native.topology.compress_ratios
    if ratio not in own:
        raise ValueError(
            f"selection.compress_ratio={ratio}: the model compresses its keys by {sorted(set(own) - {0})} only"
        )
    mine = [layer for layer in (range(num_layers) if sources is None else sources) if own[layer] == ratio]
    if not mine:
        raise ValueError(
            f"selection.index_source_layers={list(sources or ())}: none of them has selection.compress_ratio={ratio}"
        )
    ratios = [ratio if own[layer] == ratio and layer >= mine[0] else 0 for layer in range(num_layers)]
    return Topology(tuple(ratios), tuple(mine), tuple(mine))


def check_cell(
    cell: Cell,
    *,
    length: int,
    num_layers: int,
    layers: Collection[int],
    native: NativeSelection | None = None,
    sources: Sequence[int] | None = None,
) -> None:
    """Raise ValueError when the cell cannot be measured on documents of `length` tokens and on these layers.

    native: the model's own sparse attention; sources: see `index_sources`.
    """
    selection = cell.selection
    if selection.compress_ratio > length:
        raise ValueError(
            f"selection.compress_ratio={selection.compress_ratio}: larger than the documents' {length} tokens"
        )
    if native is not None and native.compressed and selection.window != native.window:
        raise ValueError(
            f"selection.window={selection.window}: the model attends to a raw window of {native.window} tokens beside "
            f"its compressed keys; take selection=native, or set selection.window={native.window}"
        )
    topology = cell_topology(selection.compress_ratio, sources, num_layers, native)
    follows = {layer: topology.index_source(layer) for layer in sorted(layers) if topology.compress_ratios[layer]}
    if not follows:
        raise ValueError(
            f"selection.compress_ratio={selection.compress_ratio}: applies to none of the measured layers "
            f"{sorted(layers)}, with sources {list(topology.index_source_layers)}"
        )
    for layer, source in follows.items():
        if source not in layers:
            raise ValueError(
                f"selection.index_source_layers: layer {layer} reuses the selection of layer {source}, which is not "
                f"among the measured layers {sorted(layers)} (sliding-window layers cannot be a source)"
            )
    if selection.candidate is not None:
        _check_source(selection.candidate.source_layer, num_layers, layers, topology)


def _check_source(source: int, num_layers: int, layers: Collection[int], topology: Topology) -> None:
    key = f"selection.candidate.source_layer={source}"
    if source >= num_layers:
        raise ValueError(f"{key}: the model has layers 0 to {num_layers - 1}")
    if source not in layers:
        raise ValueError(
            f"{key}: not among the measured layers {sorted(layers)} (sliding-window layers cannot be a source)"
        )
    if source not in topology.index_source_layers:
        raise ValueError(f"{key}: must be one of the layers that select, {list(topology.index_source_layers)}")
    if not any(layer in layers for layer in topology.index_source_layers if layer > source):
        raise ValueError(f"{key}: no measured layer after it would use its pool")
