"""What a page is made of. Plain text everywhere: the template escapes it."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import matplotlib as mpl
from matplotlib.figure import Figure

from sparsity_lab.figures.look import STYLE

MOST_ROWS = 1000  # of a table; summary.csv has the rest


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Notes:
    """A list of sentences; `warning` makes it stand out."""

    kind: ClassVar[str] = "notes"
    items: Sequence[str]
    warning: bool = False


@dataclass(frozen=True)
class Facts:
    """Terms and what there is to say of them."""

    kind: ClassVar[str] = "facts"
    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Tiles:
    """Headline numbers: (label, value, note)."""

    kind: ClassVar[str] = "tiles"
    items: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Code:
    """Lines to type, or to read when `summary` is opened."""

    kind: ClassVar[str] = "code"
    lines: Sequence[str]
    summary: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure as an image inside the page."""

    kind: ClassVar[str] = "picture"
    title: str
    alt: str
    source: str  # data URI
    width: int  # CSS pixels at its natural size
    height: int


@dataclass(frozen=True)
class Value:
    """A table's cell; `sort` orders it, None last."""

    text: str
    sort: float | str | None = None


@dataclass(frozen=True)
class Table:
    """A sortable table; the first column names the rows. numeric: columns aligned to the right."""

    kind: ClassVar[str] = "table"
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]
    numeric: Sequence[bool]
    marked: Sequence[bool] = ()  # rows that stand out


@dataclass(frozen=True)
class Section:
    """Blocks under a heading."""

    key: str
    title: str
    blocks: Sequence[Any]


def number(value: Any, form: str = "{:.3f}", *, low: Any = None, high: Any = None) -> Value:
    """A number with its interval where there is one; a dash where it is undefined."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return Value("\u2013")
    text = form.format(value)
    if low is not None and not math.isnan(low):
        text += f" [{form.format(low)}\u2013{form.format(high)}]"
    return Value(text, float(value))


def word(text: Any) -> Value:
    """Text that sorts as it reads."""
    return Value(str(text), str(text))


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Value]], marked: Sequence[bool] = ()) -> Table:
    """A table whose columns of numbers are aligned to the right; long ones are cut, and the caption says so."""
    rows = list(rows)
    if len(rows) > MOST_ROWS:
        caption += f" (the first {MOST_ROWS:,} of {len(rows):,}; summary.csv has all)"
        rows, marked = rows[:MOST_ROWS], marked[:MOST_ROWS]
    numeric = [
        all(not isinstance(row[i].sort, str) for row in rows) and any(row[i].sort is not None for row in rows)
        for i in range(len(columns))
    ]
    return Table(caption, columns, rows, numeric, marked)


def picture(title: str, figure: Figure) -> Picture:
    """A figure as an SVG image; its alternative text is its title, which says model, data, documents and interval."""
    buffer = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    source = "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
    told = figure.get_suptitle().replace("\n", ". ")
    return Picture(title, f"{told}. The values are in the tables of this page.", source, width, height)


def pictures(drawings: Iterable[tuple[str, Callable[[], Figure]]]) -> list[Any]:
    """Every figure that can be drawn; at the end, to be opened, why others cannot."""
    drawn: list[Any] = []
    undrawn = []
    for title, draw in drawings:
        try:
            drawn.append(picture(title, draw()))
        except ValueError as error:
            undrawn.append(f"{title}: {' '.join(str(error).split())}.")
    return [*drawn, Code(undrawn, "Figures that these results do not allow")] if undrawn else drawn
