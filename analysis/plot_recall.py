"""Draw how much of dense attention's top-k the selections find, over k."""

from __future__ import annotations

import sys

from _curves import main

if __name__ == "__main__":
    sys.exit(main(__doc__, ["recall", "pool_recall", "in_pool_recall", "top1_hit"]))
