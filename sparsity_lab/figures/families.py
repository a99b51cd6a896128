"""Families of cells that differ in one field: compress ratios, block sizes, pool sizes, source layers; a curve a k."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from sparsity_lab.compare import Difference
from sparsity_lab.figures.curves import BEHIND, label_edges
from sparsity_lab.figures.look import LETTERS, MARKERS, STYLE, WIDTH, axis_label, columns_for, columns_that_fit, grid
from sparsity_lab.figures.panels import MAX_MAPS
from sparsity_lab.figures.table import (
    CURVE,
    POOL,
    behind_sources,
    context_columns,
    curve_table,
    facts,
    field_label,
    heading,
    varying,
)
from sparsity_lab.results import Results

SIZE = "pool_positions"
# family -> the column it goes over, and what its axis says
FAMILIES = {
    "ratio": ("compress_ratio", "compress ratio"),
    "block_size": (POOL[2], "positions a block, in pools of one size"),
    "pool_size": (SIZE, "positions in the pool"),
    "source": (POOL[0], "candidate source layer"),
}
REFERENCE: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 0.9}


def family(
    results: Results,
    by: str = "ratio",
    metric: str = "coverage",
    *,
    layer: int | None = None,
    topk: int | Iterable[int] | None = None,
    scorer: str | Iterable[str] | None = None,
    ratio: int | Iterable[int] | None = None,
    where: str | None = None,
) -> Figure:
    """One metric over the compress ratio, the block size, the pool size or the candidate source layer: a curve a k,
    dark to light, and an axes for every setting of all else that was measured at two values or more.

    Families of pools are averaged over the layers behind every source, the only ones that search in a pool. Dashed: the
    oracle in the family of ratios, single-level selection in the others.

    Raises:
        ValueError: by is no family, nothing was measured at two of its values, or too many axes; see also
            `table.curve_table`.
    """
    if by not in FAMILIES:
        raise ValueError(f"by={by!r}: must be one of {', '.join(FAMILIES)}")
    choice: dict[str, Any] = {"scorer": scorer, "ratio": ratio, "topk": topk, "where": where}
    column, across = FAMILIES[by]
    told: list[str] = []
    if by != "ratio":
        ids = curve_table(results, metric, strict=False, **choice)["cell_id"]
        results = behind_sources(results.only([*ids, *_single_level(results)]))
        told = [BEHIND] if layer is None else []
        where = None
    table = curve_table(results, metric, layer=layer, **choice | {"where": where})
    table[SIZE] = table[POOL[1]] * table[POOL[2]]
    parts = _parts(table[~table["bound"]], by)
    references = table[table["scorer"] == "oracle"] if by == "ratio" else table[table[POOL[0]].isna()]
    title = heading(results, table, metric, f" by {by.replace('_', ' ')}")
    told = facts(results, table, layer, told)
    return _draw(parts, references, metric, (column, across), title, told, signed=isinstance(results, Difference))


def _single_level(results: Results) -> list[str]:
    """Cells without a pool, which a choice among pools would leave out."""
    return [key for key, cell in results.cells.items() if cell.get(POOL[0]) is None]


def _rest(table: pd.DataFrame, by: str) -> list[str]:
    """The columns that are the same all over an axes."""
    fixed = [c for c in [*context_columns(table), *CURVE, "compress_ratio", SIZE] if c in table]
    free = {
        "ratio": ["compress_ratio", SIZE],
        "block_size": POOL[1:],
        "pool_size": [POOL[1], SIZE],
        "source": [POOL[0]],
    }
    return [c for c in dict.fromkeys(fixed) if c not in free[by]]


def _parts(tested: pd.DataFrame, by: str) -> list[tuple[str, pd.DataFrame]]:
    """(title, rows) of every axes."""
    column, _ = FAMILIES[by]
    tested = tested if by == "ratio" else tested[tested[POOL[0]].notna()]
    rest = _rest(tested, by)
    groups = [rows for _, rows in tested.groupby(rest, dropna=False, sort=False) if varying(rows, [column])]
    if not groups:
        raise ValueError(
            f"by={by}: nothing was measured at two values of it with all else the same; sweep "
            + ("selection.compress_ratio" if by == "ratio" else "selection.candidate")
        )
    if len(groups) > MAX_MAPS:
        raise ValueError(f"{len(groups)} axes, more than {MAX_MAPS}; choose some by scorer, ratio or where")
    shown = pd.concat(groups)
    differ = varying(shown, [c for c in rest if c != "scorer_options"])
    differ = [c for c in differ if c != POOL[1]]  # positions and block size tell it
    return [(_title(rows, differ) or str(rows["curve"].iloc[0]), rows) for rows in groups]


def _title(rows: pd.DataFrame, differ: Sequence[str]) -> str:
    first = rows.iloc[0]
    told = {SIZE: f"pools of {first[SIZE]} positions"}
    texts = [told.get(c, field_label(c, first[c])) for c in differ if pd.notna(first[c])]
    return ", ".join(text.replace(" ", "\u00a0") for text in texts)  # lines break between them


def _draw(
    parts: Sequence[tuple[str, pd.DataFrame]],
    references: pd.DataFrame,
    metric: str,
    along: tuple[str, str],
    title: str,
    told: Sequence[str],
    *,
    signed: bool,
) -> Figure:
    column, across = along
    budgets = sorted({int(k) for _, rows in parts for k in rows["topk"]})
    columns = columns_for(len(parts))
    letters = int(1.05 * LETTERS * WIDTH[columns] / columns)
    styles = k_styles(budgets)
    used = []
    with mpl.rc_context(STYLE):
        figure, axes = grid(len(parts), columns, title, told, 3.1 if columns == 1 else 2.3)
        for i, (axis, (name, rows)) in enumerate(zip(axes, parts, strict=True)):
            values = sorted({v for _, one in parts for v in one[column]})
            _scale(axis, column, values)
            axis.set_title(textwrap.fill(name, letters))
            same = _matching(references, rows, column)
            used.append(same)
            for k, style in styles.items():
                _reference(axis, same[same["topk"] == k], metric, column, style["color"])
                _curve(axis, rows[rows["topk"] == k], metric, column, style)
            if signed:
                axis.axhline(0, color="#1a1a1a", linewidth=0.6)
            label = axis_label(metric, short=len(axes) > 1, signed=signed)
            label_edges(axis, i, len(axes), columns, across, label)
        entries = [Line2D([], [], label=f"k = {k}", **style) for k, style in styles.items()]
        if any(len(same) for same in used):
            name = "oracle" if column == "compress_ratio" else "single-level"
            entries.append(Line2D([], [], color="#444", label=name, **REFERENCE))
        figure.legend(handles=entries, loc="outside lower center", ncols=columns_that_fit(entries, WIDTH[columns]))
    figure.table = pd.concat([*(rows for _, rows in parts), *used]).drop_duplicates("cell_id")
    return figure


def k_styles(budgets: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Colour, dark to light, and marker of every k."""
    places = [0.82 * i / max(len(budgets) - 1, 1) for i in range(len(budgets))]
    colours = [mpl.colors.to_hex(mpl.colormaps["viridis"](place)) for place in places]
    return {
        k: {"color": colour, "marker": MARKERS[i % len(MARKERS)], "markersize": 4, "linewidth": 1.4}
        for i, (k, colour) in enumerate(zip(budgets, colours, strict=True))
    }


def _matching(references: pd.DataFrame, rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """The references of an axes: alike in all that both have."""
    keys = [*context_columns(rows), "topk"]
    keys += [] if column == "compress_ratio" else ["compress_ratio", "scorer", "scorer_options", "index_source_layers"]
    keys = [c for c in keys if c != SIZE]
    found, wanted = (pd.MultiIndex.from_frame(table[keys].astype(object)) for table in (references, rows))
    return references[found.isin(wanted)]


def _reference(axis: Axes, same: pd.DataFrame, metric: str, column: str, colour: Any) -> None:
    same = same[same[metric].notna()]
    if same.empty:
        return
    if column == "compress_ratio":
        same = same.sort_values(column)
        axis.plot(same[column], same[metric], color=colour, **REFERENCE)
    else:
        axis.axhline(same[metric].iloc[0], color=colour, **REFERENCE)


def _curve(axis: Axes, rows: pd.DataFrame, metric: str, column: str, style: Mapping[str, Any]) -> None:
    rows = rows[rows[metric].notna()].sort_values(column)
    if rows.empty:
        return
    x, value = rows[column].to_numpy(dtype=float), rows[metric].to_numpy()
    axis.plot(x, value, **style)
    low, high = rows[f"{metric}_low"].to_numpy(), rows[f"{metric}_high"].to_numpy()
    if pd.notna(low).any():
        axis.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)


def _scale(axis: Axes, column: str, values: Sequence[int]) -> None:
    if column == POOL[0]:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        return
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [f"{value:.0f}" for value in values])
    axis.xaxis.set_minor_locator(NullLocator())
