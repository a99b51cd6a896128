"""Draw coverage over density: how much of the dense attention is kept for which share of the visible tokens attended.

Density is measured and counts window and tail, which coverage does not; --metric total_coverage does.
"""

from __future__ import annotations

import sys

from _common import METRICS, main, parser

from sparsity_lab import plot

if __name__ == "__main__":
    sys.exit(main(parser(__doc__ or "", METRICS), plot.density, "{metric}-over-density"))
