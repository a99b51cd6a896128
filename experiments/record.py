"""Record what cells need of a model, once; then measure any cells from the recording, without the model.

python experiments/record.py dry_run=true
python experiments/record.py record.folder=recordings/smollm2
python experiments/recall.py model=recorded model.path=recordings/smollm2 data=recorded
"""

from __future__ import annotations

import json
import logging

import hydra
from omegaconf import DictConfig

from sparsity_lab import config, console, schemas
from sparsity_lab.job import Workspace
from sparsity_lab.record import record

schemas.register()
log = logging.getLogger("sparsity_lab")


@hydra.main(version_base="1.3", config_path="../conf", config_name="record")
def main(cfg: DictConfig) -> None:
    settings = config.resolve(cfg)
    if settings["model"].get("kind") == "recorded":
        raise ValueError("model=recorded: is a recording already; copy its folder")
    workspace = Workspace()
    model = workspace.model(settings["model"])
    documents = workspace.documents(settings["data"], model, json.dumps(settings["model"], sort_keys=True))
    options = dict(settings["record"])
    with console.progress(f"recording {model.name}, {len(documents)} documents") as progress:
        folder = record(
            model, documents, options.pop("folder"), **options,
            config=settings, dry_run=settings["dry_run"], progress=progress, say=log.info,
        )  # fmt: skip
    log.info("nothing written (dry_run=true)" if settings["dry_run"] else f"recording: {folder}")


if __name__ == "__main__":
    console.plain_errors()
    main()
