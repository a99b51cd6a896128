"""Figures of an ablation: what each consumer loses by each source's pool, by pool size, and the sources' ranking.

Where not given, k is the largest measured, block size and pool size the middle ones, and sources the first two thirds
of the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from sparsity_lab.ablation_run import AblationResults
from sparsity_lab.ablation_table import (
    choose,
    compared_sources,
    layers_of,
    matrix,
    over_consumers,
    ranking,
    source_means,
)
from sparsity_lab.figures.look import CURVE_COLOURS, MARKERS, STYLE, WIDTH, Chart, columns_for, wrap
from sparsity_lab.figures.table import plural

SIDE = 2.5  # inches a heat map
NO_INTERVALS = "means over documents"
LABELS = {
    "loss": "coverage lost to the pool",
    "coverage": "coverage",
    "pool_recall": "share of the oracle's top-k in the pool",
    "pool_coverage": "share of dense attention in the pool",
}


def facts(results: AblationResults, *more: str) -> list[str]:
    """What a figure's title says beside its subject."""
    manifest, found = results.manifest, results.source["document"].nunique()
    documents = plural(found, "document")
    data = manifest["identity"]["data"]
    ratio = manifest["identity"]["ablation"]["compress_ratio"]
    where = f"{data['name']}, {documents} x {data['length']} tokens"
    return [manifest["model"]["name"], where, f"scorer {manifest['scorer']}", f"ratio {ratio}", *more]


def headed(figure: Figure, title: str, about: Sequence[str]) -> None:
    """Put the title and the facts over a figure."""
    figure.suptitle("\n".join([title, *wrap(about, figure.get_figwidth())]))


def draw_maps(
    maps: Sequence[tuple[str, pd.DataFrame]],
    title: str,
    about: Sequence[str],
    label: str,
    behind: pd.DataFrame,
    *,
    lowest: float | None = None,
) -> Figure:
    """Heat maps of source x consumer with one scale.

    maps: (heading, matrix); behind: the tidy table they come from; lowest: the scale's lower end.
    """
    columns = columns_for(len(maps))
    rows = -(-len(maps) // columns)
    values = np.concatenate([table.to_numpy(dtype=float).ravel() for _, table in maps])
    low = float(np.nanmin(values)) if lowest is None else lowest
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Chart(figsize=(min(max(SIDE * columns + 0.9, 4.4), WIDTH[3]), SIDE * rows + 0.8), layout="constrained")
        headed(figure, title, [*about, NO_INTERVALS])
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
        for axis in axes[len(maps) :]:
            axis.remove()
        for axis, (heading, table) in zip(axes, maps, strict=False):
            image = axis.imshow(table, vmin=low, vmax=float(np.nanmax(values)), cmap="viridis", aspect="auto")
            axis.set(title=heading, xlabel="consumer layer", ylabel="source layer")
            _layer_ticks(axis, list(table.columns), list(table.index))
            axis.label_outer()
        figure.colorbar(image, ax=list(axes[: len(maps)]), label=label)
    figure.table = behind
    return figure


def _layer_ticks(axis: Axes, across: Sequence[Any], down: Sequence[Any]) -> None:
    for along, layers in ((axis.xaxis, across), (axis.yaxis, down)):
        step = max(1, len(layers) // 6)
        along.set_ticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])


def chosen(
    results: AblationResults, topk: int | None, block_size: int | None = None, pool_positions: int | None = None
) -> dict[str, int]:
    """One k, block size and pool size: as given, or the usual ones."""
    a = results.ablation
    return {
        "topk": topk or a.topk[-1],
        "block_size": block_size or a.block_sizes[len(a.block_sizes) // 2],
        "pool_positions": pool_positions or a.pool_positions[len(a.pool_positions) // 2],
    }


def draw_sources(
    results: AblationResults, metric: str = "loss", *, topk: int | None = None, block_size: int | None = None
) -> Figure:
    """A heat map of candidate source x consumer for every pool size. metric: one of LABELS."""
    if metric not in LABELS:
        raise ValueError(f"metric={metric!r}: must be one of {', '.join(LABELS)}")
    cell = chosen(results, topk, block_size)
    topk, block_size = cell["topk"], cell["block_size"]
    table = choose(source_means(results), topk=topk, block_size=block_size)
    maps = [(f"pool of {size}", matrix(rows, metric)) for size, rows in table.groupby("pool_positions")]
    about = facts(results, f"k = {topk}", f"blocks of {block_size}")
    return draw_maps(maps, "Candidate sources and their consumers", about, LABELS[metric], table)


def draw_pool_sizes(
    results: AblationResults, sources: Sequence[int] | None = None, *, topk: int | None = None, common: bool = True
) -> Figure:
    """Loss over pool size: an axes a block size, a curve a source, dark to light with depth."""
    topk, sources = chosen(results, topk)["topk"], compared_sources(layers_of(results), sources)
    whole = choose(over_consumers(results, sources, common=common), topk=topk)
    means = whole.groupby(["block_size", "source", "pool_positions"], sort=True)["loss"].mean()
    table = means.reset_index()
    sizes = sorted(table["block_size"].unique())
    colours = mpl.colormaps["viridis"]
    with mpl.rc_context(STYLE):
        figure = Chart(figsize=(min(max(2.3 * len(sizes) + 1.2, 4.4), WIDTH[3]), 3.3), layout="constrained")
        headed(
            figure,
            "What the pool costs, by its size",
            [*facts(results, f"k = {topk}"), consumers_text(table, sources, common), NO_INTERVALS],
        )
        axes = list(figure.subplots(1, len(sizes), squeeze=False, sharey=True).flatten())
        for axis, size in zip(axes, sizes, strict=True):
            for source, rows in table[table["block_size"] == size].groupby("source"):
                place = list(sources).index(int(source)) / max(1, len(sources) - 1)
                axis.plot(rows["pool_positions"], rows["loss"], color=colours(0.9 * place), **_marked(place))
            axis.set(title=f"blocks of {size}", xlabel="pool (positions)", xscale="log")
            axis.set_xticks(sorted(table["pool_positions"].unique()))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
            axis.xaxis.set_minor_locator(NullLocator())
        axes[0].set_ylabel(LABELS["loss"])
        scale = mpl.cm.ScalarMappable(mpl.colors.Normalize(min(sources), max(max(sources), min(sources) + 1)), colours)
        figure.colorbar(scale, ax=axes, label="source layer", ticks=MaxNLocator(integer=True))
    figure.table = whole
    return figure


def _marked(place: float) -> dict[str, Any]:
    """Markers that go with the depth of a source, from 0 to 1."""
    return {"marker": MARKERS[round(place * (len(MARKERS) - 1))], "markersize": 3.2, "linewidth": 1.0}


def consumers_text(table: pd.DataFrame, sources: Sequence[int], common: bool) -> str:
    """Which consumers the means are over."""
    return f"consumers behind layer {max(sources)}" if common else "each source's own consumers"


def draw_ranking(
    results: AblationResults,
    sources: Sequence[int] | None = None,
    *,
    topk: int | None = None,
    block_size: int | None = None,
    pool_positions: int | None = None,
    common: bool = True,
) -> Figure:
    """Share of single-level coverage kept with each source's pool, best first, with intervals over documents."""
    cell, sources = chosen(results, topk, block_size, pool_positions), compared_sources(layers_of(results), sources)
    table = ranking(results, sources, common=common, **cell)
    pool = f"pool of {cell['pool_positions']} in blocks of {cell['block_size']}"
    about = facts(results, f"k = {cell['topk']}", pool, consumers_text(table, sources, common))
    several = table["documents"].max() > 1
    about.append("bars: 95 % interval over documents" if several else "one document, so no interval")
    with mpl.rc_context(STYLE):
        figure = Chart(figsize=(4.8, 1.5 + 0.17 * len(table)), layout="constrained")
        headed(figure, "Candidate sources, best first", about)
        axis = figure.subplots()
        places = range(len(table))
        spans = [table["kept"] - table["kept_low"], table["kept_high"] - table["kept"]]
        shown: Any = np.clip(np.nan_to_num(np.array(spans)), 0, None)
        axis.errorbar(table["kept"], places, xerr=shown, fmt="o", markersize=3.5, color=CURVE_COLOURS[0], elinewidth=1)
        axis.set_yticks(list(places), [str(source) for source in table["source"]])
        axis.invert_yaxis()
        axis.set(xlabel="share of single-level coverage kept", ylabel="source layer")
    figure.table = table
    return figure
