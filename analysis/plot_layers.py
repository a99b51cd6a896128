"""Draw coverage layer by layer with intervals, at one k (default: the middle one)."""

from __future__ import annotations

import sys

from _common import METRICS, main, parser

from sparsity_lab import plot

CHOICES = ("topk", "scorer", "ratio", "where")

if __name__ == "__main__":
    sys.exit(main(parser(__doc__ or "", METRICS, CHOICES), plot.over_layers, "{metric}-over-layers"))
