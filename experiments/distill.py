"""Train lightning indexers on a model's dense attention, for scorer=lightning scorer.weights=FOLDER.

python experiments/distill.py
python experiments/distill.py experiment=distill/smoke
python experiments/distill.py experiment=distill/heads && python analysis/plot_training.py results/distill_heads
"""

from __future__ import annotations

import logging
from pathlib import Path

import hydra
from omegaconf import DictConfig

from sparsity_lab import config, console, schemas
from sparsity_lab.distill import Trainer
from sparsity_lab.distill_data import Mixture, load_sources
from sparsity_lab.distill_recipe import Recipe
from sparsity_lab.distill_run import Run, Schedule
from sparsity_lab.job import Workspace
from sparsity_lab.lightning import IndexerConfig

schemas.register()
log = logging.getLogger("sparsity_lab")


@hydra.main(version_base="1.3", config_path="../conf", config_name="distill")
def main(cfg: DictConfig) -> float:
    settings = config.resolve(cfg)
    data = settings["data"]
    model = Workspace.current().model(settings["model"])
    train, weights = load_sources(data["train"], model.tokenizer, data["length"], "data.train")
    held_out, _ = load_sources(data["held_out"], model.tokenizer, data["length"], "data.held_out")
    trainer = Trainer(model, IndexerConfig(**settings["indexer"]), Recipe(**settings["recipe"]), data["length"])
    folder = Path(settings["results_dir"]) / settings["experiment_name"] / settings["name"]
    with console.progress(f"distilling {model.name}, {len(trainer.modules)} indexers") as progress:
        run = Run(
            trainer, Mixture(train, weights), held_out, folder, Schedule(**settings["schedule"]),
            settings=settings, progress=progress,
        )  # fmt: skip
        score = run.run()
    log.info("weights: %s", folder)
    return score


if __name__ == "__main__":
    console.plain_errors()
    main()
