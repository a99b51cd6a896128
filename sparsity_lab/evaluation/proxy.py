"""Proxy against truth: do the metrics of a recall run order cells as running the model with them does?

    table = agreement(pair(recall_results, evaluation_results))

Agreement is Spearman's rank correlation over cells, its sign turned so that 1 means: the better the proxy says a cell
is, the better it runs. Intervals are 95 % by bootstrap over cells and documents together, so they say how far the
figure would hold for other cells and other text of the kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from sparsity_lab.cells import Cell, Selection
from sparsity_lab.evaluation.summary import EvaluationResults, resampled_means
from sparsity_lab.results import Results, resampled

# metric -> whether more of it is better
PROXIES = {
    "coverage": True,
    "relative_coverage": True,
    "total_coverage": True,
    "worst_head_coverage": True,
    "recall": True,
    "output_error": False,
    "density": True,
}
TRUTHS = {"loss_difference": False, "kl": False, "top1_agreement": True, "retrieval": True}
FIELDS = [*Cell("", Selection()).fields(), "model", "data", "length"]
LEAST = 4  # cells below which ranks say nothing


@dataclass(frozen=True)
class Pairs:
    """Cells that both runs measured: `cells` has a row each, arrays float64 [cells, documents] by metric."""

    cells: pd.DataFrame
    proxies: dict[str, np.ndarray]
    truths: dict[str, np.ndarray]
    same_documents: bool

    def means(self) -> pd.DataFrame:
        """A row a cell: its fields and the mean of every proxy and truth."""
        found = self.cells.copy()
        for name, values in (*self.proxies.items(), *self.truths.items()):
            found[name if name not in self.truths else f"{name}_truth"] = _mean(values)
        return found


def pair(recall: Results, evaluation: EvaluationResults) -> Pairs:
    """Match the cells of both by all that says what they select, the model and the data.

    Raises:
        ValueError: fewer than LEAST cells in common.
    """
    left, right = recall.cell_frame(), evaluation.cell_frame()
    keys = [name for name in FIELDS if name in left and name in right]
    texts = [table[keys].astype(object).where(table[keys].notna(), None).astype(str) for table in (left, right)]
    named = texts[0].assign(recall_id=left["cell_id"]), texts[1].assign(evaluation_id=right["cell_id"])
    both = named[0].merge(named[1], on=keys)
    both = both.drop_duplicates("evaluation_id").drop_duplicates("recall_id")
    if len(both) < LEAST:
        raise ValueError(
            f"{len(both)} cells are in both results, at least {LEAST} are needed; they are matched by {', '.join(keys)}"
        )
    layers = recall.per_document(("layer",))
    measured = layers.groupby(["cell_id", "document"])[list(PROXIES)].mean().reset_index()
    ran = evaluation.per_document()
    proxies = {name: _wide(measured, both["recall_id"], name) for name in PROXIES}
    truths = {name: _wide(ran, both["evaluation_id"], name) for name in TRUTHS}
    cells = right.set_index("cell_id").loc[both["evaluation_id"]].reset_index()
    same = sorted(measured["document"].unique()) == sorted(ran["document"].unique())
    return Pairs(cells, _defined(proxies), _defined(truths), same)


def _defined(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: values for name, values in arrays.items() if np.isfinite(values).any()}


def _wide(table: pd.DataFrame, ids: pd.Series, name: str) -> np.ndarray:
    return table.pivot(index="cell_id", columns="document", values=name).reindex(ids).to_numpy(dtype=float)


def agreement(pairs: Pairs, *, resamples: int = 1000, seed: int = 0) -> pd.DataFrame:
    """A row a truth and proxy, best first: `rho` (Spearman's), `agreement` with `_low` and `_high`, `cells`, and
    `tied`, not to be told from the best: the interval of its distance reaches 0. A proxy that is the same for all cells
    has no agreement."""
    rows = []
    draws = _draws(pairs, resamples, seed)
    for truth, more_is_better in TRUTHS.items():
        if truth not in pairs.truths:
            continue
        drawn = {p: draws.agreements(p, truth) for p in pairs.proxies}
        found = []
        for proxy, values in drawn.items():
            rho, cells = _rho(_mean(pairs.proxies[proxy]), _mean(pairs.truths[truth]))
            sign = 1 if PROXIES[proxy] == more_is_better else -1
            low, high = np.nanpercentile(values, [2.5, 97.5]) if np.isfinite(values).any() else (np.nan, np.nan)
            found.append(
                {"truth": truth, "proxy": proxy, "rho": rho, "agreement": sign * rho, "agreement_low": low,
                 "agreement_high": high, "cells": cells}
            )  # fmt: skip
        found.sort(key=lambda row: -np.nan_to_num(row["agreement"], nan=-2))
        best = drawn[str(found[0]["proxy"])]
        for row in found:
            apart = best - drawn[str(row["proxy"])]
            row["tied"] = bool(np.isfinite(apart).any() and np.nanpercentile(apart, 2.5) <= 0)
        rows += found
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class _Draws:
    """The same draws of cells and documents for every proxy and truth, so that they can be compared."""

    pairs: Pairs
    cells: np.ndarray  # int [resamples, cells]
    proxies: dict[str, np.ndarray]  # [cells, resamples]: means over the drawn documents
    truths: dict[str, np.ndarray]

    def agreements(self, proxy: str, truth: str) -> np.ndarray:
        """[resamples]; NaN where a draw leaves nothing to rank."""
        sign = 1 if PROXIES[proxy] == TRUTHS[truth] else -1
        p, t = self.proxies[proxy], self.truths[truth]
        drawn = [np.take_along_axis(values.T, self.cells, axis=1) for values in (p, t)]
        if all(np.isfinite(values).all() for values in drawn):
            return sign * _correlations(*(_rank_rows(values) for values in drawn))
        return np.array([sign * _rho(a, b)[0] for a, b in zip(*drawn, strict=True)])


def _draws(pairs: Pairs, resamples: int, seed: int) -> _Draws:
    def means(arrays: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
        times = {n: resampled(n, resamples, seed) for n in {values.shape[1] for values in arrays.values()}}
        return {name: resampled_means(values, times[values.shape[1]]) for name, values in arrays.items()}

    count = len(pairs.cells)
    cells = np.random.default_rng(seed + 1).integers(count, size=(resamples, count))
    other = seed if pairs.same_documents else seed + 2
    return _Draws(pairs, cells, means(pairs.proxies, seed), means(pairs.truths, other))


def _mean(values: np.ndarray) -> np.ndarray:
    return resampled_means(values, np.ones((1, values.shape[1])))[:, 0]


def _rho(a: np.ndarray, b: np.ndarray) -> tuple[float, int]:
    """Spearman's rank correlation over the cells where both are defined, and how many those are; NaN for fewer than
    LEAST or where one is constant."""
    both = np.isfinite(a) & np.isfinite(b)
    count = int(both.sum())
    if count < LEAST:
        return float("nan"), count
    return float(_correlations(*(_rank_rows(x[both][None]) for x in (a, b)))[0]), count


def _rank_rows(values: np.ndarray) -> np.ndarray:
    """Ranks from 1 within each row of [m, n], equal values sharing their mean rank."""
    ranks = np.empty(values.shape)
    for i, row in enumerate(values):
        ordered = np.sort(row)
        ranks[i] = (np.searchsorted(ordered, row, "left") + np.searchsorted(ordered, row, "right") + 1) / 2
    return ranks


def _correlations(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Pearson's correlation row by row, NaN where a row is constant."""
    a, b = (x - x.mean(axis=1, keepdims=True) for x in (a, b))
    size = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    return np.divide((a * b).sum(1), size, out=np.full(len(a), np.nan), where=size > 0)


def verdict(table: pd.DataFrame) -> list[str]:
    """A line a truth: the proxy that orders cells best, and those that cannot be told from it."""
    lines = []
    for truth, rows in table.groupby("truth", sort=False):
        rows = rows[rows["agreement"].notna()]
        if rows.empty:
            lines.append(f"{truth}: no proxy can be judged; the cells do not differ in it")
            continue
        best, others = rows.iloc[0], rows.iloc[1:]
        tied = list(others.loc[others["tied"], "proxy"])
        span = f"[{best.agreement_low:.2f}-{best.agreement_high:.2f}]"
        told = f"{best.proxy} orders cells best ({best.agreement:.2f} {span})"
        lines.append(f"{truth}: {told}" + (f"; not to be told from it: {', '.join(tied)}" if tied else ""))
    return lines
