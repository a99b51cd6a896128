"""Draw a measurement of the dense model beside the same one with a selection really applied, and print how far they
agree: two ablations (ablate_source.py) show both rankings of candidate sources, two recall runs coverage by layer.

    python analysis/plot_free_running.py results/ablate_source/smollm2-pydoc-2048-auto-ratio1 \
        results/ablate_source/smollm2-sparse-f7bb58-pydoc-2048-auto-ratio1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib as mpl
from _common import METRICS, report
from matplotlib.figure import Figure

from sparsity_lab.ablation_run import AblationResults
from sparsity_lab.figures.free_running import draw_coverage, draw_rankings
from sparsity_lab.figures.look import save
from sparsity_lab.folders import load
from sparsity_lab.free_running import compared_rankings, rank_agreement
from sparsity_lab.results import Results, write_table

mpl.use("Agg")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the figures and the tables behind them, print the agreement and their paths. Returns 0, or 2 with one line
    on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path, metavar="TEACHER", help="results folder of the dense model")
    parser.add_argument("free", type=Path, metavar="FREE", help="the same with model.attention=sparse")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (default: FREE/figures)")
    parser.add_argument("--topk", type=int, metavar="K", help="budget (default: the largest)")
    parser.add_argument("--block-size", type=int, metavar="N", help="of ablations: positions a block")
    parser.add_argument("--pool", type=int, metavar="N", help="of ablations: pool size in positions")
    parser.add_argument("--sources", type=int, nargs="+", metavar="LAYER", help="of ablations: layers to rank")
    parser.add_argument("--scorer", metavar="NAME", help="of recall runs: only this scorer")
    parser.add_argument("--metric", choices=METRICS, default="coverage", help="of recall runs (default: %(default)s)")
    options = parser.parse_args(argv)
    out = options.out or options.free / "figures"

    def write() -> Iterator[Path]:
        teacher, free = load(options.teacher), load(options.free)
        if isinstance(teacher, AblationResults) and isinstance(free, AblationResults):
            yield from rankings(teacher, free, options, out)
        elif isinstance(teacher, Results) and isinstance(free, Results):
            yield from save(_coverage(teacher, free, options), out / f"free-running-{options.metric}")
        else:
            raise ValueError(f"{options.teacher}, {options.free}: must both be ablations or both recall runs")

    return report(parser.prog, write, [options.teacher, options.free])


def rankings(teacher: AblationResults, free: AblationResults, options: argparse.Namespace, out: Path) -> Iterator[Path]:
    """The figure of one pool and the agreement of all."""
    chosen = {"topk": options.topk, "block_size": options.block_size, "pool_positions": options.pool}
    figure = draw_rankings(teacher, free, sources=options.sources, **chosen)
    agreed = rank_agreement(compared_rankings(teacher, free, options.sources))
    for row in agreed.itertuples(index=False):
        print(
            f"k {row.topk}, pool of {row.pool_positions} in blocks of {row.block_size}: rank correlation "
            f"{row.rank_correlation:.3f} over {row.sources} sources; best teacher-forced {row.best_teacher}, "
            f"free-running {row.best_free}, regret {row.regret:.4f}"
        )
    yield from save(figure, out / "free-running-sources")
    write_table(agreed, out / "free-running-agreement.csv")
    yield out / "free-running-agreement.csv"


def _coverage(teacher: Results, free: Results, options: argparse.Namespace) -> Figure:
    figure = draw_coverage(teacher, free, options.metric, topk=options.topk, scorer=options.scorer)
    table = figure.table  # type: ignore[attr-defined]
    for (scorer, ratio), rows in table.groupby(["scorer", "compress_ratio"]):
        means = [rows[f"{options.metric}_{side}"].mean() for side in ("teacher", "free")]
        print(f"{scorer}, ratio {ratio}: {options.metric} {means[0]:.4f} teacher-forced, {means[1]:.4f} free-running")
    return figure


if __name__ == "__main__":
    sys.exit(main())
