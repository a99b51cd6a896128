"""The table of an evaluation that a person sees when it ends."""

from __future__ import annotations

import sys
from typing import IO, Any

import pandas as pd
from rich.console import Console

from sparsity_lab.console import fit, interval, number, plain_table, rich_table
from sparsity_lab.evaluation.summary import EvaluationResults
from sparsity_lab.figures.table import REUSE, plural, pool_label

HEADERS = {
    "perplexity_difference": "perplexity - dense",
    "kl": "KL",
    "top1_agreement": "top-1 same",
    "loss_difference_selective": "loss diff. (sel.)",
    "output_error": "output error",
    "retrieval": "retrieval",
}
DISPENSABLE = ("output error", "loss diff. (sel.)", "top-1 same", "KL")


def summary_table(results: EvaluationResults, file: IO[str] | None = None) -> None:
    """Print a row a cell: means over documents, the perplexity's difference with its 95 % interval, and the dense
    figures below. A terminal gets a table that fits its width, anything else aligned text."""
    out = file or sys.stdout
    table, harness = results.frame(), results.by_harness()
    if not harness.empty:
        shown = ["scorer", "compress_ratio", "topk", "task", "metric", "dense", "value", "items"]
        out.write(harness[shown].to_string(index=False, float_format=number) + "\n")
    if table.empty:
        return
    rows: list[Any] = list(table.itertuples(index=False))
    columns = {"scorer": list(table["scorer"])}
    columns |= {"ratio": [str(row.compress_ratio) for row in rows], "k": [str(row.topk) for row in rows]}
    if table[REUSE].notna().any():
        columns["selected in layers"] = ["" if pd.isna(value) else str(value) for value in table[REUSE]]
    if table["candidate_source_layer"].notna().any():
        columns["pool"] = [pool_label(row).removeprefix("pool ").replace("no pool", "") for row in rows]
    for name, header in HEADERS.items():
        if name in table and table[name].notna().any():
            columns[header] = [number(value) for value in table[name]]
    if "perplexity - dense" in columns:
        lows = zip(table["perplexity_difference_low"], table["perplexity_difference_high"], strict=True)
        texts = [interval(v, *bounds) for v, bounds in zip(table["perplexity_difference"], lows, strict=True)]
        columns["perplexity - dense"] = texts
    numeric = {"ratio", "k", *HEADERS.values()}
    console = Console(file=out)
    if console.is_terminal:
        fit(columns, console.width, DISPENSABLE)
        console.print(rich_table(columns, [False] * len(rows), numeric))
    else:
        out.write(plain_table(columns, numeric))
    out.write("\n".join(notes(results, table)) + "\n")
    out.flush()


def notes(results: EvaluationResults, table: pd.DataFrame) -> list[str]:
    """What stands below the table."""
    lines = []
    if table["perplexity"].notna().any():
        dense = sorted({number(value) for value in table["dense_perplexity"].dropna()})
        lines.append(
            f"dense perplexity {', '.join(dense)}; [95 % interval over documents]; KL(dense || sparse) in nats; "
            "(sel.): rows at which the selection may leave something out"
        )
    tasks = results.by_task(resamples=1)
    for keys, group in tasks.groupby(["kind", "task_length"]) if len(tasks) else ():
        told = f"{keys[0]} in {keys[1]:,} tokens: dense score {number(group['dense_score'].mean())}"
        lines.append(told if group["informative"].all() else f"{told}, uninformative and left out of retrieval")
    return lines + unfinished(results, table)


def unfinished(results: EvaluationResults, table: pd.DataFrame) -> list[str]:
    """What a run that was stopped, or cells added later, leave uneven; `table` as `results.frame` gives it."""
    lines, tasks = [], results.tasks()
    if left := tasks.loc[~tasks["finished"], "task"].nunique():
        told = plural(tasks["task"].nunique(), "task")
        lines.append(f"retrieval: {left} of {told} left out, not answered by every cell yet")
    for (model, data, length), group in table.groupby(["model", "data", "length"]):
        some = sorted(set(group["documents"]))
        if len(some) > 1:
            told = " or ".join(map(str, some))
            lines.append(f"{model}, {data} x {length:,}: cells ran on {told} documents, so they differ by these, too")
    return lines
