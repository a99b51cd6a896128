"""Metrics as heat maps of layer x k."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from sparsity_lab.compare import Difference
from sparsity_lab.figures.curves import OVER, label_edges
from sparsity_lab.figures.look import STYLE, axis_label, grid
from sparsity_lab.figures.panels import by_curve
from sparsity_lab.figures.table import curve_table, facts, heading
from sparsity_lab.results import Results


def by_layer(
    results: Results,
    metric: str = "coverage",
    *,
    scorer: str | Iterable[str] | None = None,
    ratio: int | Iterable[int] | None = None,
    topk: int | Iterable[int] | None = None,
    where: str | None = None,
) -> Figure:
    """One metric as a heat map of layer x k: an axes a curve (scorer, pool) and ratio.

    Hatched where it is undefined, mostly because every row is saturated. For the arguments and errors see
    `table.curve_table`.
    """
    table = curve_table(results, metric, by=("layer",), scorer=scorer, ratio=ratio, topk=topk, where=where)
    told = facts(results, table, bands="")
    return draw_by_layer(table, metric, told, heading(results, table, metric), signed=isinstance(results, Difference))


def draw_by_layer(table: pd.DataFrame, metric: str, told: Sequence[str], title: str, *, signed: bool) -> Figure:
    """`by_layer` of a table that `curve_table` made with by=("layer",); `told` goes under the title."""
    parts = by_curve(table)
    layers, budgets = sorted(table["layer"].unique()), sorted(table["topk"].unique())
    count = table.loc[~table["bound"], "curve"].nunique()
    columns = count if 1 < count <= 3 else min(len(parts), 3)
    shown = pd.concat([rows for _, rows in parts])[metric]
    low, high = (shown.min(), shown.max()) if signed else (0, shown.max() if metric == "output_error" else 1)
    undefined = table[~table["bound"] & table[metric].isna()]
    if len(undefined):
        told = [*told, "hatched: " + ("undefined" if undefined["rows"].any() else "every row saturated")]
    with mpl.rc_context(STYLE):
        figure, axes = grid(len(parts), columns, title, told, max(2.3, 0.09 * len(layers)))
        for i, (axis, (title, part)) in enumerate(zip(axes, parts, strict=True)):
            cells = part.pivot(index="layer", columns="topk", values=metric).reindex(index=layers, columns=budgets)
            axis.patch.set(hatch="////", edgecolor="#777", facecolor="white")
            axis.grid(visible=False)
            image = axis.imshow(cells, aspect="auto", origin="lower", cmap="viridis", vmin=low, vmax=high)
            axis.set_title(title)
            ticks = range(0, len(layers), -(-len(layers) // 16))
            axis.set_yticks(ticks, [str(layers[at]) for at in ticks])
            axis.set_xticks(range(len(budgets)), [str(k) for k in budgets])
            label_edges(axis, i, len(axes), columns, OVER["topk"], "layer")
        figure.colorbar(image, ax=axes, label=axis_label(metric, short=False, signed=signed), aspect=40)
    figure.table = table
    return figure
