"""Draw what running a model with its selections costs: perplexity, KL, top-1 agreement and retrieval over k.

python analysis/plot_evaluate.py results/evaluate/smollm2-pydoc-2048-sparse
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib as mpl
from _common import report

from sparsity_lab.evaluation.plot import LABELS, PANELS, draw_evaluation
from sparsity_lab.evaluation.summary import load, merge
from sparsity_lab.figures.look import save

mpl.use("Agg")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the figure and the table behind it, print their paths. Returns 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="folders of experiments/evaluate.py")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (default: RESULTS/figures)")
    parser.add_argument(
        "--metric", nargs="+", choices=list(LABELS), default=list(PANELS), help="what to draw (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    folder = options.out or Path(os.path.commonpath([path.resolve() for path in options.results])) / "figures"
    stem = "evaluate" if options.metric == list(PANELS) else "evaluate-" + "-".join(options.metric)

    def write() -> Iterator[Path]:
        results = merge([load(path) for path in options.results])
        yield from save(draw_evaluation(results, options.metric), folder / stem)

    return report(parser.prog, write, options.results)


if __name__ == "__main__":
    sys.exit(main())
