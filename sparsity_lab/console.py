"""What a person sees of a run: a table of its cells and a progress bar. Plain text where nobody watches."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import IO, Any

import pandas as pd
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from sparsity_lab.figures.table import (
    REUSE,
    context_columns,
    curve_table,
    field_label,
    layers_averaged,
    pool_label,
    varying,
)
from sparsity_lab.results import Results

FULL_ERROR = "HYDRA_FULL_ERROR"
MAX_CELLS = 60
TABLE_METRICS = {
    "recall": "recall",
    "coverage": "coverage",
    "oracle_coverage": "oracle cov.",
    "relative_coverage": "relative cov.",
    "total_coverage": "total cov.",
    "density": "density",
    "worst_head_coverage": "worst head",
    "output_error": "output error",
}
NUMERIC = frozenset({"ratio", "k", "saturated", *TABLE_METRICS.values()})  # headers of columns aligned to the right
# left out, first to last, where a terminal is too narrow
DISPENSABLE = ("worst head", "total cov.", "relative cov.", "output error", "density", "oracle cov.")


def summary_table(results: Results, file: IO[str] | None = None, *, max_cells: int = MAX_CELLS) -> None:
    """Print a row a cell, each metric as its mean over layers, then documents; [95 % interval over documents] for
    the coverage.

    Of more than `max_cells` cells those under test come first, and the number left out is said. A terminal gets a
    table that fits its width; anything else (`file`, default stdout) gets aligned text without escape codes.
    """
    out = file or sys.stdout
    table = curve_table(results, list(TABLE_METRICS), strict=False)
    shown = table
    if len(table) > max_cells:
        shown = table.sort_values("bound", kind="stable").head(max_cells).sort_index()
    columns = table_columns(shown, table)
    console = Console(file=out)
    notes = []
    if len(shown) < len(table):
        left = len(table) - len(shown)
        bounds = int(table["bound"].sum() - shown["bound"].sum())
        notes.append(f"{left} of {len(table)} cells are not shown ({bounds} of them bounds); summary.csv has all")
    if console.is_terminal:
        dropped = fit(columns, console.width)
        if dropped:
            notes.append(f"the terminal is too narrow for {', '.join(dropped)}; summary.csv has them")
        console.print(rich_table(columns, list(shown["bound"])))
    else:
        out.write(plain_table(columns))
    notes.insert(0, f"mean of {layers_averaged(results)}; [95 % interval over documents]; saturated rows left out")
    for note in notes:
        out.write(note + "\n")
    out.flush()


def table_columns(shown: pd.DataFrame, table: pd.DataFrame) -> dict[str, list[str]]:
    """Header -> a text a cell. What all cells of `table` share gets no column."""
    rows: list[Any] = list(shown.itertuples(index=False))
    columns: dict[str, list[str]] = {}
    for field in varying(table, context_columns(table)):
        columns[field] = [field_label(field, value) for value in shown[field]]
    columns["scorer"] = list(shown["scorer"])
    if table.groupby("scorer")["scorer_options"].nunique().gt(1).any():
        columns["options"] = list(shown["scorer_options"])
    columns["ratio"] = [str(row.compress_ratio) for row in rows]
    columns["k"] = [str(row.topk) for row in rows]
    if table[REUSE].notna().any():
        columns["selected in layers"] = ["" if pd.isna(value) else str(value) for value in shown[REUSE]]
    if table["candidate_source_layer"].notna().any():
        columns["pool"] = [pool_label(row).removeprefix("pool ").replace("no pool", "") for row in rows]
    for metric, header in TABLE_METRICS.items():
        columns[header] = [number(getattr(row, metric)) for row in rows]
    columns["coverage"] = [interval(r.coverage, r.coverage_low, r.coverage_high) for r in rows]
    columns["saturated"] = [f"{100 * share:.0f} %" if pd.notna(share) else "-" for share in shown["saturated_share"]]
    return columns


def number(value: float) -> str:
    """Three decimals, or a dash for what is undefined."""
    return "-" if pd.isna(value) else f"{value:.3f}"


def interval(value: float, low: float, high: float) -> str:
    """`number` with its interval in brackets, where there is one."""
    return number(value) if pd.isna(low) else f"{number(value)} [{number(low)}-{number(high)}]"


def fit(columns: dict[str, list[str]], width: int, dispensable: Sequence[str] = DISPENSABLE) -> list[str]:
    """Drop dispensable columns until the rest fits `width` characters; returns the headers dropped."""
    dropped: list[str] = []
    for header in dispensable:
        if sum(max(map(len, [name, *texts])) + 2 for name, texts in columns.items()) <= width:
            break
        del columns[header]
        dropped.append(header)
    return dropped


def rich_table(columns: dict[str, list[str]], dim: list[bool], numeric: Collection[str] = NUMERIC) -> Table:
    """For a terminal: bounds are dim, so that cells under test stand out."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="right" if name in numeric else "left", no_wrap=True)
    for is_dim, cells in zip(dim, zip(*columns.values(), strict=True), strict=True):
        table.add_row(*cells, style="dim" if is_dim else None)
    return table


def plain_table(columns: dict[str, list[str]], numeric: Collection[str] = NUMERIC) -> str:
    """Aligned text, a line a cell, no escape codes."""
    widths = {name: max(map(len, [name, *texts])) for name, texts in columns.items()}
    lines = []
    for cells in [tuple(columns), *zip(*columns.values(), strict=True)]:
        padded = [
            text.rjust(widths[name]) if name in numeric else text.ljust(widths[name])
            for name, text in zip(columns, cells, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def progress(
    label: str,
    total: int | None = None,
    *,
    file: IO[str] | None = None,
    every: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[int, int], None]]:
    """Show how far something is; yields `advance(done, total)`.

    On a terminal a bar with the time left; elsewhere (`file`, default stderr) a line at most every `every` seconds and
    one at the end. Nothing is shown while `advance` was never called. `total` is what to expect before the first call.
    """
    out = file or sys.stderr
    console = Console(file=out)
    shown = _bar(label, total, console) if console.is_terminal else _lines(label, out, every, clock)
    with shown as advance:
        yield advance


@contextlib.contextmanager
def _bar(label: str, total: int | None, console: Console) -> Iterator[Callable[[int, int], None]]:
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console)
    task = bar.add_task(label, total=total, visible=total is not None)

    def advance(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total, visible=True)

    with bar:
        yield advance


@contextlib.contextmanager
def _lines(label: str, out: IO[str], every: float, clock: Callable[[], float]) -> Iterator[Callable[[int, int], None]]:
    started = last = clock()
    at: tuple[int, int] | None = None

    def advance(done: int, total: int) -> None:
        nonlocal at, last
        at, now = (done, total), clock()
        if now - last >= every and done < total:
            last = now
            left = (now - started) / done * (total - done) if done else float("nan")
            out.write(f"{label}: {done}/{total}{'' if left != left else f', {duration(left)} left'}\n")
            out.flush()

    finished = False
    try:
        yield advance
        finished = True
    finally:
        if at is not None:
            how = "in" if finished else "when stopped, after"
            out.write(f"{label}: {at[0]}/{at[1]} {how} {duration(clock() - started)}\n")
            out.flush()


def duration(seconds: float) -> str:
    """12 s, 3 min 5 s, 2 h 4 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def plain_errors() -> None:
    """From now on a command says what is wrong with its input in words alone; HYDRA_FULL_ERROR=1 shows the stack."""
    if os.environ.get(FULL_ERROR) is None:
        os.environ[FULL_ERROR] = "1"  # Hydra then hands errors on, instead of printing a stack of its own
        sys.excepthook = _in_words


def _in_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    elif issubclass(kind, ValueError | OSError | HydraException | OmegaConfBaseException):
        if error.__cause__ is not None and isinstance(error, HydraException):
            print(error.__cause__, file=sys.stderr)  # says which key, and why
        print(f"({FULL_ERROR}=1 shows where)\n{kind.__name__}: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
