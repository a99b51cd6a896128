"""Where coverage is lost: a bar a layer, stacked from what the layer keeps up to what the best tokens hold."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sparsity_lab.ablation_run import AblationResults
from sparsity_lab.ablation_table import choose
from sparsity_lab.attribution import LOSSES, waterfall
from sparsity_lab.figures.look import CURVE_COLOURS, STYLE, Chart
from sparsity_lab.figures.source import NO_INTERVALS, facts, headed

FILLS = {  # colour and hatch, so that grey print tells them apart
    "compression_loss": (CURVE_COLOURS[0], ""),
    "pool_loss": (CURVE_COLOURS[1], "////"),
    "scorer_loss": (CURVE_COLOURS[2], ""),
    "reuse_loss": (CURVE_COLOURS[3], "...."),
}
assert set(FILLS) == set(LOSSES)


def draw_attribution(results: AblationResults, *, topk: int | None = None) -> Figure:
    """The four losses by layer and, last, their mean over layers. Gains (negative losses) hang below zero.

    topk: one of those measured, None = the largest.
    """
    topk = topk or results.ablation.topk[-1]
    layers = choose(waterfall(results.attribution), topk=topk)
    overall = choose(waterfall(results.attribution, overall=True), topk=topk)
    names = [*(str(layer) for layer in layers["layer"]), "mean"]
    places = np.append(np.arange(len(layers)), len(layers) + 0.7)
    above, below = np.zeros(len(names)), np.zeros(len(names))
    with mpl.rc_context(STYLE):
        figure = Chart(figsize=(max(4.6, 1.4 + 0.2 * len(names)), 3.2), layout="constrained")
        headed(figure, "Where coverage is lost", [*facts(results, f"k = {topk}"), *_selection(results), NO_INTERVALS])
        axis = figure.subplots()
        for loss in LOSSES:
            values = np.append(layers[loss].to_numpy(), overall[loss].to_numpy())
            bottom = np.where(values >= 0, above, below)
            axis.bar(places, values, bottom=bottom, width=0.8, **_filled(loss))
            above, below = above + values.clip(min=0), below + values.clip(max=0)
        axis.axhline(0, color="#1a1a1a", linewidth=0.6)
        axis.grid(visible=False, axis="x")
        axis.set_xticks(places, names, rotation=90 if len(names) > 16 else 0)
        axis.set(xlabel="layer", ylabel="share of visible dense attention")
        figure.legend(loc="outside lower center", ncols=4)
    figure.table = pd.concat([layers, overall.assign(layer="mean")], ignore_index=True)
    return figure


def _filled(loss: str) -> dict[str, Any]:
    colour, hatch = FILLS[loss]
    return {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0, "label": loss.replace("_", " ")}


def _selection(results: AblationResults) -> list[str]:
    """The selection whose losses these are."""
    pool, sources = (results.manifest["identity"][key] for key in ("candidate", "index_source_layers"))
    out = [] if pool is None else [f"pool {pool[1]}x{pool[2]} of layer {pool[0]}"]
    return out if sources is None else [*out, f"selected in layers {', '.join(map(str, sources))}"]
