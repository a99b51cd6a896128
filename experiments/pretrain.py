"""Train a DeepSeek V4.1 model on the text of this machine, from random weights or from a checkpoint.

python experiments/pretrain.py experiment=pretrain/smoke
python experiments/pretrain.py experiment=pretrain/v41_mini
torchrun --nproc-per-node 4 experiments/pretrain.py experiment=pretrain/v41_mini
torchrun --nproc-per-node 8 experiments/pretrain.py model.size=mid recipe.parallel=fsdp
python experiments/pretrain.py experiment=pretrain/indexers model.path=results/pretrain/v41_mini/model
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import hydra
from omegaconf import DictConfig

from sparsity_lab import config, console, schemas
from sparsity_lab.models.deepseek_v41.parallel import launched, own_device
from sparsity_lab.models.loading import resolve_device
from sparsity_lab.pretrain import Pretrainer
from sparsity_lab.pretrain_data import Batches
from sparsity_lab.pretrain_model import model_config, starting_folder
from sparsity_lab.pretrain_prepare import TextSettings, prepare
from sparsity_lab.pretrain_recipe import PretrainRecipe, compute_dtype
from sparsity_lab.pretrain_run import PretrainRun, PretrainSchedule

began = time.perf_counter()
schemas.register()
log = logging.getLogger("sparsity_lab")


@hydra.main(version_base="1.3", config_path="../conf", config_name="pretrain")
def main(cfg: DictConfig) -> float:
    settings = config.resolve(cfg)
    shard, model = launched(), model_config(settings["model"], settings["shape"])
    start = starting_folder(settings["model"])
    device = resolve_device(own_device(shard, settings["model"]["device"]))
    recipe = PretrainRecipe(**settings["recipe"], dtype=compute_dtype(settings["model"]["dtype"], device))
    trainer = Pretrainer(model, recipe, device, shard, start)  # before the text: it refuses what cannot be trained
    folder = Path(settings["results_dir"]) / settings["experiment_name"] / settings["name"]
    data = dict(settings["data"])
    shares = data.pop("shares")
    with shard.first():
        prepared = prepare(
            folder / "data", TextSettings(**data), vocab_size=model.vocab_size, length=recipe.length, start=start
        )
    batches = Batches(
        prepared.streams, shares, recipe.sequences, recipe.length, model.vocab_size,
        seed=recipe.seed, rank=shard.rank, world=shard.world,
    )  # fmt: skip
    with console.progress(f"pretraining {settings['name']}") as progress:
        run = PretrainRun(
            trainer, batches, prepared, folder, PretrainSchedule(**settings["schedule"]),
            settings=settings, progress=progress, began=began,
        )  # fmt: skip
        bits = run.run(settings["preflight"])
    log.info("results: %s", folder)
    return bits


if __name__ == "__main__":
    console.plain_errors()
    main()
