"""Averages of an evaluation. Rows are averaged within a document, then documents; intervals are 95 % by bootstrap over
documents, and every comparison with dense is paired: both ran over the same documents.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sparsity_lab.evaluation.retrieval import STAGES
from sparsity_lab.evaluation.tables import SCHEMAS, read_tables
from sparsity_lab.results import (
    ORDER,
    Results,
    ResultsError,
    bootstrap_interval,
    mean_of_defined,
    read_manifest,
    resampled,
)

INFORMATIVE = 0.5  # unless the folder's configuration says otherwise
# name -> what it is, all but perplexities paired by document; `selective`: rows at which something may be left out
LIKELIHOOD = ("loss_difference", "kl", "top1_agreement")
METRICS = (
    "perplexity_difference",
    *LIKELIHOOD,
    *(f"{name}_selective" for name in LIKELIHOOD),
    "output_error",
    "retrieval_difference",
    "retrieval",
)


class EvaluationResults:
    """The tables of an evaluation with the description of its cells."""

    def __init__(
        self, tables: Mapping[str, pd.DataFrame], cells: Mapping[str, Mapping[str, Any]], manifest: Mapping[str, Any]
    ) -> None:
        self.tables = dict(tables)
        self.cells = {key: dict(value) for key, value in cells.items()}
        self.manifest = dict(manifest)

    def only(self, cells: Iterable[str]) -> EvaluationResults:
        """Just these cells (ids)."""
        kept = {key: self.cells[key] for key in cells if key in self.cells}
        tables = {name: t[t["cell_id"].isin(set(kept))].reset_index(drop=True) for name, t in self.tables.items()}
        return EvaluationResults(tables, kept, self.manifest)

    def cell_frame(self) -> pd.DataFrame:
        """One row a cell: its id and every field of its scorer, selection, model and data."""
        return Results(pd.DataFrame(), self.cells, {}).cell_frame()

    @property
    def informative(self) -> float:
        """Dense score from which a kind of task says something about a selection."""
        retrieval = self.manifest.get("config", {}).get("evaluation", {}).get("retrieval", {})
        return float(retrieval.get("informative", INFORMATIVE))

    def per_document(self) -> pd.DataFrame:
        """A row a cell and document: mean losses and METRICS but for those of perplexity, NaN where not measured."""
        out = self._likelihood("").join(self._likelihood("_selective"), how="outer")
        errors = self.tables["layers"].groupby(["cell_id", "document"])["output_error"].mean()
        return out.join(errors, how="outer").join(self._retrieval(), how="outer").reset_index()

    def _likelihood(self, end: str) -> pd.DataFrame:
        table = self.tables["likelihood"]
        if end:
            table = table[table["selective"]]
        sums = table.groupby(["cell_id", "document"])[
            ["rows", "dense_loss_sum", "loss_sum", "kl_sum", "agreement_sum"]
        ].sum()
        means = sums.drop(columns="rows").div(sums["rows"], axis=0)
        means.columns = pd.Index(["dense_loss", "loss", "kl", "top1_agreement"])
        means.insert(0, "loss_difference", means["loss"] - means["dense_loss"])
        return means.assign(rows=sums["rows"]).add_suffix(end)

    def _retrieval(self) -> pd.DataFrame:
        table = self.tasks()
        table = table[table["informative"] & table["finished"]]
        means = table.groupby(["cell_id", "document"])[["score", "dense_score"]].mean()
        means.columns = pd.Index(["retrieval", "dense_retrieval"])
        return means.assign(retrieval_difference=means["retrieval"] - means["dense_retrieval"])

    def tasks(self) -> pd.DataFrame:
        """A row a cell and task, with `informative`: whether dense reaches the threshold on tasks of this kind and
        length, on average; and `finished`: whether all cells have answered it (see `_finished`). Means are
        over finished tasks, so cells are compared over the same ones, whenever a run was stopped."""
        table = self.tables["retrieval"]
        if table.empty:
            return table.assign(informative=pd.Series(dtype=bool), finished=pd.Series(dtype=bool))
        dense = table.drop_duplicates("task").groupby(["kind", "task_length"])["dense_score"].mean()
        keys = pd.MultiIndex.from_frame(table[["kind", "task_length"]])
        return table.assign(
            informative=dense.reindex(keys).to_numpy() >= self.informative, finished=self._finished(table)
        )

    def _finished(self, table: pd.DataFrame) -> list[bool]:
        """Whether a task was answered by every cell of the same model, data and length that answered any; a cell that
        failed on the way is not waited for."""
        failed = [{k: v for k, v in cell.items() if k != "reason"} for cell in self.manifest.get("failed_cells") or ()]
        lost = [key for key, about in self.cells.items() if any(fields.items() <= about.items() for fields in failed)]
        alike = ("model", "data", "length")
        where = {key: str([about.get(name) for name in alike]) for key, about in self.cells.items()}
        waited = table[~table["cell_id"].isin(lost)]
        context = waited["cell_id"].map(where)
        asked = context.map(waited.groupby(context)["cell_id"].nunique())
        answered = waited.groupby([context, "task"])["cell_id"].transform("nunique")
        whole = set(zip(context[answered == asked], waited.loc[answered == asked, "task"], strict=True))
        return [key in whole for key in zip(table["cell_id"].map(where), table["task"], strict=True)]

    def frame(self, *, resamples: int = 1000, seed: int = 0) -> pd.DataFrame:
        """Tidy table, a row a cell: `dense_perplexity`, `perplexity`, METRICS each with `_low` and `_high`, counts of
        rows, documents and informative tasks, and the cell's fields."""
        table = self.per_document()
        if table.empty:
            return pd.DataFrame()
        cells = sorted(table["cell_id"].unique())
        wide = {c: table.pivot(index="cell_id", columns="document", values=c) for c in table.columns[2:]}
        arrays = {name: values.reindex(cells).to_numpy(dtype=float) for name, values in wide.items()}
        out: dict[str, Any] = {"cell_id": cells, **_perplexities(arrays, resamples, seed)}
        for name in METRICS:
            if name in arrays:
                out[name] = mean_of_defined(arrays[name])
                out[f"{name}_low"], out[f"{name}_high"] = bootstrap_interval(arrays[name], resamples, seed)
        out["dense_retrieval"] = mean_of_defined(arrays["dense_retrieval"])
        for name in ("rows", "rows_selective"):
            out[name] = np.nansum(arrays[name], axis=-1).astype(int)
        out["documents"] = np.isfinite(arrays["loss"]).sum(-1)
        tasks = self.tasks()
        counted = tasks[tasks["informative"] & tasks["finished"]]
        out["tasks"] = counted.groupby("cell_id").size().reindex(cells, fill_value=0).to_numpy()
        return self._described(pd.DataFrame(out))

    def by_layer(self, *, resamples: int = 1000, seed: int = 0) -> pd.DataFrame:
        """Error of the attention output: a row a cell and layer."""
        return self._means(self.tables["layers"], ["layer"], ["output_error"], resamples, seed)

    def by_task(self, *, resamples: int = 1000, seed: int = 0) -> pd.DataFrame:
        """Retrieval: a row a cell, kind and length of task: scores, how many misses were lost in which stage, and what
        the selections held of the needle, over finished tasks."""
        tasks = self.tasks()
        tasks = tasks[tasks["finished"]]
        if tasks.empty:
            return pd.DataFrame()
        keys, values = (
            ["kind", "task_length"],
            ["score", "dense_score", "in_pool", "in_selection", "attended", "kept_mass"],
        )
        per_document = tasks.groupby(["cell_id", "document", *keys])[values].mean().reset_index()
        out = self._means(per_document, keys, values, resamples, seed)
        groups = tasks.groupby(["cell_id", *keys])
        counts = groups["stage"].value_counts().unstack(fill_value=0).reindex(columns=list(STAGES), fill_value=0)
        counts.columns = pd.Index(["found", *(f"lost_to_{name}" for name in STAGES[1:])])
        counts = counts.join(groups["informative"].first()).join(groups.size().rename("tasks"))
        return out.merge(counts.reset_index(), on=["cell_id", *keys])

    def by_harness(self) -> pd.DataFrame:
        """Tasks of lm-evaluation-harness: a row a cell, task and metric, dense beside sparse."""
        table = self.tables["harness"]
        return table if table.empty else self._described(table, ["task", "metric"])

    def _means(
        self, table: pd.DataFrame, keys: Sequence[str], values: Sequence[str], resamples: int, seed: int
    ) -> pd.DataFrame:
        if table.empty:
            return pd.DataFrame()
        out: dict[str, Any] = {}
        for name in values:
            wide = table.pivot(index=["cell_id", *keys], columns="document", values=name)
            array = wide.to_numpy(dtype=float)
            low, high = bootstrap_interval(array, resamples, seed)
            out |= {name: mean_of_defined(array), f"{name}_low": low, f"{name}_high": high}
        return self._described(pd.DataFrame(out, index=wide.index).reset_index(), keys)

    def _described(self, table: pd.DataFrame, keys: Sequence[str] = ()) -> pd.DataFrame:
        whole = self.cell_frame().merge(table, on="cell_id")
        order = [c for c in (*ORDER, *keys) if c in whole]
        return whole.sort_values(order, na_position="first", ignore_index=True)  # no pool before the pools


def _perplexities(arrays: Mapping[str, np.ndarray], resamples: int, seed: int) -> dict[str, np.ndarray]:
    """exp of the mean loss over documents, dense and sparse, and the difference; every resample draws the same
    documents for both."""
    found: dict[str, np.ndarray] = {}
    dense, sparse = arrays["dense_loss"], arrays["loss"]
    with np.errstate(over="ignore"):
        found["dense_perplexity"], found["perplexity"] = (np.exp(mean_of_defined(x)) for x in (dense, sparse))
        found["perplexity_difference"] = found["perplexity"] - found["dense_perplexity"]
        times = resampled(dense.shape[1], resamples, seed)
        drawn = [np.exp(resampled_means(x, times)) for x in (sparse, dense)]
    differences = drawn[0] - drawn[1]
    enough = np.isfinite(dense).sum(1) >= 2
    for end, percent in (("low", 2.5), ("high", 97.5)):
        found[f"perplexity_difference_{end}"] = np.array(
            [np.nanpercentile(row, percent) if some else np.nan for row, some in zip(differences, enough, strict=True)]
        )
    return found


def resampled_means(values: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Means over the defined of the drawn documents, [cells, documents] and [resamples, documents] -> [cells,
    resamples]; NaN where none is defined."""
    defined = np.isfinite(values)
    weight = defined @ times.T
    sums = np.where(defined, values, 0.0) @ times.T
    return np.divide(sums, weight, out=np.full(weight.shape, np.nan), where=weight > 0)


def load(folder: str | os.PathLike[str]) -> EvaluationResults:
    """Read an evaluation's folder.

    Raises:
        ResultsError: nothing there, nothing evaluated yet, another kind of results, damaged files.
    """
    folder = Path(folder)
    manifest = read_manifest(folder, "evaluation")
    tables = read_tables(folder)
    known = set().union(*(table["cell_id"] for table in tables.values()))
    if not known:
        status = (folder / "status").read_text().strip() if (folder / "status").exists() else "unknown"
        raise ResultsError(f"{folder}: nothing evaluated yet (status: {status})")
    if lost := known - set(manifest["cells"]):
        raise ResultsError(f"{folder}: tables of {len(lost)} cells that manifest.json does not describe")
    return EvaluationResults(tables, {k: v for k, v in manifest["cells"].items() if k in known}, manifest)


def merge(parts: Sequence[EvaluationResults]) -> EvaluationResults:
    """Several evaluations as one, for example shards; what was measured twice counts once.

    Raises:
        ResultsError: nothing to merge.
    """
    from sparsity_lab.evaluation.tables import KEYS

    if not parts:
        raise ResultsError("no results to merge")
    tables = {}
    for name in SCHEMAS:
        frames = [part.tables[name] for part in parts if not part.tables[name].empty] or [parts[0].tables[name]]
        tables[name] = pd.concat(frames, ignore_index=True).drop_duplicates(KEYS[name], ignore_index=True)
    cells = {key: about for part in parts for key, about in part.cells.items()}
    return EvaluationResults(tables, cells, parts[0].manifest)
