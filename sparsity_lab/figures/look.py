"""How every figure looks, its frame of title and axes, and how it is written. No results here."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sparsity_lab.results import write_atomically, write_table

STYLE: Any = mpl.rc_params_from_file(Path(__file__).with_name("style.mplstyle"), use_default_template=False)
# Ratios are ordered, so their colours go from dark to light: they stay apart in grey print and for the colour-blind.
RATIO_COLOURS = ("#2a1a5e", "#1f78a4", "#35b779", "#e0a800")
CURVE_COLOURS: Sequence[str] = STYLE["axes.prop_cycle"].by_key()["color"]
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
BOUND_LINES: dict[str, tuple[str, Any]] = {
    "oracle": ("#1a1a1a", (0, (5, 2))),
    "recency": ("#6e6e6e", (0, (4, 1.5, 1, 1.5))),
    "random": ("#8e8e8e", (0, (1, 1.5))),
}
WIDTH = {1: 5.6, 2: 7.0, 3: 7.6}  # inches, by panels in a row; the last is the most that a page takes
LETTERS = 13  # of the title in an inch
LABELS = {
    "recall": "recall of the oracle's top-k",
    "coverage": "coverage: share of dense attention kept",
    "relative_coverage": "coverage relative to the oracle's",
    "total_coverage": "attention kept with window and tail",
    "worst_head_coverage": "coverage of the worst head",
    "density": "density: share of visible tokens attended",
    "output_error": "relative error of the attention output",
}


class Chart(Figure):
    """A Figure that notebooks show even where pyplot was never imported, with the tidy `table` behind it."""

    table: pd.DataFrame | None = None

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def axis_label(metric: str, *, short: bool, signed: bool = False) -> str:
    """What a metric's axis says; `short` where axes are small, `signed` where it holds differences."""
    name = metric.replace("_", " ")
    if signed:
        return f"difference in {name}"
    return name if short else LABELS.get(metric, name)


def wrap(parts: Sequence[str], width: float) -> list[str]:
    """Join the parts with middle dots into lines that fit `width` inches, never breaking within a part."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]} · {part}"
        lines = [*lines[:-1], longer] if len(longer) <= width * LETTERS else [*lines, part]
    return lines


def columns_that_fit(entries: Sequence[Line2D], width: float) -> int:
    """Most columns of a legend, filled one after the other, that fit `width` inches."""
    lengths = [len(str(entry.get_label())) for entry in entries]
    for columns in range(len(lengths), 1, -1):
        depth, extra = divmod(len(lengths), columns)  # the first `extra` columns hold one more
        ends = [i * depth + min(i, extra) for i in range(columns + 1)]
        widths = [max(lengths[a:b]) + 7 for a, b in itertools.pairwise(ends)]
        if sum(widths) <= 1.15 * LETTERS * width:
            return columns
    return 1


def columns_for(count: int) -> int:
    """How many axes to put in a row."""
    return 2 if count in (2, 4, 8) else min(count, 3)


def grid(count: int, columns: int, title: str, facts: Sequence[str], height: float = 2.3) -> tuple[Chart, list[Axes]]:
    """A figure with `count` axes that share both scales, each `height` inches, under a title and the facts."""
    rows = -(-count // columns)
    lines = [title, *wrap(facts, WIDTH[columns])]
    figure = Chart(figsize=(WIDTH[columns], 1.0 + 0.14 * len(lines) + height * rows), layout="constrained")
    figure.suptitle("\n".join(lines))
    axes = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten())
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def save(figure: Figure, stem: str | os.PathLike[str]) -> list[Path]:
    """Write `stem`.png (200 dpi), .svg, .pdf and, of a `Chart` with a table, .csv; the same bytes for the same figure.
    Returns the paths."""
    out = []
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None}), ("pdf", {"CreationDate": None})):
        path = Path(f"{os.fspath(stem)}.{kind}")

        def write(temporary: Path, kind: str = kind, metadata: dict[str, None] = metadata) -> None:
            figure.savefig(temporary, format=kind, metadata=metadata)

        with mpl.rc_context(STYLE):
            write_atomically(path, write)
        out.append(path)
    if isinstance(figure, Chart) and figure.table is not None:
        out.append(Path(f"{os.fspath(stem)}.csv"))
        write_table(figure.table, out[-1])
    return out
