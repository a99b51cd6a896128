"""Draw scorers beside each other, with oracle, recency and random: single-level cells only, an axes a ratio."""

from __future__ import annotations

import sys

from _common import METRICS, main, parser

from sparsity_lab import plot

if __name__ == "__main__":
    sys.exit(main(parser(__doc__ or "", METRICS), plot.scorers, "{metric}-of-scorers"))
