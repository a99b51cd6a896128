"""Scripts that draw metrics over k, as curves or layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import _common
from matplotlib.figure import Figure

from sparsity_lab import plot
from sparsity_lab.results import Results


def main(description: str | None, metrics: Sequence[str], argv: Sequence[str] | None = None) -> int:
    """The script that draws one of `metrics`. Returns the exit code."""
    arguments = _common.parser(description or "", metrics)
    arguments.add_argument("--by-layer", action="store_true", help="a heat map of layer x k instead of curves")
    by_layer = arguments.parse_args(argv).by_layer
    return _common.main(arguments, draw, "{metric}" + "-by-layer" * by_layer, argv)


def draw(results: Results, by_layer: bool, layer: int | None, **choice: Any) -> Figure:
    """Curves or heat maps."""
    if by_layer and layer is not None:
        raise ValueError("--layer and --by-layer exclude each other")
    return plot.by_layer(results, **choice) if by_layer else plot.curves(results, layer=layer, **choice)
