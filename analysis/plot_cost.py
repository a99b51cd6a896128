"""Draw cost against coverage: which configurations are worth having, and the one to recommend. For folders of
experiments/evaluate.py, cost against the loss of the running model.

python analysis/plot_cost.py results/recall/smollm2-pydoc-2048 --device h200 --context 131072
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import _common
import _cost

from sparsity_lab import plot
from sparsity_lab.evaluation.summary import EvaluationResults
from sparsity_lab.figures.choice import draw_choice, draw_loss
from sparsity_lab.folders import load, load_kind
from sparsity_lab.pareto import priced_loss
from sparsity_lab.recommend import recommend


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="results folder; several are merged")
    _common.add_out(parser)
    _cost.add(parser)
    options = parser.parse_args(argv)

    def write() -> Iterable[Path]:
        setting, wish, found = _cost.setting(options), _cost.wish(options), [load(path) for path in options.results]
        ends = f"{options.device}-{options.context}-{options.budget}"
        if all(isinstance(each, EvaluationResults) for each in found):
            return plot.save(draw_loss(priced_loss(found, setting), setting), _common.folder(options) / f"loss-{ends}")
        parts = [load_kind(folder, "measurement") for folder in options.results]
        figure = draw_choice(recommend(parts, setting, wish, options.where))
        return plot.save(figure, _common.folder(options) / f"cost-{options.metric}-{ends}")

    return _common.report(parser.prog, write, options.results)


if __name__ == "__main__":
    sys.exit(main())
