"""Figures of `free_running`: both rankings of candidate sources, and coverage by layer of both runs."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sparsity_lab.ablation_run import AblationResults
from sparsity_lab.ablation_table import choose
from sparsity_lab.figures import source
from sparsity_lab.figures.look import CURVE_COLOURS, MARKERS, STYLE, axis_label, columns_for, grid
from sparsity_lab.figures.table import curve_labels, plural
from sparsity_lab.free_running import applied_of, compared_coverage, compared_rankings, rank_agreement
from sparsity_lab.results import Results

NAMES = {"teacher": "teacher-forced", "free": "free-running"}
LOOK: dict[str, dict[str, Any]] = {
    side: {"color": CURVE_COLOURS[i], "marker": MARKERS[i], "markersize": 3.2, "linewidth": 1.1}
    for i, side in enumerate(NAMES)
}


def draw_rankings(
    teacher: AblationResults,
    free: AblationResults,
    *,
    sources: list[int] | None = None,
    topk: int | None = None,
    block_size: int | None = None,
    pool_positions: int | None = None,
) -> Figure:
    """What each source's pool keeps, by source layer, in both runs; and one run's ranking over the other's."""
    cell = source.chosen(teacher, topk, block_size, pool_positions)
    table = choose(compared_rankings(teacher, free, sources), **cell)
    (agreed,) = rank_agreement(table).to_dict("records")
    pool = f"pool of {cell['pool_positions']} in blocks of {cell['block_size']}"
    about = source.facts(teacher, f"k = {cell['topk']}", pool, f"consumers behind layer {table['source'].max()}")
    documents = int(table["documents"].iloc[0])
    about.append(f"applied: {applied_of(free.manifest) or 'a selection'}")
    about.append(f"both over {plural(documents, 'document')}" + (", bars: 95 % interval" if documents > 1 else ""))
    with mpl.rc_context(STYLE):
        figure, (kept, ranks) = _two(f"Candidate sources: rank correlation {agreed['rank_correlation']:.3f}", about)
        for side in NAMES:
            _with_bars(kept, table["source"], table, f"kept_{side}", side)
        kept.set(xlabel="source layer", ylabel="share of single-level coverage kept")
        kept.legend()
        ranks.plot([1, len(table)], [1, len(table)], color="#9a9a9a", linewidth=0.8, zorder=0)
        ranks.scatter(table["rank_teacher"], table["rank_free"], s=10, color=CURVE_COLOURS[0])
        for row in table.itertuples(index=False):
            ranks.annotate(
                str(row.source), (row.rank_teacher, row.rank_free), (2, 2), textcoords="offset points", size=6
            )
        for scale in (kept.xaxis, ranks.xaxis, ranks.yaxis):
            scale.set_major_locator(MaxNLocator(integer=True))
        ranks.set(xlabel="rank, teacher-forced", ylabel="rank, free-running (source layers beside the points)")
    figure.table = table
    return figure


def draw_coverage(
    teacher: Results, free: Results, metric: str = "coverage", *, topk: int | None = None, scorer: str | None = None
) -> Figure:
    """A metric by layer in both runs: an axes a scorer, pool and compress ratio, at one k (the largest by default).

    Raises:
        ValueError: a k or scorer that was not measured.
    """
    table = compared_coverage(teacher, free, metric)
    for name, value in (("topk", topk or int(table["topk"].max())), ("scorer", scorer)):
        if value is not None and value not in set(table[name]):
            raise ValueError(f"{name}={value}: not in both runs; there are {sorted(table[name].unique())}")
        table = table if value is None else table[table[name] == value]
    shown = table.assign(bound=False, curve="", scorer_options=table["scorer_options"].map(_text))
    shown["curve"] = curve_labels(shown)
    parts = list(shown.groupby(["curve", "compress_ratio"], sort=True))
    documents = int(table["documents"].iloc[0])
    about = [
        f"{table['model'].iloc[0]} on {table['data'].iloc[0]}", plural(documents, "document"),
        f"k = {int(table['topk'].iloc[0])}", f"applied: {applied_of(free.manifest)}",
        "bars: 95 % interval over documents" if documents > 1 else "one document, so no interval",
    ]  # fmt: skip
    with mpl.rc_context(STYLE):
        figure, axes = grid(len(parts), columns_for(len(parts)), "Teacher-forced against free-running", about)
        for axis, ((curve, ratio), rows) in zip(axes, parts, strict=True):
            for side in NAMES:
                _with_bars(axis, rows["layer"], rows, f"{metric}_{side}", side)
            axis.set(title=f"{curve}, ratio {ratio}", xlabel="layer", ylabel=axis_label(metric, short=True))
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.label_outer()
        axes[0].legend()
    figure.table = table
    return figure


def _two(title: str, about: list[str]) -> tuple[Any, list[Axes]]:
    """Two axes with scales of their own."""
    figure, axes = grid(2, 2, title, about, height=2.8)
    for axis in axes:
        axis.remove()
    return figure, list(figure.subplots(1, 2))


def _with_bars(axis: Axes, at: pd.Series, table: pd.DataFrame, column: str, side: str) -> None:
    spans = [table[column] - table[f"{column}_low"], table[f"{column}_high"] - table[column]]
    shown: Any = np.clip(np.nan_to_num(np.array(spans, dtype=float)), 0, None)
    axis.errorbar(at, table[column].astype(float), yerr=shown, elinewidth=0.8, label=NAMES[side], **LOOK[side])


def _text(options: Any) -> str:
    import json

    return options if isinstance(options, str) else json.dumps(options, sort_keys=True)
