"""Choose index sources and a candidate source from an ablation, and measure the choice on documents it has not seen.

python experiments/ablate_source.py
python experiments/search_sources.py results=results/ablate_source/smollm2-pydoc-2048-auto-ratio1
python experiments/recall.py --config-dir results/search_sources/smollm2-pydoc-2048-auto-ratio1 \
    experiment=dynamic-programming-n8-k64
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from sparsity_lab import config, console, schemas, source_search
from sparsity_lab.ablation_run import load
from sparsity_lab.source_verify import verified

schemas.register()
log = logging.getLogger("sparsity_lab")


@hydra.main(version_base="1.3", config_path="../conf", config_name="search_sources")
def main(cfg: DictConfig) -> None:
    settings = config.resolve(cfg)
    options, results = settings["search"], load(Path(settings["results"]))
    pool = None if options["pool_positions"] is None else (options["pool_positions"], options["block_size"])
    table = source_search.search(
        results, options["num_sources"], topk=options["topk"] or results.ablation.topk, pool=pool,
        latest_candidate=options["latest_candidate"],
    )  # fmt: skip
    folder = Path(settings["results_dir"]) / settings["experiment_name"] / settings["name"]
    if settings["verify"]["num_documents"] != 0:
        table = verified(table, results, settings, folder, console.progress, log.warning)
    source_search.write(folder, table, results)
    print(source_search.shown(table, options["latest_candidate"]))
    print(f"results: {folder}", file=sys.stderr)


if __name__ == "__main__":
    console.plain_errors()
    main()
