"""How every figure looks, its frame of title and axes, and how it is written. No results here."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sparsity_lab.results import write_atomically

STYLE: Any = {
    "figure.dpi": 110,
    "savefig.dpi": 200,
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7.5,
    "figure.titlesize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.hashsalt": "sparsity_lab",  # with no date in the file, equal figures are equal bytes
}
# Ratios are ordered, so their colours go from dark to light: they stay apart in grey print and for the colour-blind.
RATIO_COLOURS = ("#2a1a5e", "#1f78a4", "#35b779", "#e0a800")
# Okabe and Ito's palette without its black, which belongs to the oracle; the order alternates dark and light.
CURVE_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#a89f00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
BOUND_LINES: dict[str, tuple[str, Any]] = {
    "oracle": ("#1a1a1a", (0, (5, 2))),
    "recency": ("#6e6e6e", (0, (4, 1.5, 1, 1.5))),
    "random": ("#8e8e8e", (0, (1, 1.5))),
}
WIDTH = {1: 5.6, 2: 7.0, 3: 7.6}  # inches, by panels in a row
LETTERS = 13  # of the title in an inch
LABELS = {
    "recall": "recall of the oracle's top-k",
    "coverage": "coverage: share of dense attention kept",
    "relative_coverage": "coverage relative to the oracle's",
    "total_coverage": "attention kept with window and tail",
    "density": "share of visible tokens attended",
    "output_error": "relative error of the attention output",
}
TITLES = {"recall": "Recall of dense attention's top-k", "coverage": "Coverage of dense attention"}


class Chart(Figure):
    """A Figure that notebooks show even where pyplot was never imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def axis_label(metric: str, *, short: bool) -> str:
    """What a metric's axis says; `short` where axes are small."""
    name = metric.replace("_", " ")
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


def grid(count: int, columns: int, title: str, facts: Sequence[str], height: float = 2.3) -> tuple[Figure, list[Axes]]:
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
    """Write `stem`.png (200 dpi) and `stem`.svg, the same bytes for the same figure; returns the paths."""
    out = []
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
        path = Path(f"{os.fspath(stem)}.{kind}")

        def write(temporary: Path, kind: str = kind, metadata: dict[str, None] = metadata) -> None:
            figure.savefig(temporary, format=kind, metadata=metadata)

        with mpl.rc_context(STYLE):
            write_atomically(path, write)
        out.append(path)
    return out
