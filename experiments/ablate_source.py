"""Compare every candidate source layer with every consumer, and every reuse between layers, in one pass.

python experiments/ablate_source.py
python experiments/ablate_source.py dry_run=true
python analysis/plot_source.py results/ablate_source/smollm2-pydoc-2048-auto-ratio1
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from sparsity_lab import config, console, schemas
from sparsity_lab.ablation import Ablation
from sparsity_lab.ablation_run import AblationRun, describe, pool_of
from sparsity_lab.job import Workspace, build_scorer, machine

schemas.register()


@hydra.main(version_base="1.3", config_path="../conf", config_name="ablate_source")
def main(cfg: DictConfig) -> None:
    settings = config.resolve(cfg)
    ablation, attribution = Ablation(**settings["ablation"]), dict(settings["attribution"])
    if settings["dry_run"]:
        print(describe(ablation, settings))
        return
    chosen = config.chosen_scorer(settings["scorer"], settings["model"])
    workspace = Workspace.current()
    model = workspace.model(settings["model"])
    documents = workspace.documents(settings["data"], model, json.dumps(settings["model"], sort_keys=True))
    sources = attribution.pop("index_source_layers")
    run = AblationRun(
        model, documents, ablation, build_scorer(chosen, model), config.scorer_label(chosen),
        candidate=pool_of(**attribution), index_source_layers=sources, **settings["measure"],
    )  # fmt: skip
    folder = Path(settings["results_dir"]) / settings["experiment_name"] / settings["name"]
    about = {"config": settings, "model": {"name": model.name}, "scorer": config.scorer_label(chosen), **machine()}
    with console.progress(f"{model.name}, {len(documents)} documents") as progress:
        run.run(folder, about, progress=progress, say=lambda text: print(text, file=sys.stderr))
    print(f"results: {folder}", file=sys.stderr)


if __name__ == "__main__":
    console.plain_errors()
    main()
