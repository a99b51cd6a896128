"""Draw and print which metrics of a recall run order cells as running the model with them does.

    python analysis/plot_proxy.py --recall results/recall/smollm2-pydoc-2048 \
        --evaluate results/evaluate/smollm2-pydoc-2048-sparse
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib as mpl
from _common import report

from sparsity_lab.evaluation.plot import draw_agreement, draw_scatter
from sparsity_lab.evaluation.proxy import TRUTHS, agreement, pair, verdict
from sparsity_lab.evaluation.summary import load as load_evaluation
from sparsity_lab.evaluation.summary import merge
from sparsity_lab.figures.look import save
from sparsity_lab.figures.table import plural
from sparsity_lab.results import load, merge_results

mpl.use("Agg")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the figures and the tables behind them, print the verdict and their paths. Returns 0, or 2 with one line on
    stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recall", nargs="+", type=Path, required=True, help="folders of experiments/recall.py")
    parser.add_argument("--evaluate", nargs="+", type=Path, required=True, help="folders of experiments/evaluate.py")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (default: figures/ in the first)")
    parser.add_argument("--truth", choices=list(TRUTHS), help="of the scatter plot (default: the first measured)")
    options = parser.parse_args(argv)
    folder = options.out or options.evaluate[0] / "figures"

    def write() -> Iterator[Path]:
        recall = merge_results([load(path) for path in options.recall])
        pairs = pair(recall, merge([load_evaluation(path) for path in options.evaluate]))
        table = agreement(pairs)
        if table.empty:
            raise ValueError("nothing of loss, KL or retrieval was measured for these cells")
        print("\n".join(verdict(table)))
        truth = options.truth or table["truth"].iloc[0]
        if truth not in set(table["truth"]):
            raise ValueError(f"--truth {truth}: not measured for these cells")
        models, data = (" and ".join(sorted(pairs.cells[name].unique())) for name in ("model", "data"))
        about = [f"{models} on {data}", plural(len(pairs.cells), "cell")]
        spans = "intervals: 95 % over cells and documents"
        yield from save(draw_agreement(table, [*about, spans]), folder / "proxy-agreement")
        yield from save(draw_scatter(pairs, table, truth, about), folder / f"proxy-{truth}")

    return report(parser.prog, write, [*options.recall, *options.evaluate])


if __name__ == "__main__":
    sys.exit(main())
