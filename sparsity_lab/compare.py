"""One selection against another, document by document: differences of every metric, with intervals over documents.

    against(load(a), load(b), "a", "b").frame()     # A - B, cell by cell
    levels(load(a)).frame()                         # two-level - single-level, every pool

Both sides saw the same documents, so their difference scatters far less than either, and its interval is the one to ask
whether they differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from sparsity_lab.measurement import ENVELOPE
from sparsity_lab.metrics import METRICS
from sparsity_lab.results import Results

POOL = ("candidate_source_layer", "candidate_topk_blocks", "candidate_block_size")
SELECTION = ("share", "compress_ratio", *POOL, "index_source_layers", "window", "sinks", "exclude_window", "topk")
NAMED = ("model", "data", "scorer")  # what a difference shows of both sides


class Difference(Results):
    """A - B in every average, over the documents and layers that both have. Rows that are counted are A's.

    `tallies` holds A's, where the partner was measured too.

    Args:
        pairs: cell of A -> cell of B.
        cells: description of each pair, by the cell of A.
        what: the difference in words, "A - B"; names: of A and B, told: what they are.
    Raises:
        ValueError: no document or no layer in common.
    """

    def __init__(
        self, a: Results, b: Results, pairs: Mapping[str, str], cells: Mapping[str, Mapping[str, Any]],
        *, what: str, names: tuple[str, str] = ("A", "B"), told: Sequence[str] = (),
    ) -> None:  # fmt: skip
        common = {name: set(a.tallies[name]) & set(b.tallies[name]) for name in ("document", "layer")}
        for name, values in common.items():
            if not values:
                raise ValueError(f"{what}: no {name} in common, so nothing can be paired")
        known = b.tallies[["cell_id", "document", "layer"]].drop_duplicates().rename(columns={"cell_id": "partner"})
        own = a.tallies.assign(partner=a.tallies["cell_id"].map(dict(pairs))).dropna(subset="partner")
        tallies = own.merge(known, on=list(known))[list(a.tallies)]
        if tallies.empty:
            raise ValueError(f"{what}: no cell was measured on the same document and layer on both sides")
        super().__init__(tallies, cells, a.manifest)
        self.a, self.b, self.pairs = a, b, dict(pairs)
        self.what, self.names, self.told = what, names, tuple(told)

    def per_document(self, by: Sequence[str] = ("layer",)) -> pd.DataFrame:
        """See `Results.per_document`; a metric that either side leaves undefined is undefined."""
        one, other = self.a.per_document(by), self.b.per_document(by)
        one = one.assign(partner=one["cell_id"].map(self.pairs)).dropna(subset="partner")
        both = one.merge(
            other.rename(columns={"cell_id": "partner"}), on=["partner", *by, "document"], suffixes=("", "_b")
        )
        for name in METRICS:
            both[name] -= both[f"{name}_b"]
        return both[list(one.columns.drop("partner"))]

    def first(self) -> Results:
        """A alone, where its partner was measured too."""
        return Results(self.tallies, self.cells, self.manifest)

    def only(self, cells: Iterable[str], documents: Iterable[str] | None = None) -> Difference:
        """See `Results.only`; cells by their id in A."""
        return self.restricted(super().only(cells, documents).tallies)

    def restricted(self, tallies: pd.DataFrame) -> Difference:
        """Only the cells, documents and layers in `tallies`, some of its own."""
        cells = {key: self.cells[key] for key in dict.fromkeys(tallies["cell_id"])}
        pairs = {key: self.pairs[key] for key in cells}
        inner = self.a
        a = inner.restricted(tallies) if isinstance(inner, Difference) else Results(tallies, inner.cells, self.manifest)
        return Difference(a, self.b, pairs, cells, what=self.what, names=self.names, told=self.told)


def against(a: Results, b: Results, name_a: str = "A", name_b: str = "B") -> Difference:
    """A - B, paired by document and by scorer and selection.

    A field that has one value all over A and another all over B (the scorer, the ratio, a pool ...) is what is
    compared, and does not keep cells apart; `topk` always does. Bounds are left out unless there is nothing else.

    Raises:
        ValueError: nothing to pair, or cells with several partners.
    """
    left, right = _tested(a), _tested(b)
    compared = [f for f in ("scorer", *SELECTION[:-1]) if _constants_differ(left, right, f)]
    fields = [f for f in ("scorer", *SELECTION) if f not in compared]
    left_keys, right_keys = _keys(left, fields, name_a), _keys(right, fields, name_b)
    pairs = {cell: right_keys[key] for key, cell in left_keys.items() if key in right_keys}
    if not pairs:
        raise ValueError(
            f"{name_a} against {name_b}: no cell of the one has a partner in the other "
            f"(same {', '.join(_differing(left, right, fields))})"
        )
    cells = {one: dict(a.cells[one]) for one in pairs}
    for one, other in pairs.items():
        for name in NAMED:
            here, there = a.cells[one].get(name), b.cells[other].get(name)
            if here != there:
                cells[one][name] = f"{here} \u2212 {there}"
    told, what = [_side("A", name_a, left, compared), _side("B", name_b, right, compared)], "A \u2212 B"
    if isinstance(a, Difference):
        told, what = [*a.told, *told], f"{what} of {a.what}"
    return Difference(a, b, pairs, cells, what=what, names=(name_a, name_b), told=told)


def levels(results: Results, told: Sequence[str] = ()) -> Difference:
    """Two-level - single-level: every cell with a pool against the one without that is the same in all else.

    Layers up to the candidate source have no pool; leave them out before (`figures.table.behind_sources`).

    Raises:
        ValueError: no such pair.
    """

    def rest(cell: Mapping[str, Any]) -> str:
        return json.dumps({k: v for k, v in cell.items() if k not in POOL}, sort_keys=True, default=str)

    single = {rest(cell): key for key, cell in results.cells.items() if _missing(cell.get(POOL[0]))}
    pooled = {key: cell for key, cell in results.cells.items() if not _missing(cell.get(POOL[0]))}
    pairs = {key: single[rest(cell)] for key, cell in pooled.items() if rest(cell) in single}
    if not pairs:
        raise ValueError(
            "two-level against single-level: these results have no two-level cell with its single-level partner; "
            "measure both with selection=two_level"
        )
    cells = {key: results.cells[key] for key in pairs}
    return Difference(results, results, pairs, cells, what="two-level \u2212 single-level", told=told)


def _missing(value: Any) -> bool:
    return value is None or value is pd.NA or value != value


def _tested(results: Results) -> dict[str, dict[str, Any]]:
    tested = {
        key: cell
        for key, cell in results.cells.items()
        if cell["scorer"] not in ENVELOPE or not all(_missing(cell.get(f)) for f in ("index_source_layers", *POOL))
    }
    return tested or results.cells


def _values(cells: Mapping[str, Mapping[str, Any]], field: str) -> set[Any]:
    return {None if _missing(cell.get(field)) else cell[field] for cell in cells.values()}


def _constants_differ(left: Mapping[str, Any], right: Mapping[str, Any], field: str) -> bool:
    one, other = _values(left, field), _values(right, field)
    return len(one) == len(other) == 1 and one != other


def _differing(left: Mapping[str, Any], right: Mapping[str, Any], fields: Sequence[str]) -> list[str]:
    apart = [f for f in fields if not _values(left, f) & _values(right, f)]
    return apart or list(fields)


def _keys(cells: Mapping[str, Mapping[str, Any]], fields: Sequence[str], name: str) -> dict[tuple[Any, ...], str]:
    """Values of the fields -> cell."""
    out: dict[tuple[Any, ...], str] = {}
    for key, cell in cells.items():
        values = tuple(None if _missing(cell.get(f)) else cell[f] for f in fields)
        if values in out:
            raise ValueError(
                f"{name}: cells {out[values]} and {key} have the same scorer and selection, so neither can be paired; "
                "compare folders that hold one model, data and scorer options each"
            )
        out[values] = key
    return out


def _side(letter: str, name: str, cells: Mapping[str, Mapping[str, Any]], compared: Sequence[str]) -> str:
    """A: folder (scorer quest)."""
    values = [f"{field.replace('_', ' ')} {_values(cells, field).pop()}" for field in compared]
    return f"{letter}: {name}" + (f" ({', '.join(values)})" if values else "")
