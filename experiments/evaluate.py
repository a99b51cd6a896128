"""Run a model with selections really applied: perplexity, next-token distributions and retrieval against dense.

python experiments/evaluate.py
python experiments/evaluate.py -m selection.topk=16,64,256 selection.compress_ratio=1,4 evaluation=likelihood
python experiments/evaluate.py dry_run=true
python analysis/plot_evaluate.py results/evaluate/smollm2-pydoc-2048-sparse
"""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from sparsity_lab import console, schemas
from sparsity_lab.evaluation.job import EvaluationWorkspace, describe, objective, read_job
from sparsity_lab.evaluation.show import summary_table
from sparsity_lab.job import execute

schemas.register()


@hydra.main(version_base="1.3", config_path="../conf", config_name="evaluate")
def main(cfg: DictConfig) -> float | None:
    if cfg.dry_run:
        print(describe([read_job(cfg)]))
        return None
    folder = Path(HydraConfig.get().runtime.output_dir)
    job, results = execute(cfg, folder, console.progress, EvaluationWorkspace)
    summary_table(results)
    print(f"results: {job.folder}", file=sys.stderr)
    return objective(results, job)


if __name__ == "__main__":
    console.plain_errors()
    main()
