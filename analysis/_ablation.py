"""What the scripts that draw an ablation share: reading it, writing figures and tables, errors."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from _common import report
from matplotlib.figure import Figure

from sparsity_lab.ablation_run import AblationResults, load
from sparsity_lab.plot_figure import save
from sparsity_lab.results import write_table

mpl.use("Agg")
Drawn = list[tuple[str, Figure | None, pd.DataFrame]]  # (file name without ending, figure, the table behind it)


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments that all of them have."""
    out = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("results", type=Path, metavar="RESULTS", help="folder of experiments/ablate_source.py")
    out.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (default: RESULTS/figures)")
    out.add_argument("--topk", type=int, metavar="K", help="budget")
    return out


def main(
    arguments: argparse.ArgumentParser,
    draw: Callable[[AblationResults, argparse.Namespace], Drawn],
    argv: Sequence[str] | None = None,
) -> int:
    """Draw, write PNG, SVG and CSV, print their paths. Returns the exit code: 0, or 2 with one line on stderr."""
    options = arguments.parse_args(argv)

    def write() -> Iterator[Path]:
        for stem, figure, table in draw(load(options.results), options):
            path = (options.out or options.results / "figures") / stem
            yield from [] if figure is None else save(figure, path)
            write_table(table, path.with_suffix(".csv"))
            yield path.with_suffix(".csv")

    return report(arguments.prog, write)
