"""Draw how far one layer's selection serves the others: a heat map of selecting layer x using layer for every k.

python analysis/plot_reuse.py results/ablate_source/smollm2-pydoc-2048-auto-ratio1
"""

from __future__ import annotations

import argparse
import sys

import _ablation

from sparsity_lab import plot
from sparsity_lab.ablation_run import AblationResults
from sparsity_lab.figures.reuse import LABELS


def draw(results: AblationResults, options: argparse.Namespace) -> _ablation.Drawn:
    stem = f"reuse-{options.metric}" + (f"-k{options.topk}" if options.topk else "")
    return [(stem, plot.reuse(results, options.metric, topk=options.topk))]


def main() -> int:
    arguments = _ablation.parser(__doc__ or "")
    arguments.add_argument(
        "--metric", choices=sorted(LABELS), default="reuse_coverage", help="what to draw (default: %(default)s)"
    )
    return _ablation.main(arguments, draw)


if __name__ == "__main__":
    sys.exit(main())
