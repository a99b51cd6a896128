"""Where coverage is lost: a bar a layer, stacked from what the layer keeps up to what the best tokens hold."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from sparsity_lab.ablation_run import AblationResults
from sparsity_lab.ablation_table import choose
from sparsity_lab.attribution import LOSSES, waterfall
from sparsity_lab.plot_figure import CURVE_COLOURS, STYLE, Chart
from sparsity_lab.plot_source import facts, headed

COLOURS = dict(zip(LOSSES, CURVE_COLOURS, strict=False))


def draw_attribution(results: AblationResults, *, topk: int) -> Figure:
    """The four losses by layer and, last, their mean over layers. Gains (negative losses) hang below zero."""
    layers = choose(waterfall(results.attribution), topk=topk)
    overall = choose(waterfall(results.attribution, overall=True), topk=topk)
    names = [*(str(layer) for layer in layers["layer"]), "mean"]
    places = np.append(np.arange(len(layers)), len(layers) + 0.7)
    above, below = np.zeros(len(names)), np.zeros(len(names))
    with mpl.rc_context(STYLE):
        figure = Chart(figsize=(max(4.6, 1.4 + 0.2 * len(names)), 3.2), layout="constrained")
        headed(figure, "Where coverage is lost", [*facts(results, f"k = {topk}"), *_selection(results)])
        axis = figure.subplots()
        for loss in LOSSES:
            values = np.append(layers[loss].to_numpy(), overall[loss].to_numpy())
            bottom = np.where(values >= 0, above, below)
            axis.bar(places, values, bottom=bottom, color=COLOURS[loss], width=0.8, label=loss.replace("_", " "))
            above, below = above + values.clip(min=0), below + values.clip(max=0)
        axis.axhline(0, color="#1a1a1a", linewidth=0.6)
        axis.grid(visible=False, axis="x")
        axis.set_xticks(places, names, rotation=90 if len(names) > 16 else 0)
        axis.set(xlabel="layer", ylabel="share of visible dense attention")
        figure.legend(loc="outside lower center", ncols=4)
    return figure


def _selection(results: AblationResults) -> list[str]:
    """The selection whose losses these are."""
    pool, sources = (results.manifest["identity"][key] for key in ("candidate", "index_source_layers"))
    out = [] if pool is None else [f"pool {pool[1]}x{pool[2]} of layer {pool[0]}"]
    return out if sources is None else [*out, f"selected in layers {', '.join(map(str, sources))}"]
