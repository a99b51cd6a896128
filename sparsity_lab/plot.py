"""Every figure as a function that returns a matplotlib Figure, with the tidy table behind it as `figure.table`.

    import sparsity_lab as sl
    results = sl.load("results/recall/smollm2-pydoc-2048")
    sl.plot.coverage(results)
    sl.plot.save(sl.plot.density(results), "density")      # density.png, .svg, .pdf, .csv

Nothing here touches pyplot or its settings, so a notebook's own figures stay as they are.
"""

from __future__ import annotations

import importlib
from typing import Any

from matplotlib.figure import Figure

from sparsity_lab.compare import against
from sparsity_lab.figures.attribution import draw_attribution as attribution
from sparsity_lab.figures.curves import curves, two_level
from sparsity_lab.figures.families import family
from sparsity_lab.figures.heads import head_spread
from sparsity_lab.figures.look import save
from sparsity_lab.figures.maps import by_layer
from sparsity_lab.figures.pareto import draw_cost_coverage as cost_coverage
from sparsity_lab.figures.pretraining import draw_pretraining as pretraining
from sparsity_lab.figures.reuse import draw_reuse as reuse
from sparsity_lab.figures.source import draw_pool_sizes as pool_sizes
from sparsity_lab.figures.source import draw_ranking as source_ranking
from sparsity_lab.figures.source import draw_sources as sources
from sparsity_lab.figures.training import draw_training as training
from sparsity_lab.results import Results

# Resolved on first use: they need what the others do not.
_ELSEWHERE = {
    "evaluation": "sparsity_lab.evaluation.plot.draw_evaluation",
    "free_running_coverage": "sparsity_lab.figures.free_running.draw_coverage",
    "free_running_rankings": "sparsity_lab.figures.free_running.draw_rankings",
    "proxy_agreement": "sparsity_lab.evaluation.plot.draw_agreement",
    "proxy_scatter": "sparsity_lab.evaluation.plot.draw_scatter",
}
__all__ = [
    "against",
    "attribution",
    "by_layer",
    "by_position",
    "cost_coverage",
    "coverage",
    "curves",
    "density",
    "family",
    "head_spread",
    "over_layers",
    "pool_sizes",
    "pretraining",
    "recall",
    "reuse",
    "save",
    "scorers",
    "source_ranking",
    "sources",
    "training",
    "two_level",
    *_ELSEWHERE,
]
SINGLE_LEVEL = "candidate_source_layer.isnull() and index_source_layers.isnull()"


def recall(results: Results, **choice: Any) -> Figure:
    """`curves` of the recall: |S ∩ O_k| / min(k, v)."""
    return curves(results, "recall", **choice)


def coverage(results: Results, **choice: Any) -> Figure:
    """`curves` of the coverage: the share of the visible dense mass that the selection keeps."""
    return curves(results, "coverage", **choice)


def density(results: Results, metric: str = "coverage", **choice: Any) -> Figure:
    """`curves` of a metric over the measured share of visible tokens that are attended."""
    return curves(results, metric, over="density", **choice)


def by_position(results: Results, metric: str = "coverage", **choice: Any) -> Figure:
    """`curves` of a metric over the query's position, at one k."""
    return curves(results, metric, over="bucket", **choice)


def over_layers(results: Results, metric: str = "coverage", **choice: Any) -> Figure:
    """`curves` of a metric layer by layer, at one k."""
    return curves(results, metric, over="layer", **choice)


def scorers(results: Results, metric: str = "coverage", *, where: str | None = None, **choice: Any) -> Figure:
    """`curves` of single-level cells, an axes a ratio: the scorers beside oracle, recency and random."""
    where = SINGLE_LEVEL if where is None else f"({where}) and {SINGLE_LEVEL}"
    return curves(results, metric, where=where, split_ratios=True, **choice)


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module 'sparsity_lab.plot' has no attribute {name!r}")
    module, _, function = _ELSEWHERE[name].rpartition(".")
    return getattr(importlib.import_module(module), function)
