"""Recall and coverage of selections against dense attention.

python experiments/recall.py
python experiments/recall.py -m selection.topk=16,32,64 selection.compress_ratio=1,2,4
python experiments/recall.py --help
"""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from sparsity_lab import config, console, schemas
from sparsity_lab.estimate import describe
from sparsity_lab.job import execute, objective

schemas.register()


@hydra.main(version_base="1.3", config_path="../conf", config_name="recall")
def main(cfg: DictConfig) -> float | None:
    if cfg.dry_run:
        print(describe([config.read_job(cfg)]))
        return None
    job, results = execute(cfg, Path(HydraConfig.get().runtime.output_dir), console.progress)
    console.summary_table(results)
    print(f"results: {job.folder}", file=sys.stderr)
    return objective(results, job)


if __name__ == "__main__":
    console.plain_errors()
    main()
