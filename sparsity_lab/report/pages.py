"""Folders -> the page about them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparsity_lab.pricing import Setting
from sparsity_lab.recommend import Wish
from sparsity_lab.report import folders as reading
from sparsity_lab.report import others
from sparsity_lab.report import study as studies
from sparsity_lab.report.blocks import Facts, Notes, Section
from sparsity_lab.report.page import render
from sparsity_lab.results import Results, ResultsError, write_text

DEFINITIONS = (
    ("recall", "share of the oracle's top-k that the selection holds"),
    ("coverage", "share of the visible dense attention that the selected positions hold"),
    ("relative coverage", "coverage divided by that of the oracle's top-k"),
    ("total coverage", "share of dense attention on all tokens attended: window, tail and selection"),
    ("density", "share of the visible tokens that are attended, measured"),
    ("saturated row", "a query that sees no more than k positions; left out of every average"),
    ("interval", "95 % bootstrap over documents, since rows of one document are not independent"),
    ("oracle, recency, random", "bounds: the best selection of k, the newest k, any k; not to ship"),
)


def build(
    paths: Sequence[Path], setting: Setting, wish: Wish, *, title: str | None, command: str
) -> tuple[str, list[str]]:
    """The page about some results folders, and what is wrong with those that are not shown in full.

    Args:
        title: of the page; None = model and data. command: the line that makes this page.
    Raises:
        ResultsError: no folder that could be shown; the message says why for each.
    """
    folders, refused = reading.read(paths)
    if not folders:
        raise ResultsError("; ".join(refused))
    found = studies.split(reading.of_type(folders, Results), setting, wish)
    sections: list[Section] = []
    troubles = reading.troubles(folders, refused)
    if troubles:
        sections.append(Section("troubles", "To know first", [Notes(troubles, warning=True)]))
    for i, (name, study) in enumerate(found):
        suffix = f": {name}" if len(found) > 1 else ""
        sections += studies.sections(study, f"-{i}" if i else "", suffix)
    sections += others.sections(folders, setting)
    if failed := reading.failed_section(folders):
        sections.append(Section("failed", "Failed cells", failed))
    sections += [
        reading.provenance(folders),
        reading.reproduction(folders, command),
        Section("words", "What the words mean", [Facts(DEFINITIONS)]),
    ]
    names = [
        *(name for name, _ in found),
        *dict.fromkeys(f.path.name for f in folders if not isinstance(f.found, Results)),
    ]
    told = " and ".join(names[:3]) + (" and more" if len(names) > 3 else "")
    subtitle = f"How much of dense attention the measured selections keep, at what cost: {told}."
    return render(title or f"Sparse selection: {told}", subtitle, sections), troubles


def write(
    paths: Sequence[Path], out: Path, setting: Setting, wish: Wish, *, title: str | None, command: str
) -> list[str]:
    """`build` into a file, whole or not at all; returns the troubles."""
    page, troubles = build(paths, setting, wish, title=title, command=command)
    write_text(out, page)
    return troubles
