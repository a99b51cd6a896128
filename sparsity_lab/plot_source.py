"""Figures of an ablation: what each consumer loses by each source's pool, by pool size, and the sources' ranking."""

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
from sparsity_lab.ablation_table import choose, matrix, over_consumers, ranking, source_means
from sparsity_lab.plot_figure import CURVE_COLOURS, STYLE, Chart, wrap

SIDE = 2.5  # inches a heat map
LABELS = {
    "loss": "coverage lost to the pool",
    "coverage": "coverage",
    "pool_recall": "share of the oracle's top-k in the pool",
    "pool_coverage": "share of dense attention in the pool",
}


def facts(results: AblationResults, *more: str) -> list[str]:
    """What a figure's title says beside its subject."""
    manifest, found = results.manifest, results.source["document"].nunique()
    documents = f"{found} document{'s' * (found > 1)}"
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
    *,
    lowest: float | None = None,
) -> Figure:
    """Heat maps of source x consumer with one scale. maps: (heading, matrix); lowest: the scale's lower end."""
    columns = min(len(maps), 4)
    rows = -(-len(maps) // columns)
    values = np.concatenate([table.to_numpy(dtype=float).ravel() for _, table in maps])
    low = float(np.nanmin(values)) if lowest is None else lowest
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Chart(figsize=(max(SIDE * columns + 0.9, 4.4), SIDE * rows + 0.8), layout="constrained")
        headed(figure, title, about)
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
        for axis in axes[len(maps) :]:
            axis.remove()
        for axis, (heading, table) in zip(axes, maps, strict=False):
            image = axis.imshow(table, vmin=low, vmax=float(np.nanmax(values)), cmap="viridis", aspect="auto")
            axis.set(title=heading, xlabel="consumer layer", ylabel="source layer")
            _layer_ticks(axis, list(table.columns), list(table.index))
            axis.label_outer()
        figure.colorbar(image, ax=list(axes[: len(maps)]), label=label)
    return figure


def _layer_ticks(axis: Axes, across: Sequence[Any], down: Sequence[Any]) -> None:
    for along, layers in ((axis.xaxis, across), (axis.yaxis, down)):
        step = max(1, len(layers) // 6)
        along.set_ticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])


def draw_sources(results: AblationResults, metric: str, *, topk: int, block_size: int) -> Figure:
    """A heat map a pool size."""
    table = choose(source_means(results), topk=topk, block_size=block_size)
    maps = [(f"pool of {size}", matrix(rows, metric)) for size, rows in table.groupby("pool_positions")]
    about = facts(results, f"k = {topk}", f"blocks of {block_size}")
    return draw_maps(maps, "Candidate sources and their consumers", about, LABELS[metric])


def draw_pool_sizes(results: AblationResults, sources: Sequence[int], *, topk: int, common: bool) -> Figure:
    """Loss over pool size: an axes a block size, a curve a source, dark to light with depth."""
    table = choose(over_consumers(results, sources, common=common), topk=topk)
    table = table.groupby(["block_size", "source", "pool_positions"], sort=True)["loss"].mean().reset_index()
    sizes = sorted(table["block_size"].unique())
    colours = mpl.colormaps["viridis"]
    with mpl.rc_context(STYLE):
        figure = Chart(figsize=(max(2.3 * len(sizes) + 1.2, 4.4), 3.3), layout="constrained")
        headed(
            figure,
            "What the pool costs, by its size",
            [*facts(results, f"k = {topk}"), consumers_text(table, sources, common)],
        )
        axes = list(figure.subplots(1, len(sizes), squeeze=False, sharey=True).flatten())
        for axis, size in zip(axes, sizes, strict=True):
            for source, rows in table[table["block_size"] == size].groupby("source"):
                place = list(sources).index(int(source)) / max(1, len(sources) - 1)
                axis.plot(rows["pool_positions"], rows["loss"], color=colours(0.95 * place), marker="o", markersize=3)
            axis.set(title=f"blocks of {size}", xlabel="pool (positions)", xscale="log")
            axis.set_xticks(sorted(table["pool_positions"].unique()))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
            axis.xaxis.set_minor_locator(NullLocator())
        axes[0].set_ylabel(LABELS["loss"])
        scale = mpl.cm.ScalarMappable(mpl.colors.Normalize(min(sources), max(max(sources), min(sources) + 1)), colours)
        figure.colorbar(scale, ax=axes, label="source layer", ticks=MaxNLocator(integer=True))
    return figure


def consumers_text(table: pd.DataFrame, sources: Sequence[int], common: bool) -> str:
    """Which consumers the means are over."""
    return f"consumers behind layer {max(sources)}" if common else "each source's own consumers"


def draw_ranking(
    results: AblationResults, sources: Sequence[int], *, topk: int, block_size: int, pool_positions: int, common: bool
) -> Figure:
    """Share of single-level coverage kept with each source's pool, best first, with intervals over documents."""
    chosen: dict[str, Any] = {"topk": topk, "block_size": block_size, "pool_positions": pool_positions}
    table = ranking(results, sources, common=common, **chosen)
    about = facts(results, f"k = {topk}", f"pool of {pool_positions} in blocks of {block_size}")
    with mpl.rc_context(STYLE):
        figure = Chart(figsize=(4.6, 1.3 + 0.17 * len(table)), layout="constrained")
        headed(figure, "Candidate sources, best first", [*about, consumers_text(table, sources, common)])
        axis = figure.subplots()
        places = range(len(table))
        spans = [table["kept"] - table["kept_low"], table["kept_high"] - table["kept"]]
        shown: Any = np.clip(np.nan_to_num(np.array(spans)), 0, None)
        axis.errorbar(table["kept"], places, xerr=shown, fmt="o", markersize=3.5, color=CURVE_COLOURS[0], elinewidth=1)
        axis.set_yticks(list(places), [str(source) for source in table["source"]])
        axis.invert_yaxis()
        axis.set(xlabel="share of single-level coverage kept", ylabel="source layer")
    return figure
