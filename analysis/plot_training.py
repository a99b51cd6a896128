"""Draw how distilled indexers learned: loss and held-out coverage by step and, of several runs, by what differs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import matplotlib as mpl
from _common import report

from sparsity_lab import plot
from sparsity_lab.plot_training import draw_training, find_runs, training_table
from sparsity_lab.results import write_table

mpl.use("Agg")


def main() -> int:
    """Write training.png, training.svg and figure.csv, print their paths. Returns 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or one that holds several")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (default: figures/ in RUN)")
    options = parser.parse_args()
    folder = options.out or Path(os.path.commonpath([path.resolve() for path in options.runs])) / "figures"

    def write() -> list[Path]:
        table = training_table(find_runs(options.runs))
        paths = plot.save(draw_training(table), folder / "training")
        write_table(table, folder / "figure.csv")
        return [*paths, folder / "figure.csv"]

    return report(parser.prog, write)


if __name__ == "__main__":
    sys.exit(main())
