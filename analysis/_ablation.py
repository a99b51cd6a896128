"""What the scripts that draw an ablation share: reading it, writing figures and tables, errors."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pandas as pd
from _common import report
from matplotlib.figure import Figure

from sparsity_lab.ablation_run import AblationResults
from sparsity_lab.figures.look import save
from sparsity_lab.folders import load_kind
from sparsity_lab.results import write_table

Drawn = list[tuple[str, Figure | pd.DataFrame]]  # (file name without ending, figure or table without one)


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments that all of them have."""
    out = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument(
        "results", nargs="+", type=Path, metavar="RESULTS", help="folder of experiments/ablate_source.py; each is drawn"
    )
    out.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder to write to; several RESULTS get a folder each in it (default: RESULTS/figures)",
    )
    out.add_argument("--topk", type=int, metavar="K", help="budget (default: the largest)")
    return out


def main(
    arguments: argparse.ArgumentParser,
    draw: Callable[[AblationResults, argparse.Namespace], Drawn],
    argv: Sequence[str] | None = None,
) -> int:
    """Draw, write PNG, SVG, PDF and CSV, print their paths. Returns the exit code: 0, or 2 with one line on stderr."""
    options = arguments.parse_args(argv)

    def write() -> Iterator[Path]:
        for folder in options.results:
            out = target(folder, options)
            for stem, drawn in draw(load_kind(folder, "ablation"), options):
                if isinstance(drawn, Figure):
                    yield from save(drawn, out / stem)
                else:
                    write_table(drawn, out / f"{stem}.csv")
                    yield out / f"{stem}.csv"

    return report(arguments.prog, write, options.results)


def target(folder: Path, options: argparse.Namespace) -> Path:
    """Where the figures of a folder go.

    Raises:
        ValueError: two folders of one name that would go to one place.
    """
    if options.out is None:
        return folder / "figures"
    if len(options.results) == 1:
        return options.out
    names = [path.resolve().name for path in options.results]
    if len(set(names)) < len(names):
        raise ValueError(f"--out {options.out}: several RESULTS have the same name; draw them one at a time")
    return options.out / folder.resolve().name
