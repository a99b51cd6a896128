"""Figures from results: recall, coverage and other metrics as curves over k, and layer by layer.

    import sparsity_lab as sl
    sl.plot.coverage(sl.results.load("results/recall/smollm2-pydoc-2048"))

Nothing here touches pyplot or its settings, so a notebook's own figures stay as they are.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from sparsity_lab.plot_figure import (
    BOUND_LINES,
    CURVE_COLOURS,
    LETTERS,
    MARKERS,
    RATIO_COLOURS,
    STYLE,
    WIDTH,
    axis_label,
    columns_that_fit,
    grid,
    save,
)
from sparsity_lab.plot_panels import Panel, by_curve, panels
from sparsity_lab.plot_table import curve_table, facts, heading, percent_range
from sparsity_lab.results import Results

__all__ = ["by_layer", "coverage", "curves", "draw_by_layer", "draw_curves", "recall", "save"]


def recall(results: Results, **choice: Any) -> Figure:
    """`curves` of the recall: |S ∩ O_k| / min(k, v)."""
    return curves(results, "recall", **choice)


def coverage(results: Results, **choice: Any) -> Figure:
    """`curves` of the coverage: the share of the visible dense mass that the selection keeps."""
    return curves(results, "coverage", **choice)


def curves(
    results: Results,
    metric: str,
    *,
    layer: int | None = None,
    scorer: str | Iterable[str] | None = None,
    ratio: int | Iterable[int] | None = None,
    where: str | None = None,
) -> Figure:
    """One metric over k (log scale): a curve a ratio and scorer, with oracle, recency and random around.

    Few curves share one axes, coloured by ratio; many get one axes a ratio, coloured by scorer and pool, and more
    axes for what else differs. Bands are 95 % intervals over documents, absent with one document. Saturated rows are
    left out, so a curve's points average over fewer rows as k grows; markers are hollow where more than half of the
    rows are out, and a curve ends where all are. For the arguments and errors see `plot_table.curve_table`.
    """
    table = curve_table(results, metric, layer=layer, scorer=scorer, ratio=ratio, where=where)
    return draw_curves(table, metric, facts(results, table, layer))


def by_layer(
    results: Results,
    metric: str = "coverage",
    *,
    scorer: str | Iterable[str] | None = None,
    ratio: int | Iterable[int] | None = None,
    where: str | None = None,
) -> Figure:
    """One metric as a heat map of layer x k: an axes a curve (scorer, pool) and ratio.

    Hatched where it is undefined, mostly because every row is saturated. For the arguments and errors see
    `plot_table.curve_table`.
    """
    table = curve_table(results, metric, by=("layer",), scorer=scorer, ratio=ratio, where=where)
    return draw_by_layer(table, metric, facts(results, table, None))


def draw_curves(table: pd.DataFrame, metric: str, told: Sequence[str]) -> Figure:
    """`curves` of a table that `curve_table` made; `told` goes under the title."""
    table = table[table.groupby("curve")[metric].transform("count") > 0]  # pool metrics: not without a pool
    tested = table[~table["bound"]]
    ratios = sorted(table["compress_ratio"].unique())
    count = tested["curve"].nunique()
    many = count > 1 or len(ratios) > len(RATIO_COLOURS)
    parts = panels(table, split_ratios=many)
    names = list(dict.fromkeys(name for part in parts for name in part.tested["curve"]))
    encoding = Encoding(metric, names, ratios, by_ratio=not many and len(ratios) > 1)
    columns = len(ratios) if many and 1 < len(ratios) <= 3 else min(len(parts), 3)
    with mpl.rc_context(STYLE):
        figure, axes = grid(len(parts), columns, heading(table, metric), told, 3.1 if columns == 1 else 2.3)
        for axis, part in zip(axes, parts, strict=True):
            draw_panel(axis, part, encoding)
            axis.set_title(
                panel_title(part, alone=len(parts) == 1, letters=int(1.05 * LETTERS * WIDTH[columns] / columns))
            )
        label_axes(axes, columns, encoding.metric, table)
        entries = legend_entries(table, encoding)
        figure.legend(handles=entries, loc="outside lower center", ncols=columns_that_fit(entries, WIDTH[columns]))
    return figure


@dataclass(frozen=True)
class Encoding:
    """What colour and marker mean in a figure: by_ratio, the ratio; otherwise the curve. Dashes tell the bounds."""

    metric: str
    names: list[str]
    ratios: list[int]
    by_ratio: bool

    def tested(self, name: str, ratio: int) -> dict[str, Any]:
        """Line properties of a curve under test."""
        colours: Sequence[str] = CURVE_COLOURS
        at = self.names.index(name)
        if self.by_ratio:
            at, colours = self.ratios.index(ratio), RATIO_COLOURS
        return {"color": colours[at % len(colours)], "marker": MARKERS[at % len(MARKERS)], "linestyle": "-"}

    def bound(self, name: str, ratio: int) -> dict[str, Any]:
        """Line properties of oracle, recency or random."""
        grey, dashes = BOUND_LINES[name]
        colour = RATIO_COLOURS[self.ratios.index(ratio)] if self.by_ratio else grey
        return {"color": colour, "linestyle": dashes, "linewidth": 1.0, "zorder": 2.6}


def draw_panel(axis: Axes, part: Panel, encoding: Encoding) -> None:
    """Bounds and curves under test, the latter with bands."""
    for name, ratio, rows in _each(part.bounds, "scorer"):
        draw_curve(axis, rows, encoding.metric, label=name, **encoding.bound(name, ratio))
    for name, ratio, rows in _each(part.tested, "curve"):
        # earlier curves are wider and have larger markers, so that curves that coincide can all be seen
        rank = encoding.names.index(name) / max(len(encoding.names) - 1, 1)
        size = {"markersize": 6.5 - 3.0 * rank, "linewidth": 2.4 - 1.4 * rank}
        size = size if len(encoding.names) > 1 else {"markersize": 5.0, "linewidth": 1.8}
        draw_curve(axis, rows, encoding.metric, label=name, **size, **encoding.tested(name, ratio))


def _each(table: pd.DataFrame, column: str) -> Iterator[tuple[str, int, pd.DataFrame]]:
    """(name, ratio, rows over k) of every curve."""
    keys: Any  # pandas' stubs know no more than Hashable
    for keys, rows in table.groupby([column, "compress_ratio"], sort=False):
        yield keys[0], int(keys[1]), rows


def draw_curve(axis: Axes, rows: pd.DataFrame, metric: str, **style: Any) -> None:
    """One curve over k. Those under test have markers, hollow where most rows are saturated, and a band where there
    is an interval."""
    rows = rows[rows[metric].notna()].sort_values("topk")
    k, value = rows["topk"].to_numpy(), rows[metric].to_numpy()
    if "marker" not in style and len(k) == 1:  # a line through one point would not be seen
        axis.axhline(value[0], **style)
        return
    (line,) = axis.plot(k, value, **style)
    if "marker" not in style:
        return
    low, high = rows[f"{metric}_low"].to_numpy(), rows[f"{metric}_high"].to_numpy()
    if pd.notna(low).any():
        axis.fill_between(k, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    hollow = rows["saturated_share"].to_numpy() > 0.5
    if hollow.any():
        style |= {"linestyle": "none", "markerfacecolor": "white", "label": "_hollow"}
        axis.plot(k[hollow], value[hollow], zorder=line.get_zorder() + 0.1, **style)


def panel_title(part: Panel, *, alone: bool, letters: int) -> str:
    """What the panel holds and, a ratio, how many of its rows are saturated; at most `letters` in a line."""
    rows = part.tested if len(part.tested) else part.bounds
    shares: dict[Any, str] = {
        ratio: percent_range(group["saturated_share"]) for ratio, group in rows.groupby("compress_ratio", sort=True)
    }
    if len(shares) > 1:
        told = "saturated rows left out: " + ", ".join(
            f"{s} at ratio {r}".replace(" ", "\u00a0") for r, s in shares.items()
        )
    else:
        (ratio, share), *_ = shares.items()
        told = (f"ratio {ratio}, " if alone else "") + f"saturated rows left out: {share}"
    return "\n".join(textwrap.fill(line, letters) for line in (part.title, told) if line)


def label_axes(axes: Sequence[Axes], columns: int, metric: str, table: pd.DataFrame) -> None:
    """Scales, ticks and labels; labels at the grid's edge only."""
    budgets = sorted(table["topk"].unique())
    shown = [k for k in budgets if k & (k - 1) == 0] if len(budgets) > 9 else budgets
    for i, axis in enumerate(axes):
        axis.set_xscale("log", base=2)
        axis.set_xticks(shown, [str(k) for k in shown])
        axis.xaxis.set_minor_locator(NullLocator())
        label_edges(axis, i, len(axes), columns, axis_label(metric, short=len(axes) > 1))
    axes[0].set_ylim(bottom=0)
    if metric != "output_error":
        axes[0].set_ylim(0, 1.03)


def label_edges(axis: Axes, at: int, count: int, columns: int, name: str) -> None:
    """Name the k axis at the bottom of each column and the other at the left."""
    if at + columns >= count:
        axis.set_xlabel("k, positions selected")
        axis.tick_params(labelbottom=True)
    if at % columns == 0:
        axis.set_ylabel(name)


def legend_entries(table: pd.DataFrame, encoding: Encoding) -> list[Line2D]:
    """One handle a meaning."""
    tested = table[~table["bound"]]
    curves = [(name, ratio) for name in encoding.names for ratio in encoding.ratios]
    if encoding.by_ratio:
        labels = [f"{name}, ratio {ratio}" for name, ratio in curves]
    else:
        curves = [(name, encoding.ratios[0]) for name in encoding.names]
        labels = encoding.names
    handles = [Line2D([], [], label=t, **encoding.tested(*c)) for t, c in zip(labels, curves, strict=True)]
    for name in [n for n in BOUND_LINES if n in set(table.loc[table["bound"], "scorer"])]:
        grey, dashes = BOUND_LINES[name]
        handles.append(Line2D([], [], color=grey, linestyle=dashes, linewidth=1.0, label=name))
    if (tested["saturated_share"].gt(0.5) & tested[encoding.metric].notna()).any():
        hollow: Any = {"marker": "o", "linestyle": "none", "markerfacecolor": "white", "color": "#444"}
        handles.append(Line2D([], [], label="most rows saturated", **hollow))
    return handles


def draw_by_layer(table: pd.DataFrame, metric: str, told: Sequence[str]) -> Figure:
    """`by_layer` of a table that `curve_table` made with by=("layer",); `told` goes under the title."""
    parts = by_curve(table)
    layers, budgets = sorted(table["layer"].unique()), sorted(table["topk"].unique())
    count = table.loc[~table["bound"], "curve"].nunique()
    columns = count if 1 < count <= 3 else min(len(parts), 3)
    top = 1.0 if metric != "output_error" else float(table[metric].max())
    undefined = table[~table["bound"] & table[metric].isna()]
    if len(undefined):
        told = [*told, "hatched: " + ("undefined" if undefined["rows"].any() else "every row saturated")]
    with mpl.rc_context(STYLE):
        figure, axes = grid(len(parts), columns, heading(table, metric), told, max(2.3, 0.09 * len(layers)))
        for i, (axis, (title, part)) in enumerate(zip(axes, parts, strict=True)):
            cells = part.pivot(index="layer", columns="topk", values=metric).reindex(index=layers, columns=budgets)
            axis.patch.set(hatch="////", edgecolor="#777", facecolor="white")
            axis.grid(visible=False)
            image = axis.imshow(cells, aspect="auto", origin="lower", cmap="viridis", vmin=0, vmax=top)
            axis.set_title(title)
            shown = range(0, len(layers), -(-len(layers) // 16))
            axis.set_yticks(shown, [str(layers[at]) for at in shown])
            axis.set_xticks(range(len(budgets)), [str(k) for k in budgets])
            label_edges(axis, i, len(axes), columns, "layer")
        figure.colorbar(image, ax=axes, label=axis_label(metric, short=False), aspect=40)
    return figure
