"""Heat maps of how far one layer's selection serves the others."""

from __future__ import annotations

from matplotlib.figure import Figure

from sparsity_lab.ablation import REUSE_METRICS
from sparsity_lab.ablation_run import AblationResults
from sparsity_lab.ablation_table import choose, matrix, reuse_means
from sparsity_lab.figures.source import draw_maps, facts

LABELS = {
    "reuse_coverage": "coverage relative to the layer's own selection",
    "overlap": "share of selected positions in common",
    "coverage": "coverage",
}
assert set(LABELS) == set(REUSE_METRICS)


def draw_reuse(results: AblationResults, metric: str = "reuse_coverage", *, topk: int | None = None) -> Figure:
    """A heat map of selecting layer x using layer for every k, or for one."""
    if metric not in LABELS:
        raise ValueError(f"metric={metric!r}: must be one of {', '.join(LABELS)}")
    table = choose(reuse_means(results), topk=topk)
    maps = [(f"k = {k}", matrix(rows, metric)) for k, rows in table.groupby("topk")]
    return draw_maps(maps, "Selections reused by later layers", facts(results), LABELS[metric], table)
