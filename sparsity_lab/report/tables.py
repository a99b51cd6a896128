"""The tables of a report: every cell, and the layers of the one that it tells about."""

from __future__ import annotations

from typing import Any

import pandas as pd

from sparsity_lab.measurement import ENVELOPE
from sparsity_lab.recommend import Answer, Wish, wished
from sparsity_lab.report.blocks import number, table, word
from sparsity_lab.results import Results


def tables(results: Results, cells: pd.DataFrame, answer: Answer | None, wish: Wish) -> list[Any]:
    """Every cell with what it keeps and costs; and the layers of the one that is told about."""
    if cells.empty:
        return []
    chosen = None if answer is None or answer.chosen is None else answer.chosen["cell_id"]
    by_id = results.frame(()).set_index("cell_id")
    columns = [
        "configuration", "role", f"mean {wish.metric}", f"{wished(wish.layers)} of layers keep", "recall",
        "relative coverage", "density", "saturated rows", "time a token (µs)", "of dense",
    ]  # fmt: skip
    rows = []
    for _, row in cells.iterrows():
        means = by_id.loc[row["cell_id"]]
        rows.append(
            [
                word(row["label"]),
                word("recommended" if row["cell_id"] == chosen else _role(row)),
                number(row["mean"], low=row["mean_low"], high=row["mean_high"]),
                number(row["kept"], low=row["kept_low"], high=row["kept_high"]),
                number(means["recall"], low=means["recall_low"], high=means["recall_high"]),
                number(means["relative_coverage"]),
                number(means["density"]),
                number(100 * row["saturated_share"], "{:.0f}\u00a0%"),
                number(_price(row, "seconds", 1e6), "{:.3g}"),
                number(_price(row, "relative_cost", 1.0)),
            ]
        )
    caption = "Cells: means over documents with 95 % intervals; costs at the setting of the recommendation"
    out = [table(caption, columns, rows, [row["cell_id"] == chosen for _, row in cells.iterrows()])]
    return out if answer is None else [*out, _layers(results, answer)]


def _price(row: Any, name: str, factor: float) -> float | None:
    value = row.get(name)
    return None if value is None or pd.isna(value) else factor * value


def _role(row: Any) -> str:
    if row["scorer"] in ENVELOPE:
        return "bound"
    if row["dominated"] is None or pd.isna(row["dominated"]):
        return "no price"
    return "dominated" if row["dominated"] else "worth its price"


def _layers(results: Results, answer: Answer) -> Any:
    row, wish = answer.shown, answer.wish
    frame = results.only([row["cell_id"]]).frame()
    names = ["coverage", "oracle_coverage", "relative_coverage", "recall", "total_coverage"]
    rows = [
        [
            number(int(layer["layer"]), "{:d}"),
            *(number(layer[name], low=layer[f"{name}_low"], high=layer[f"{name}_high"]) for name in names),
        ]
        for _, layer in frame.iterrows()
    ]
    least = wish.coverage
    marked = [bool(value >= least) for value in frame[wish.metric]]
    caption = f"Layers of {row['label']}; those that keep {wished(least)} {wish.metric} are marked"
    return table(caption, ["layer", *(name.replace("_", " ") for name in names)], rows, marked)
