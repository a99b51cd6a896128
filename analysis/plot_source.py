"""Draw an ablation of candidate sources: heat maps of source x consumer, loss over pool size, a ranking of sources; and
the table of the smallest pools that keep a share of coverage.

    python analysis/plot_source.py results/ablate_source/smollm2-pydoc-2048-auto-ratio1
"""

from __future__ import annotations

import argparse
import sys

import _ablation

from sparsity_lab import plot
from sparsity_lab.ablation_run import AblationResults
from sparsity_lab.ablation_table import compared_sources, layers_of, smallest_pools
from sparsity_lab.figures.source import LABELS, chosen


def draw(results: AblationResults, options: argparse.Namespace) -> _ablation.Drawn:
    common, sources = not options.own_consumers, options.sources
    cell = chosen(results, options.topk, options.block_size, options.pool)
    k, size, pool = cell["topk"], cell["block_size"], cell["pool_positions"]
    kept = smallest_pools(results, compared_sources(layers_of(results), sources), keep=options.keep, common=common)
    end = "" if common else "-own-consumers"
    return [
        (f"source-{options.metric}-k{k}-block{size}", plot.sources(results, options.metric, topk=k, block_size=size)),
        (f"source-pool-size-k{k}{end}", plot.pool_sizes(results, sources, topk=k, common=common)),
        (
            f"source-ranking-k{k}-pool{pool}-block{size}{end}",
            plot.source_ranking(results, sources, common=common, **cell),
        ),
        (f"source-smallest-pool{end}", kept),
    ]


def main() -> int:
    arguments = _ablation.parser(__doc__ or "")
    arguments.add_argument("--block-size", type=int, metavar="N", help="positions a block, of maps and ranking")
    arguments.add_argument("--pool", type=int, metavar="N", help="pool size in positions, of the ranking")
    arguments.add_argument(
        "--metric", choices=sorted(LABELS), default="loss", help="of the maps (default: %(default)s)"
    )
    arguments.add_argument(
        "--sources", type=int, nargs="+", metavar="LAYER", help="layers to rank (default: the first two thirds)"
    )
    arguments.add_argument(
        "--own-consumers",
        action="store_true",
        help="average each source over all layers behind it instead of those behind all sources; flatters late sources",
    )
    arguments.add_argument("--keep", type=float, default=0.99, help="share of coverage a pool must keep (%(default)s)")
    return _ablation.main(arguments, draw)


if __name__ == "__main__":
    sys.exit(main())
