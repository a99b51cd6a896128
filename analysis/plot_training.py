"""Draw how distilled indexers learned: loss and held-out coverage by step and, of several runs, by what differs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from _common import report

from sparsity_lab import plot
from sparsity_lab.figures.training import find_runs, training_table


def main() -> int:
    """Write training.png, .svg, .pdf and .csv, print their paths. Returns 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or one that holds several")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (default: figures/ in RUN)")
    options = parser.parse_args()
    folder = options.out or Path(os.path.commonpath([path.resolve() for path in options.runs])) / "figures"

    def write() -> list[Path]:
        return plot.save(plot.training(training_table(find_runs(options.runs))), folder / "training")

    return report(parser.prog, write, options.runs)


if __name__ == "__main__":
    sys.exit(main())
