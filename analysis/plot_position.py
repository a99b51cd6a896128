"""Draw coverage over the position of the query, at one k (default: the middle one)."""

from __future__ import annotations

import sys

from _common import METRICS, main, parser

from sparsity_lab import plot

if __name__ == "__main__":
    sys.exit(main(parser(__doc__ or "", METRICS), plot.by_position, "{metric}-over-position"))
