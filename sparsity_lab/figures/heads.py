"""How far the heads that share a selection differ: the coverage of the worst of them against their mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sparsity_lab.compare import Difference
from sparsity_lab.figures.curves import label_edges, middle_k
from sparsity_lab.figures.look import (
    CURVE_COLOURS,
    MARKERS,
    STYLE,
    WIDTH,
    axis_label,
    columns_for,
    columns_that_fit,
    grid,
)
from sparsity_lab.figures.panels import panels
from sparsity_lab.figures.table import curve_table, facts, heading
from sparsity_lab.results import Results

MEAN, WORST = "coverage", "worst_head_coverage"


def head_spread(
    results: Results,
    *,
    topk: int | None = None,
    scorer: str | Iterable[str] | None = None,
    ratio: int | Iterable[int] | None = None,
    where: str | None = None,
) -> Figure:
    """A point a layer and curve: across the coverage of the heads' mean attention, up that of the worst head.

    On the diagonal all heads fare alike; the further below, the more the shared selection fails one of them. Lines are
    95 % intervals over documents. The worst head is measured on `measure.detail_rows` of the rows only.

    Raises:
        ValueError: not measured with detail rows; see also `table.curve_table`. topk: one k, None: the middle one.
    """
    choice: dict[str, Any] = {"scorer": scorer, "ratio": ratio, "where": where}
    if topk is None:
        topk = middle_k(curve_table(results, WORST, strict=False, **choice))
    table = curve_table(results, [MEAN, WORST], by=("layer",), topk=topk, **choice)
    if table.loc[~table["bound"], WORST].isna().all():
        raise ValueError(f"{WORST}: nothing to show, not measured for these cells (set measure.detail_rows)")
    signed = isinstance(results, Difference)
    more = [f"k = {topk}", "a point a layer", "worst head: detail rows only"]
    told = facts(results, table, None, more, bands="lines")
    parts = panels(table, split_ratios=True)
    names = list(dict.fromkeys(name for part in parts for name in part.tested["curve"]))
    columns = columns_for(len(parts))
    with mpl.rc_context(STYLE):
        figure, axes = grid(len(parts), columns, heading(results, table, "head spread"), told, 2.8)
        for i, (axis, part) in enumerate(zip(axes, parts, strict=True)):
            axis.set_title(part.title)
            _points(axis, part.tested, names)
            label = axis_label(WORST, short=False, signed=signed)
            label_edges(axis, i, len(axes), columns, axis_label(MEAN, short=True, signed=signed), label)
        _limits(axes[0], table[~table["bound"]], signed=signed)
        for axis in axes:
            axis.axline((0, 0), slope=1, color="#6e6e6e", linewidth=0.8, linestyle=(0, (4, 2)))
        entries = [Line2D([], [], label=name, linestyle="none", **_style(names, name)) for name in names]
        entries.append(
            Line2D(
                [],
                [],
                color="#6e6e6e",
                linewidth=0.8,
                linestyle=(0, (4, 2)),
                label="both changed alike" if signed else "all heads alike",
            )
        )
        figure.legend(handles=entries, loc="outside lower center", ncols=columns_that_fit(entries, WIDTH[columns]))
    figure.table = table
    return figure


def _style(names: list[str], name: str) -> dict[str, Any]:
    at = names.index(name)
    return {"color": CURVE_COLOURS[at % len(CURVE_COLOURS)], "marker": MARKERS[at % len(MARKERS)], "markersize": 4}


def _points(axis: Axes, tested: pd.DataFrame, names: list[str]) -> None:
    for name, rows in tested.groupby("curve", sort=False):
        rows = rows[rows[WORST].notna()]
        spans = {}
        for key, metric in (("xerr", MEAN), ("yerr", WORST)):
            ends = np.array([rows[metric] - rows[f"{metric}_low"], rows[f"{metric}_high"] - rows[metric]], dtype=float)
            spans[key] = np.clip(np.nan_to_num(ends), 0, None)
        axis.errorbar(
            rows[MEAN], rows[WORST], linestyle="none", elinewidth=0.6, alpha=0.85, **spans, **_style(names, str(name))
        )


def _limits(axis: Axes, tested: pd.DataFrame, *, signed: bool) -> None:
    if signed:
        return
    low = min(tested[MEAN].min(), tested[WORST].min())
    axis.set_xlim(max(0.0, low - 0.05), 1.02)
    axis.set_ylim(max(0.0, low - 0.05), 1.02)
