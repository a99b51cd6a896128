"""Metrics as curves: over k, over density, over the position of the query, layer by layer."""

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
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from sparsity_lab.compare import Difference, against, levels
from sparsity_lab.figures.look import (
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
)
from sparsity_lab.figures.panels import Panel, panels
from sparsity_lab.figures.table import behind_sources, curve_table, facts, heading, percent_range
from sparsity_lab.results import Results

OVER = {
    "topk": "k, positions selected",
    "density": "density: share of visible tokens attended",
    "bucket": "position of the query: from s to 2s \u2212 1",
    "layer": "layer",
}

DENSITIES = [0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0]  # ticks
BEHIND = "all behind the candidate sources"


def curves(
    results: Results,
    metric: str,
    *,
    over: str = "topk",
    layer: int | None = None,
    topk: int | None = None,
    scorer: str | Iterable[str] | None = None,
    ratio: int | Iterable[int] | None = None,
    where: str | None = None,
    split_ratios: bool = False,
) -> Figure:
    """One metric over k (log scale): a curve a ratio and scorer, with oracle, recency and random around.

    Few curves share one axes, coloured by ratio; many get one axes a ratio, coloured by scorer and pool, and more
    axes for what else differs. Bands are 95 % intervals over documents, absent with one document. Saturated rows are
    left out, so a curve's points average over fewer rows as k grows; markers are hollow where more than half of the
    rows are out, and a curve ends where all are.

    Args:
        results: measured; or `compare.against` of two, to draw their difference.
        over: topk; density (measured, of the same cells and rows; a curve's points follow each other by k); bucket or
            layer, at one k.
        topk: one k; None: all of them over topk and density, else the middle one.
        split_ratios: one axes a ratio, even for few curves.
        The others choose cells; for them and for errors see `table.curve_table`.
    """
    choice: dict[str, Any] = {"scorer": scorer, "ratio": ratio, "where": where}
    by = (over,) if over in ("bucket", "layer") else ()
    if over not in OVER:
        raise ValueError(f"over={over!r}: must be one of {', '.join(OVER)}")
    if over == metric:
        raise ValueError(f"over={over}: cannot be drawn over itself")
    if over == "layer" and layer is not None:
        raise ValueError(f"layer={layer}: cannot be drawn over layers")
    if by and topk is None:
        topk = middle_k(curve_table(results, metric, strict=False, **choice))
    table = curve_table(results, metric, layer=layer, by=by, topk=topk, **choice)
    if by:
        table = table[table.groupby(over)[metric].transform("count") > 0]  # where all is saturated, there is no axis
    if over == "density":
        table = _with_density(results, table, layer)
    told = facts(results, table, layer, [f"k = {topk}"] if topk else [])
    return draw_curves(
        table, metric, told, heading(results, table, metric), over=over,
        signed=isinstance(results, Difference), split_ratios=split_ratios,
    )  # fmt: skip


def two_level(results: Results, metric: str = "coverage", **choice: Any) -> Figure:
    """`curves` of what each candidate pool changes: two-level minus single-level selection, paired by document.

    Averages are over the layers behind every candidate source layer, the only ones that search in a pool. Of
    `compare.against`, the difference of both runs' differences.
    """
    if isinstance(results, Difference):
        a, b = (levels(behind_sources(side), told=[BEHIND]) for side in (results.a, results.b))
        return curves(against(a, b, *results.names), metric, **choice)
    return curves(levels(behind_sources(results), told=[BEHIND]), metric, **choice)


def middle_k(table: pd.DataFrame) -> int:
    """The middle one of the k that were measured."""
    budgets = sorted(table["topk"].unique())
    return int(budgets[len(budgets) // 2])


def _with_density(results: Results, table: pd.DataFrame, layer: int | None) -> pd.DataFrame:
    """The table with the measured density of its cells; of a difference, that of A."""
    side = results.first() if isinstance(results, Difference) else results
    keys = ("layer",) if layer is not None else ()
    found = side.frame(keys, intervals=())
    found = found if layer is None else found[found["layer"] == layer]
    table = table.drop(columns=[c for c in table if str(c).startswith("density")])
    return table.merge(found[["cell_id", "density"]], on="cell_id", how="left", validate="one_to_one")


def draw_curves(
    table: pd.DataFrame,
    metric: str,
    told: Sequence[str],
    title: str,
    *,
    over: str = "topk",
    signed: bool = False,
    split_ratios: bool = False,
) -> Figure:
    """`curves` of a table that `curve_table` made; `told` goes under the title."""
    table = table[table.groupby("curve")[metric].transform("count") > 0]  # pool metrics: not without a pool
    tested = table[~table["bound"]]
    ratios = sorted(table["compress_ratio"].unique())
    count = tested["curve"].nunique()
    many = split_ratios or count > 1 or len(ratios) > len(RATIO_COLOURS)
    parts = panels(table, split_ratios=many)
    names = list(dict.fromkeys(name for part in parts for name in part.tested["curve"]))
    encoding = Encoding(metric, over, signed, names, ratios, by_ratio=not many and len(ratios) > 1)
    columns = len(ratios) if many and 1 < len(ratios) <= 3 else min(len(parts), 3)
    with mpl.rc_context(STYLE):
        figure, axes = grid(len(parts), columns, title, told, 3.1 if columns == 1 else 2.3)
        for axis, part in zip(axes, parts, strict=True):
            draw_panel(axis, part, encoding)
            axis.set_title(
                panel_title(part, alone=len(parts) == 1, letters=int(1.05 * LETTERS * WIDTH[columns] / columns))
            )
        label_axes(axes, columns, encoding, table)
        entries = legend_entries(table, encoding)
        figure.legend(handles=entries, loc="outside lower center", ncols=columns_that_fit(entries, WIDTH[columns]))
    figure.table = table
    return figure


@dataclass(frozen=True)
class Encoding:
    """What colour and marker mean in a figure: by_ratio, the ratio; otherwise the curve. Dashes tell the bounds."""

    metric: str
    over: str
    signed: bool
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
    if encoding.signed:
        axis.axhline(0, color="#1a1a1a", linewidth=0.6)
    for name, ratio, rows in _each(part.bounds, "scorer"):
        draw_curve(axis, rows, encoding, label=name, **encoding.bound(name, ratio))
    for name, ratio, rows in _each(part.tested, "curve"):
        # earlier curves are wider and have larger markers, so that curves that coincide can all be seen
        rank = encoding.names.index(name) / max(len(encoding.names) - 1, 1)
        size = {"markersize": 6.5 - 3.0 * rank, "linewidth": 2.4 - 1.4 * rank}
        size = size if len(encoding.names) > 1 else {"markersize": 5.0, "linewidth": 1.8}
        draw_curve(axis, rows, encoding, label=name, **size, **encoding.tested(name, ratio))


def _each(table: pd.DataFrame, column: str) -> Iterator[tuple[str, int, pd.DataFrame]]:
    """(name, ratio, rows over k) of every curve."""
    keys: Any  # pandas' stubs know no more than Hashable
    for keys, rows in table.groupby([column, "compress_ratio"], sort=False):
        yield keys[0], int(keys[1]), rows


def draw_curve(axis: Axes, rows: pd.DataFrame, encoding: Encoding, **style: Any) -> None:
    """One curve. Those under test have markers, hollow where most rows are saturated, and a band where there
    is an interval."""
    metric, over = encoding.metric, encoding.over
    rows = rows[rows[metric].notna()].sort_values("topk" if over == "density" else over)
    x, value = rows[over].to_numpy(), rows[metric].to_numpy()
    if "marker" not in style and len(x) == 1:  # a line through one point would not be seen
        axis.axhline(value[0], **style)
        return
    (line,) = axis.plot(x, value, **style)
    if "marker" not in style:
        return
    low, high = rows[f"{metric}_low"].to_numpy(), rows[f"{metric}_high"].to_numpy()
    if pd.notna(low).any():
        axis.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    hollow = rows["saturated_share"].to_numpy() > 0.5
    if hollow.any():
        style |= {"linestyle": "none", "markerfacecolor": "white", "label": "_hollow"}
        axis.plot(x[hollow], value[hollow], zorder=line.get_zorder() + 0.1, **style)


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


def label_axes(axes: Sequence[Axes], columns: int, encoding: Encoding, table: pd.DataFrame) -> None:
    """Scales, ticks and labels; labels at the grid's edge only."""
    for i, axis in enumerate(axes):
        scale_x(axis, encoding.over, table[encoding.over])
        label = axis_label(encoding.metric, short=len(axes) > 1, signed=encoding.signed)
        label_edges(axis, i, len(axes), columns, OVER[encoding.over], label)
    if encoding.signed:
        return
    axes[0].set_ylim(bottom=0)
    if encoding.metric != "output_error":
        axes[0].set_ylim(0, 1.03)


def scale_x(axis: Axes, over: str, values: pd.Series) -> None:
    """Scale and ticks of what the curves go over."""
    if over == "layer":
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        return
    axis.set_xscale("log", base=2)
    if over == "density":
        axis.xaxis.set_major_locator(FixedLocator(DENSITIES))
        axis.xaxis.set_major_formatter(PercentFormatter(1.0, symbol="\u00a0%"))
    else:
        found = sorted(values.unique())
        shown = [k for k in found if k & (k - 1) == 0] if len(found) > 9 else found
        axis.set_xticks(shown, [str(k) for k in shown])
    axis.xaxis.set_minor_locator(NullLocator())


def label_edges(axis: Axes, at: int, count: int, columns: int, across: str, up: str) -> None:
    """Name the axis across at the bottom of each column and the one up at the left."""
    if at + columns >= count:
        axis.set_xlabel(across)
        axis.tick_params(labelbottom=True)
    if at % columns == 0:
        axis.set_ylabel(up)


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
