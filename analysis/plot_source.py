"""Draw an ablation of candidate sources: heat maps of source x consumer, loss over pool size, a ranking of sources; and
the table of the smallest pools that keep a share of coverage.

    python analysis/plot_source.py results/ablate_source/smollm2-pydoc-2048-auto-ratio1
"""

from __future__ import annotations

import argparse
import sys

import _ablation

from sparsity_lab.ablation_run import AblationResults
from sparsity_lab.ablation_table import (
    choose,
    compared_sources,
    layers_of,
    over_consumers,
    ranking,
    smallest_pools,
    source_means,
)
from sparsity_lab.plot_source import LABELS, draw_pool_sizes, draw_ranking, draw_sources


def draw(results: AblationResults, options: argparse.Namespace) -> _ablation.Drawn:
    a, common = results.ablation, not options.own_consumers
    k = options.topk or a.topk[-1]
    size = options.block_size or a.block_sizes[len(a.block_sizes) // 2]
    pool = options.pool or a.pool_positions[len(a.pool_positions) // 2]
    sources = compared_sources(layers_of(results), options.sources)
    cell = {"topk": k, "block_size": size, "pool_positions": pool}
    maps = choose(source_means(results), topk=k, block_size=size)
    end = "" if common else "-own-consumers"
    return [
        (f"source-{options.metric}-k{k}-block{size}", draw_sources(results, options.metric, topk=k, block_size=size),
         maps),
        (f"source-pool-size-k{k}{end}", draw_pool_sizes(results, sources, topk=k, common=common),
         choose(over_consumers(results, sources, common=common), topk=k)),
        (f"source-ranking-k{k}-pool{pool}-block{size}{end}", draw_ranking(results, sources, common=common, **cell),
         ranking(results, sources, common=common, **cell)),
        (f"source-smallest-pool{end}", None, smallest_pools(results, sources, keep=options.keep, common=common)),
    ]  # fmt: skip


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
