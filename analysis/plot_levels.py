"""Draw what candidate pools change: two-level minus single-level selection, paired by document, with intervals.

Averages are over the layers behind every candidate source layer.
"""

from __future__ import annotations

import sys

from _common import METRICS, main, parser

from sparsity_lab import plot

if __name__ == "__main__":
    sys.exit(main(parser(__doc__ or "", METRICS), plot.two_level, "{metric}-of-two-levels"))
