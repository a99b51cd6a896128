"""Figures for the card of a trained V4.1 model, with sparse attention on; minutes on a CPU.

python experiments/mini_card.py training=shipped                    # the model that comes with sparsity_lab
python experiments/mini_card.py model=deepseek_v41 model.path=results/pretrain/v41_mini/model \
    held_out=results/pretrain/v41_mini/data/held_out.npz training=results/pretrain/v41_mini
"""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path

import hydra
import numpy as np
from omegaconf import DictConfig

from sparsity_lab import config, console, pretrain_card, pretrain_report, schemas
from sparsity_lab.job import Workspace, machine
from sparsity_lab.results import write_text

schemas.register()
log = logging.getLogger("sparsity_lab")


@hydra.main(version_base="1.3", config_path="../conf", config_name="mini_card")
def main(cfg: DictConfig) -> float:
    settings = config.resolve(cfg)
    model = Workspace.current().model(settings["model"])
    held, seed = pretrain_card.read_held_out(settings["held_out"], settings["sequences"]), settings["seed"]
    everything = np.concatenate(list(held.values()))
    parts = {"held_out": partial(pretrain_card.held_out, model, held)}
    for distance in settings["distances"]:
        parts[f"induction_{distance}"] = partial(
            pretrain_card.induction, model, distance=distance, sequences=settings["repeats"], seed=seed
        )
        parts[f"copying_{distance}"] = partial(
            pretrain_card.copying, model, everything, distance=distance, count=settings["identifiers"], seed=seed
        )
    for name, function in (("coverage", pretrain_card.coverage), ("shared_bound", pretrain_card.shared_bound)):
        parts[name] = partial(function, model, everything, rows=settings["rows"])
    found = {"model": model.name, "fingerprint": model.fingerprint, **machine()}
    for name, part in parts.items():
        with console.progress(name) as progress:
            found[name] = part(advance=progress)
        log.info("%s: %s", name, json.dumps(found[name]))
        if settings["record"] is not None:
            write_text(Path(settings["record"]), json.dumps(found, indent=1) + "\n")
    if settings["training"] is not None:
        path, text = pretrain_report.read_card(model.name, settings["training"], found)
        curve = pretrain_report.write_curve(model.name, settings["training"])
        write_text(path, text)
        log.info("card: %s, with %s", path, curve.name)
    return found["held_out"]["sparse_over_dense"]


if __name__ == "__main__":
    console.plain_errors()
    main()
