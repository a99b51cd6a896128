"""Cost against coverage: which configurations are worth having."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogFormatterSciNotation, LogLocator, NullFormatter

from sparsity_lab.figures.look import MARKERS, RATIO_COLOURS, STYLE, WIDTH, axis_label, columns_that_fit, grid

DOMINATED = "#b5b5b5"
MOST_LABELS = 12


def draw_cost_coverage(
    table: pd.DataFrame,
    *,
    cost: str,
    metric: str = "coverage",
    title: str = "Cost against coverage",
    facts: Sequence[str] = ("a point a configuration",),
    cost_label: str | None = None,
    metric_label: str | None = None,
    threshold: float | None = None,
) -> Figure:
    """A point a configuration, over its cost (log scale). Dominated ones are grey; a line joins the others.

    Args:
        table: columns named by `cost` and `metric`; where there are: `<metric>_low` and `<metric>_high` (a vertical
            line), `dominated` (another costs no more and keeps no less), `recommended` (ringed), `label` (written
            beside those on the line, while they are few), `scorer` (marker), `compress_ratio` (colour).
        threshold: a dashed line across: what has to be kept.
    Raises:
        ValueError: a column is missing, or no row has both values.
    """
    for column in (cost, metric):
        if column not in table:
            raise ValueError(f"{column}: no such column in the table of costs")
    shown = table[table[cost].notna() & table[metric].notna()]
    if shown.empty:
        raise ValueError("nothing to show: no configuration has both a cost and a coverage")
    best = ~shown["dominated"].astype(bool) if "dominated" in shown else pd.Series(True, index=shown.index)
    front = shown[best].sort_values(cost)
    with mpl.rc_context(STYLE):
        figure, (axis,) = grid(1, 1, title, facts, 3.4)
        axis.set_xscale("log")
        _points(axis, shown[~best], cost, metric, _kinds(shown), grey=True)
        axis.step(front[cost], front[metric], where="post", color="#444", linewidth=0.8, zorder=1.9)
        _points(axis, front, cost, metric, _kinds(shown), grey=False)
        _marks(axis, shown, front, cost, metric)
        if threshold is not None:
            axis.axhline(threshold, color="#1a1a1a", linewidth=0.9, linestyle=(0, (4, 2)))
        axis.set(xlabel=cost_label or cost.replace("_", " "), ylabel=metric_label or axis_label(metric, short=False))
        _cost_ticks(axis)
        entries = _entries(shown, front, threshold)
        figure.legend(handles=entries, loc="outside lower center", ncols=columns_that_fit(entries, WIDTH[1]))
    figure.table = table
    return figure


def _look(row: Any, scorers: Sequence[str], ratios: Sequence[int], *, grey: bool) -> dict[str, Any]:
    marker = MARKERS[scorers.index(row.scorer) % len(MARKERS)] if scorers else MARKERS[0]
    colour = RATIO_COLOURS[ratios.index(row.compress_ratio) % len(RATIO_COLOURS)] if ratios else RATIO_COLOURS[0]
    return {"marker": marker, "color": DOMINATED if grey else colour, "markersize": 3.5 if grey else 5}


def _kinds(table: pd.DataFrame) -> tuple[list[str], list[int]]:
    """The scorers and ratios, which markers and colours stand for."""
    return (
        sorted(table["scorer"].unique()) if "scorer" in table else [],
        sorted(table["compress_ratio"].unique()) if "compress_ratio" in table else [],
    )


def _points(
    axis: Axes, rows: pd.DataFrame, cost: str, metric: str, kinds: tuple[list[str], list[int]], *, grey: bool
) -> None:
    for row in rows.itertuples(index=False):
        x, y = getattr(row, cost), getattr(row, metric)
        look = _look(row, *kinds, grey=grey)
        axis.plot(x, y, linestyle="none", zorder=1.5 if grey else 2.5, **look)
        low, high = (getattr(row, f"{metric}{end}", None) for end in ("_low", "_high"))
        if not grey and low is not None and pd.notna(low):
            axis.plot([x, x], [low, high], color=look["color"], linewidth=0.9, zorder=2.2)


def _marks(axis: Axes, shown: pd.DataFrame, front: pd.DataFrame, cost: str, metric: str) -> None:
    """Rings around what is recommended, and the names of few enough points on the front."""
    if "recommended" in shown:
        ringed = shown[shown["recommended"].astype(bool)]
        ring: dict[str, Any] = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "color": "#1a1a1a"}
        axis.plot(ringed[cost], ringed[metric], linestyle="none", zorder=3, **ring)
    if "label" in front and len(front) <= MOST_LABELS:
        for row in front.itertuples(index=False):
            place = (getattr(row, cost), getattr(row, metric))
            axis.annotate(
                str(row.label), place, xytext=(6, -3), textcoords="offset points", fontsize=6.5, va="top", zorder=3.2
            )


def _cost_ticks(axis: Axes) -> None:
    low, high = axis.get_xlim()
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
    plain = low >= 0.01 and high <= 100_000
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}") if plain else LogFormatterSciNotation())
    axis.xaxis.set_minor_formatter(NullFormatter())


def _entries(shown: pd.DataFrame, front: pd.DataFrame, threshold: float | None) -> list[Line2D]:
    scorers, ratios = _kinds(shown)
    plain: Any = {"linestyle": "none", "markersize": 5}
    handles = [
        Line2D([], [], label=name, marker=MARKERS[i % len(MARKERS)], color="#444", **plain)
        for i, name in enumerate(scorers)
        if len(scorers) > 1
    ]
    handles += [
        Line2D([], [], label=f"ratio {ratio}", marker="o", color=RATIO_COLOURS[i % len(RATIO_COLOURS)], **plain)
        for i, ratio in enumerate(ratios)
    ]
    if len(front) < len(shown):
        handles.append(Line2D([], [], label="dominated", marker="o", color=DOMINATED, **plain))
    if "recommended" in shown and shown["recommended"].any():
        ring: Any = {"marker": "o", "markersize": 9, "markerfacecolor": "none", "color": "#1a1a1a"}
        handles.append(Line2D([], [], label="recommended", linestyle="none", **ring))
    if threshold is not None:
        handles.append(Line2D([], [], label="to be kept", color="#1a1a1a", linewidth=0.9, linestyle=(0, (4, 2))))
    return handles
