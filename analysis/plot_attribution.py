"""Draw which part of the lost coverage is due to compression, candidate pool, scorer and reuse, by layer.

python analysis/plot_attribution.py results/ablate_source/smollm2-pydoc-2048-auto-ratio1
"""

from __future__ import annotations

import argparse
import sys

import _ablation

from sparsity_lab import plot
from sparsity_lab.ablation_run import AblationResults


def draw(results: AblationResults, options: argparse.Namespace) -> _ablation.Drawn:
    k = options.topk or results.ablation.topk[-1]
    return [(f"attribution-k{k}", plot.attribution(results, topk=k))]


if __name__ == "__main__":
    sys.exit(_ablation.main(_ablation.parser(__doc__ or ""), draw))
