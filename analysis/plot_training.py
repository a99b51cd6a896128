"""Draw how indexers were distilled, or how a model was pretrained.

Of distillations: loss and held-out coverage by step and, of several runs, by what differs.
Of a pretraining: losses, held-out bits a byte and coverage by tokens, its stages shaded; one run a figure.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from _common import report

from sparsity_lab import plot
from sparsity_lab.figures.training import find_runs, table_of_runs


def main() -> int:
    """Write training.png, .svg, .pdf and .csv, print their paths. Returns 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or one that holds several")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (default: figures/ in RUN)")
    options = parser.parse_args()
    folder = options.out or Path(os.path.commonpath([path.resolve() for path in options.runs])) / "figures"

    def write() -> list[Path]:
        table, draw = table_of_runs(find_runs(options.runs))
        return plot.save(draw(table), folder / "training")

    return report(parser.prog, write, options.runs)


if __name__ == "__main__":
    sys.exit(main())
