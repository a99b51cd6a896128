"""Draw how much of the dense attention the selections keep, over k."""

from __future__ import annotations

import sys

from _curves import main

METRICS = [
    "coverage",
    "relative_coverage",
    "total_coverage",
    "worst_head_coverage",
    "pool_coverage",
    "density",
    "output_error",
]

if __name__ == "__main__":
    sys.exit(main(__doc__, METRICS))
