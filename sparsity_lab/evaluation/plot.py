"""Figures of evaluations: what selections cost by k, and which proxy orders cells as the running model does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from sparsity_lab.evaluation.proxy import PROXIES, Pairs
from sparsity_lab.evaluation.summary import EvaluationResults
from sparsity_lab.figures.look import (
    CURVE_COLOURS,
    MARKERS,
    RATIO_COLOURS,
    STYLE,
    Chart,
    columns_that_fit,
    wrap,
)
from sparsity_lab.figures.table import plural, pool_label

LABELS = {
    "perplexity_difference": "perplexity, difference to dense",
    "loss_difference": "loss, difference to dense (nats)",
    "kl": "KL(dense || sparse) (nats)",
    "top1_agreement": "same likeliest next token",
    "retrieval": "retrieval score",
    "output_error": "error of the attention output",
}
PANELS = ("perplexity_difference", "kl", "top1_agreement", "retrieval")
POOL_LINES: Sequence[Any] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5)))
SIDE = 2.6  # inches of an axes
ASIDE = 0.07  # octaves of k between the marks of two curves, so that their bars do not hide each other


def draw_evaluation(results: EvaluationResults, metrics: Sequence[str] = PANELS) -> Figure:
    """Each metric over k, a curve a ratio (colour), pool (line) and scorer (marker), bars for 95 % intervals.

    Raises:
        ValueError: none of the metrics was measured.
    """
    table = results.frame()
    shown = [name for name in metrics if name in table and table[name].notna().any()]
    if not shown:
        raise ValueError(f"{', '.join(metrics)}: not measured here")
    table = table.assign(
        pool=[pool_label(row) for row in table.itertuples()],
        reuse=table["index_source_layers"].fillna("").astype(str),
    )
    columns = min(len(shown), 2)
    rows = -(-len(shown) // columns)
    styles = _styles(table)
    with mpl.rc_context(STYLE):
        figure = Chart(figsize=(SIDE * columns + 0.8, SIDE * 0.85 * rows + 1.3), layout="constrained")
        figure.suptitle("\n".join(["The model run with its selections", *wrap(_facts(table), SIDE * columns + 0.8)]))
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for axis in axes[len(shown) :]:
            axis.remove()
        for axis, metric in zip(axes, shown, strict=False):
            curves = list(table.groupby(["scorer", "compress_ratio", "pool", "reuse"], sort=False))
            for i, (key, part) in enumerate(curves):
                aside = 2.0 ** (ASIDE * (i - (len(curves) - 1) / 2))
                _curve(axis, part.sort_values("topk"), metric, styles(*key), aside)
            _frame(axis, metric, table)
        entries = _legend(table, styles)
        columns = columns_that_fit(entries, SIDE * columns + 0.8)
        figure.legend(handles=entries, loc="outside lower center", ncols=columns)
    figure.table = table.drop(columns=["pool", "reuse"])
    return figure


def _styles(table: pd.DataFrame) -> Any:
    ratios = sorted(table["compress_ratio"].unique())
    lines = sorted(table[["pool", "reuse"]].drop_duplicates().itertuples(index=False, name=None), key=_single_first)
    scorers = list(dict.fromkeys(table["scorer"]))

    def style(scorer: str, ratio: int, pool: str, reuse: str) -> dict[str, Any]:
        return {
            "color": RATIO_COLOURS[ratios.index(ratio) % len(RATIO_COLOURS)],
            "linestyle": POOL_LINES[lines.index((pool, reuse)) % len(POOL_LINES)],
            "marker": MARKERS[scorers.index(scorer) % len(MARKERS)],
            "markersize": 3.5,
            "linewidth": 1.3,
        }

    return style


def _single_first(line: tuple[str, str]) -> tuple[bool, str, str]:
    return (line[0] != "no pool", *line)


def _legend(table: pd.DataFrame, style: Any) -> list[Line2D]:
    """A line a ratio, then one a pool and, where there are several, one a scorer."""
    first = table.iloc[0]
    base = (first["scorer"], first["compress_ratio"], first["pool"], first["reuse"])
    plain = {"marker": "", "linewidth": 1.5}
    entries = []
    for ratio in sorted(table["compress_ratio"].unique()):
        entries.append(
            Line2D([], [], label=f"ratio {ratio}", **{**style(base[0], ratio, *base[2:]), **plain, "linestyle": "-"})
        )
    lines = sorted(table[["pool", "reuse"]].drop_duplicates().itertuples(index=False, name=None), key=_single_first)
    for pool, reuse in lines if len(lines) > 1 else ():
        name = {"no pool": "single-level"}.get(pool, pool) + (f", selected in layers {reuse}" if reuse else "")
        entries.append(Line2D([], [], label=name, **{**style(base[0], base[1], pool, reuse), **plain, "color": "#444"}))
    scorers = list(dict.fromkeys(table["scorer"]))
    for scorer in scorers if len(scorers) > 1 else ():
        look = {**style(scorer, *base[1:]), "linestyle": "", "color": "#444"}
        entries.append(Line2D([], [], label=scorer, **look))
    return entries


def _facts(table: pd.DataFrame) -> list[str]:
    first, documents = table.iloc[0], int(table["documents"].max())
    parts = [f"{' and '.join(sorted(table['model'].unique()))} on {' and '.join(sorted(table['data'].unique()))}"]
    parts.append(f"{plural(documents, 'document')} x {first['length']:,} tokens")
    if len(set(table["scorer"])) == 1:
        parts.append(f"scorer {first['scorer']}")
    if table["dense_perplexity"].notna().any():
        parts.append(f"dense perplexity {table['dense_perplexity'].mean():.2f}")
    if table["retrieval"].notna().any():
        tasks = plural(int(table["tasks"].max()), "task")
        parts.append(f"dense retrieval {table['dense_retrieval'].mean():.2f} over {tasks}")
    if table["perplexity_difference_low"].notna().any():
        parts.append("bars: 95 % interval over documents")
    return parts


def _curve(axis: Axes, rows: pd.DataFrame, metric: str, style: dict[str, Any], aside: float) -> None:
    rows = rows[rows[metric].notna()]
    x, y = rows["topk"].to_numpy(dtype=float) * aside, rows[metric].to_numpy(dtype=float)
    if not len(x):
        return
    spans = np.stack([y - rows[f"{metric}_low"], rows[f"{metric}_high"] - y]).astype(float)
    axis.plot(x, y, **style)
    axis.errorbar(x, y, yerr=np.clip(np.nan_to_num(spans), 0, None), fmt="none", ecolor=style["color"], elinewidth=0.7)


def _frame(axis: Axes, metric: str, table: pd.DataFrame) -> None:
    axis.set_xscale("log", base=2)
    budgets = sorted(table["topk"].unique())
    axis.set_xticks(budgets, [str(k) for k in budgets])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set(xlabel="k", title=LABELS[metric])
    if metric in ("perplexity_difference", "loss_difference"):
        axis.axhline(0, color="#1a1a1a", linewidth=0.6)
    if metric == "kl" and (table["kl"].dropna() > 0).all():
        axis.set_yscale("log")
        for set_formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            set_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else ""))
    if metric == "retrieval":
        axis.axhline(table["dense_retrieval"].mean(), color="#1a1a1a", linewidth=0.8, linestyle=(0, (5, 2)))
        axis.set_ylim(-0.04, 1.04)


TRUTH_LABELS = {
    "loss_difference": "perplexity loss",
    "kl": "KL to dense",
    "top1_agreement": "top-1 agreement",
    "retrieval": "retrieval",
}


def draw_agreement(table: pd.DataFrame, about: Sequence[str]) -> Figure:
    """How well each proxy orders cells: an axes a truth, a dot a proxy with its interval, the best at the top."""
    truths = list(dict.fromkeys(table["truth"]))
    columns = min(len(truths), 2)
    rows = -(-len(truths) // columns)
    width = 3.4 * columns
    with mpl.rc_context(STYLE):
        figure = Chart(figsize=(width, 2.1 * rows + 0.7), layout="constrained")
        figure.suptitle("\n".join(["Which proxy orders cells as the running model does?", *wrap(about, width)]))
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        lowest = min(0.0, float(table["agreement_low"].min()) - 0.05)
        for axis in axes[len(truths) :]:
            axis.remove()
        for axis, truth in zip(axes, truths, strict=False):
            part = table[(table["truth"] == truth) & table["agreement"].notna()]
            places = np.arange(len(part))
            spans = np.stack([part["agreement"] - part["agreement_low"], part["agreement_high"] - part["agreement"]])
            tied = part["tied"].to_numpy(dtype=bool)
            for some, colour in ((tied, CURVE_COLOURS[0]), (~tied, "#9a9a9a")):
                x, error = part["agreement"].to_numpy()[some], np.clip(spans[:, some].astype(float), 0, None)
                axis.errorbar(x, places[some], xerr=error, fmt="o", markersize=4, color=colour, elinewidth=1)
            axis.set_yticks(places, [name.replace("_", " ") for name in part["proxy"]])
            axis.invert_yaxis()
            axis.set(title=TRUTH_LABELS[truth], xlim=(lowest, 1.05))
        for axis in axes[max(0, len(truths) - columns) : len(truths)]:
            axis.set_xlabel("rank agreement over cells")
        entries = [
            Line2D([], [], marker="o", linestyle="", color=CURVE_COLOURS[0], label="best, or not to be told from it"),
            Line2D([], [], marker="o", linestyle="", color="#9a9a9a", label="worse than the best"),
        ]
        figure.legend(handles=entries, loc="outside lower center", ncols=2)
    figure.table = table
    return figure


def draw_scatter(pairs: Pairs, table: pd.DataFrame, truth: str, about: Sequence[str]) -> Figure:
    """Cells by each proxy (across) and one truth (up): colour = ratio, open marks = two-level."""
    means = pairs.means()
    names = [name for name in PROXIES if name in pairs.proxies]
    up = f"{truth}_truth"
    columns = min(len(names), 4)
    rows = -(-len(names) // columns)
    width = 1.95 * columns + 0.4
    ratios = sorted(means["compress_ratio"].unique())
    with mpl.rc_context(STYLE):
        figure = Chart(figsize=(width, 1.95 * rows + 1.0), layout="constrained")
        figure.suptitle("\n".join([f"Proxies against {TRUTH_LABELS[truth]}", *wrap(about, width)]))
        axes = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
        for axis in axes[len(names) :]:
            axis.remove()
        for i, (axis, name) in enumerate(zip(axes, names, strict=False)):
            rows_shown: list[Any] = list(means.itertuples())
            for row in rows_shown:
                colour = RATIO_COLOURS[ratios.index(row.compress_ratio) % len(RATIO_COLOURS)]
                face = colour if pd.isna(row.candidate_source_layer) else "white"
                axis.plot(getattr(row, name), getattr(row, up), "o", color=colour, markerfacecolor=face, markersize=4)
            found = table[(table["truth"] == truth) & (table["proxy"] == name)]["rho"]
            axis.set_title(f"{name.replace('_', ' ')}, $\\rho$ = {found.iloc[0]:.2f}")
            if i % columns == 0:
                axis.set_ylabel(LABELS[truth])
        entries = [
            Line2D(
                [], [], marker="o", linestyle="", color=RATIO_COLOURS[j % len(RATIO_COLOURS)], label=f"ratio {ratio}"
            )
            for j, ratio in enumerate(ratios)
        ]
        if means["candidate_source_layer"].notna().any():
            for label, face in (("single-level", "#444"), ("two-level", "white")):
                entries.append(
                    Line2D([], [], marker="o", linestyle="", color="#444", markerfacecolor=face, label=label)
                )  # fmt: skip
        figure.legend(handles=entries, loc="outside lower center", ncols=columns_that_fit(entries, width))
    figure.table = means
    return figure
