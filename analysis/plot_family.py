"""Draw a family of cells: coverage over ratio, block size, pool size or candidate source layer, a curve a k."""

from __future__ import annotations

import sys

from _common import METRICS, main, parser

from sparsity_lab import plot
from sparsity_lab.figures.families import FAMILIES

if __name__ == "__main__":
    arguments = parser(__doc__ or "", METRICS)
    arguments.add_argument("--by", choices=FAMILIES, default="ratio", help="what it goes over (default: %(default)s)")
    sys.exit(main(arguments, plot.family, "{metric}-by-{by}"))
