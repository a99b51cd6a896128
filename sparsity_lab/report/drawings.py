"""Which figures a report has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from sparsity_lab import plot
from sparsity_lab.figures.choice import draw_choice
from sparsity_lab.measurement import ENVELOPE
from sparsity_lab.recommend import Answer
from sparsity_lab.results import Results

Drawing = tuple[str, Callable[[], Figure]]


def drawings(results: Results, cells: pd.DataFrame, answer: Answer | None) -> list[Drawing]:
    """The figures, each with its title, yet to be drawn. Those that cannot show every cell show the scorer, and k or
    ratio, of the configuration that is told about."""
    row = _told_about(cells, answer)
    found: list[Drawing] = []
    if answer is not None:
        found.append(("Cost against coverage", lambda: draw_choice(answer)))
    single: dict[str, Any] = {"where": plot.SINGLE_LEVEL}
    found += [
        ("Coverage over k, without a pool", lambda: plot.coverage(results, **single)),
        ("Recall over k, without a pool", lambda: plot.recall(results, **single)),
        ("Coverage over the share of tokens attended", lambda: plot.density(results, **single)),
    ]
    if row is not None:
        found += _focused(results, _choice(row))
    if (pooled := _most_pools(cells)) is not None:
        found += _pools(results, _choice(pooled))
    return [*found, ("Coverage by layer and k, without a pool", lambda: plot.by_layer(results, **single))]


def _told_about(cells: pd.DataFrame, answer: Answer | None) -> Any:
    """The row that the page tells most about: of the answer, else the one under test that keeps most; or None."""
    return _best(cells, "topk > 0") if answer is None else answer.shown


def _best(cells: pd.DataFrame, where: str) -> Any:
    """The row under test that keeps most among those that meet a query, or None."""
    if cells.empty:
        return None
    tested = cells[~cells["scorer"].isin(ENVELOPE)].query(where)
    return None if tested.empty else tested.sort_values("kept").iloc[-1]


def _most_pools(cells: pd.DataFrame) -> Any:
    """The best row with a pool, of the ratio that has most of them; or None."""
    ratios = [] if cells.empty else cells.loc[cells["candidate_source_layer"].notna(), "compress_ratio"].mode().tolist()
    return _best(cells, f"candidate_source_layer.notnull() and compress_ratio == {ratios[0]}") if ratios else None


def _choice(row: Any) -> dict[str, Any]:
    return {"topk": int(row["topk"]), "ratio": int(row["compress_ratio"]), "scorer": str(row["scorer"])}


def _told(choice: dict[str, Any]) -> str:
    return f"k = {choice['topk']}, ratio {choice['ratio']}"


def _focused(results: Results, choice: dict[str, Any]) -> list[Drawing]:
    """Figures at one k, of one scorer and, where they have no axis for it, one ratio."""
    every = {**choice, "ratio": None, "where": plot.SINGLE_LEVEL}
    return [
        (f"Coverage over the compress ratio, k = {choice['topk']}", lambda: plot.family(results, "ratio", **every)),
        (f"Coverage by layer, {_told(choice)}", lambda: plot.over_layers(results, **choice)),
        (f"Coverage by position, {_told(choice)}", lambda: plot.by_position(results, **choice)),
        (f"The worst head of each layer, {_told(choice)}", lambda: plot.head_spread(results, **choice)),
    ]


def _pools(results: Results, choice: dict[str, Any]) -> list[Drawing]:
    """Figures of candidate pools at one k and ratio."""
    families = {"block_size": "block size", "pool_size": "pool size", "source": "candidate source layer"}
    return [
        (f"Coverage over the {name}, {_told(choice)}", functools.partial(plot.family, results, by, **choice))
        for by, name in families.items()
    ]
