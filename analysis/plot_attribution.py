"""Draw which part of the lost coverage is due to compression, candidate pool, scorer and reuse, by layer.

python analysis/plot_attribution.py results/ablate_source/smollm2-pydoc-2048-auto-ratio1
"""

from __future__ import annotations

import argparse
import sys

import _ablation
import pandas as pd

from sparsity_lab.ablation_run import AblationResults
from sparsity_lab.ablation_table import choose
from sparsity_lab.attribution import waterfall
from sparsity_lab.plot_attribution import draw_attribution


def draw(results: AblationResults, options: argparse.Namespace) -> _ablation.Drawn:
    k = options.topk or results.ablation.topk[-1]
    overall = waterfall(results.attribution, overall=True).assign(layer="mean")
    table = choose(pd.concat([waterfall(results.attribution), overall], ignore_index=True), topk=k)
    return [(f"attribution-k{k}", draw_attribution(results, topk=k), table)]


if __name__ == "__main__":
    sys.exit(_ablation.main(_ablation.parser(__doc__ or ""), draw))
