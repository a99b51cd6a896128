"""Draw how far heads that share a selection differ: coverage of the worst head against that of their mean attention.

A point a layer, at one k (default: the middle one). Needs measure.detail_rows above 0.
"""

from __future__ import annotations

import sys

from _common import main, parser

from sparsity_lab import plot

CHOICES = ("topk", "scorer", "ratio", "where")

if __name__ == "__main__":
    sys.exit(main(parser(__doc__ or "", (), CHOICES), plot.head_spread, "head-spread"))
