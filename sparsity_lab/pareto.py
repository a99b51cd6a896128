"""Cost against what is kept, of every measured cell, and which of them no other beats.

setting = Setting(load_devices()["h200"], context_tokens=131072)
table = pareto([results], setting, layers=0.9)     # a row a cell
table[table["dominated"] == False]                 # the choices worth having
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from sparsity_lab.pricing import Setting, cell_of, prices
from sparsity_lab.results import Results, merge_results, resampled

if TYPE_CHECKING:
    from sparsity_lab.evaluation.summary import EvaluationResults

RISING = ("coverage", "relative_coverage", "total_coverage", "recall", "worst_head_coverage")  # 1 = nothing lost
GROUP = ["model", "data", "length"]  # cells are compared where these agree


def kept(results: Results, metric: str = "coverage", layers: float = 0.9) -> pd.DataFrame:
    """What each cell keeps; a row a cell.

    `kept`: the value of `metric` that at least the share `layers` of the layers reach; `mean`: their mean; both with
    95 % intervals over documents (NaN with a single one) as `_low` and `_high`. `num_layers`: how many layers there
    are, `dense_layers` of which come before the cell's first index source, stay dense and keep everything.

    Raises:
        ValueError: a metric that is none of RISING, or layers not in (0, 1].
    """
    if metric not in RISING:
        raise ValueError(f"metric={metric!r}: must be one of {', '.join(RISING)}")
    if not 0 < layers <= 1:
        raise ValueError(f"layers={layers}: must be a share, above 0 and at most 1")
    draws = functools.cache(lambda documents: resampled(documents, 1000, seed=0))
    wide = results.per_document().pivot(index=["cell_id", "layer"], columns="document", values=metric)
    rows = []
    for key, found in wide.dropna(how="all").groupby(level="cell_id", sort=False):
        values = found.to_numpy(dtype=float)
        values = values[:, np.isfinite(values).any(axis=0)]
        dense = _dense_layers(results, str(key))
        matrix = np.vstack([values, np.ones((dense, values.shape[1]))])
        least, times = needed_layers(layers, len(matrix)), draws(values.shape[1])

        def reached(means: np.ndarray, least: int = least) -> np.ndarray:
            return np.sort(means, axis=-1)[..., -least]

        rows.append(
            {"cell_id": key, **_with_interval("kept", matrix, reached, times)}
            | _with_interval("mean", matrix, lambda means: means.mean(axis=-1), times)
            | {"num_layers": len(matrix), "dense_layers": dense, "documents": values.shape[1]}
        )
    return pd.DataFrame(rows)


def needed_layers(share: float, count: int) -> int:
    """How many of `count` layers are at least that share of them."""
    return math.ceil(share * count - 1e-9)


def _dense_layers(results: Results, key: str) -> int:
    """Layers before the first index source, among those that the results could have measured."""
    sources = cell_of(results.cells[key]).selection.index_source_layers
    if sources is None:
        return 0
    measured = set(results.tallies["layer"]) | set(
        ((results.manifest.get("model") or {}).get("shape") or {}).get("attention_layers", ())
    )
    return sum(layer < sources[0] for layer in measured)


def _with_interval(
    name: str, matrix: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], times: np.ndarray
) -> dict[str, float]:
    """A statistic of the layers' means over documents, and its bootstrap interval; matrix [layers, documents], times as
    of `results.resampled`. In a resample where a layer is undefined it keeps its mean over all documents."""
    means = np.nanmean(matrix, axis=1)
    low = high = np.nan
    if matrix.shape[1] > 1:
        weight = times @ np.isfinite(matrix).T
        sums = times @ np.nan_to_num(matrix).T
        drawn = np.where(weight > 0, sums / np.maximum(weight, 1), means)
        low, high = np.percentile(statistic(drawn), [2.5, 97.5])
    return {name: float(statistic(means)), f"{name}_low": float(low), f"{name}_high": float(high)}


def pareto(
    parts: Sequence[Results], setting: Setting, *, metric: str = "coverage", layers: float = 0.9
) -> pd.DataFrame:
    """Every measured cell with its fields, `label`, what it keeps (see `kept`), what it costs (see `prices`), and
    `dominated`: whether another cell of the same model, data and length keeps at least as much for at most as much
    (None where there is no price). Cells that keep nothing defined, all rows being saturated, are left out.

    Args:
        parts: results as they were loaded, one a folder, since each tells the shapes of its own model and indexers.
    """
    merged = merge_results(parts)
    priced = pd.concat([prices(part, setting) for part in parts]).drop_duplicates("cell_id")
    found = kept(merged, metric, layers)
    if found.empty:
        raise ValueError(f"{metric}: not defined in any cell: every row is saturated, or it was not measured")
    table = merged.cell_frame().merge(found, on="cell_id").merge(priced, on="cell_id")
    table["saturated_share"] = table["cell_id"].map(_saturated(merged))
    order = {**dict.fromkeys(GROUP, True), "seconds": True, "kept": False}
    return _judged(table, table["kept"]).sort_values([*order], ascending=[*order.values()], ignore_index=True)


def _judged(table: pd.DataFrame, value: pd.Series) -> pd.DataFrame:
    """The table with `label` and `dominated`, by `seconds` and what is had for them."""
    out = table.assign(label=[cell_of(row).label() for _, row in table.iterrows()], dominated=None)
    for _, rows in out[out["unpriced"].isna() & value.notna()].groupby(GROUP, dropna=False):
        found = dominated(rows["seconds"].to_numpy(dtype=float), value[rows.index].to_numpy(dtype=float))
        out.loc[rows.index, "dominated"] = found
    return out


def dominated(price: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Which points another one beats: at most the price, at least the value, and one of them better; bool [n]."""
    cheaper, better = price[:, None] >= price, value[:, None] <= value  # [i, j]: j is no worse than i
    strictly = (price[:, None] > price) | (value[:, None] < value)
    return np.asarray((cheaper & better & strictly).any(axis=1))


def _saturated(results: Results) -> pd.Series:
    """Share of rows with something visible that select everything, by cell."""
    sums = results.tallies.groupby("cell_id")[["rows", "saturated"]].sum()
    return sums["saturated"] / sums.sum(axis=1).clip(lower=1)


def priced_loss(
    parts: Sequence[EvaluationResults], setting: Setting, metric: str = "perplexity_difference"
) -> pd.DataFrame:
    """Every evaluated cell with what it costs (see `prices`) and `dominated`: whether another cell of the same model,
    data and length loses at most as much of `metric` for at most as much (None where there is no price)."""
    from sparsity_lab.evaluation.summary import merge

    frame = merge(parts).frame()
    priced = pd.concat([prices(part, setting) for part in parts]).drop_duplicates("cell_id")
    table = frame.merge(priced, on="cell_id")
    return _judged(table, -table[metric])
