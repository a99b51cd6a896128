"""A whole distillation: training with held-out figures, checkpoints and an early stop, then the weight files.

What its folder holds: see `distill_folder`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from sparsity_lab.distill import Trainer
from sparsity_lab.distill_data import Mixture, check_apart, describe
from sparsity_lab.distill_folder import RunFolder
from sparsity_lab.documents import Documents
from sparsity_lab.lightning import save_weights

HELD_OUT_METRICS = ("relative_coverage", "coverage", "oracle_coverage", "recall")
LOG_COLUMNS = (
    "step",  # optimiser steps made
    "tokens",  # tokens of the documents seen so far, each time they were seen
    "seconds",  # spent in training, evaluations left out
    "lr",  # learning rate of the last step
    "layer",
    "compress_ratio",
    "topk",
    "loss",  # mean over the steps since the last evaluation, nats
    "held_out",  # label of the held-out source; the metrics behind it are measured on its documents
    *HELD_OUT_METRICS,
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
log = logging.getLogger("sparsity_lab")


@dataclass(frozen=True)
class Schedule:
    """When a run looks up from training.

    evaluate_every, checkpoint_every: in optimiser steps; patience: evaluations without a better mean held-out
    relative_coverage before it stops and takes the best weights (None = train all steps, keep the last);
    held_out_rows: query rows measured of each held-out document; weights_dtype: of the files.
    """

    evaluate_every: int = 100
    checkpoint_every: int = 100
    patience: int | None = None
    held_out_rows: int | None = 64
    weights_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("evaluate_every", "checkpoint_every", "patience", "held_out_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"schedule.{name}={value}: must be at least 1")
        if self.weights_dtype not in DTYPES:
            raise ValueError(f"schedule.weights_dtype={self.weights_dtype!r}: must be one of {', '.join(DTYPES)}")


@dataclass
class _Progress:
    """What a run has done so far; all of it is in a checkpoint."""

    step: int = 0
    seconds: float = 0.0
    loss: Any = 0.0  # sum over the steps since the last evaluation, [source layers, ratios]
    since: int = 0  # how many those are
    rows: list[dict[str, Any]] = field(default_factory=list)
    best: float = float("-inf")
    best_weights: dict[str, Any] | None = None
    worse: int = 0  # evaluations since the best


class Run:
    """One distillation in a folder; `run` starts it, goes on with it, or finds it finished.

    Args:
        settings: what the manifest says beside the run's own description.
        progress: called with (steps done, steps in all).
    Raises:
        ValueError: training and held-out text that overlap.
    """

    def __init__(
        self,
        trainer: Trainer,
        mixture: Mixture,
        held_out: Mapping[str, Documents],
        folder: Path,
        schedule: Schedule,
        *,
        settings: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        if not held_out:
            raise ValueError("data.held_out=[]: needs at least one source, to see what is learned")
        check_apart(mixture.sources, held_out)
        self.trainer, self.held_out, self.schedule = trainer, held_out, schedule
        self.settings, self.advance, self.at = dict(settings or {}), progress, _Progress()
        recipe, model = trainer.recipe, trainer.model
        self.order = mixture.order(recipe.steps * recipe.accumulate, recipe.seed)
        data = {"length": trainer.length, "train": mixture.describe()}
        data["held_out"] = {label: describe(documents) for label, documents in held_out.items()}
        about = {
            "model": model.name,
            "model_fingerprint": model.fingerprint,
            "dtype": str(model.dtype).removeprefix("torch."),
            "indexer": vars(trainer.config),
            "recipe": recipe.describe(),
            "data": data,
            "schedule": vars(schedule),
        }
        self.folder = RunFolder(folder, json.loads(json.dumps(about)))

    def run(self) -> float:
        """Train to the end and write the weight files; returns the mean held-out relative_coverage.

        Raises:
            ValueError: the folder holds a run with other settings, or a damaged one.
        """
        if (manifest := self.folder.finished()) is not None:
            log.info("%s is complete already; nothing to do", self.folder.path)
            return _score(pd.DataFrame(manifest["held_out"]))
        if (found := self.folder.load_checkpoint(self.trainer.model.device)) is not None:
            self.trainer.load_state(found["state"])
            self.at = _Progress(**found["at"])
            log.info("going on from step %d", self.at.step)
        with self.folder.running():
            self._train()
            return self._finish()

    def _train(self) -> None:
        recipe, at, schedule = self.trainer.recipe, self.at, self.schedule
        if not at.rows:
            self._evaluate()
        while at.step < recipe.steps and not self._stopped():
            began = time.perf_counter()
            until = min(
                recipe.steps, _next(at.step, schedule.evaluate_every), _next(at.step, schedule.checkpoint_every)
            )
            while at.step < until:
                first = at.step * recipe.accumulate
                at.loss = at.loss + self.trainer.step(self.order[first : first + recipe.accumulate], at.step)
                at.step += 1
                at.since += 1
                self.advance(at.step, recipe.steps)
            at.loss = at.loss.cpu()  # waits for the device, so the time is that of the work
            at.seconds += time.perf_counter() - began
            if at.step % schedule.evaluate_every == 0 or at.step == recipe.steps:
                self._evaluate()
            if at.step % schedule.checkpoint_every == 0 or at.step == recipe.steps:
                self.folder.save_checkpoint({"state": self.trainer.state(), "at": vars(self.at)})
            if at.since:
                at.loss = at.loss.to(self.trainer.model.device)

    def _stopped(self) -> bool:
        return self.schedule.patience is not None and self.at.worse >= self.schedule.patience

    def _evaluate(self) -> None:
        """Add the held-out figures to the log, write it, and keep the weights if they are the best so far."""
        at, recipe = self.at, self.trainer.recipe
        found = self._held_out(checks=at.step == 0)
        loss = (
            at.loss / at.since if at.since else torch.full((len(self.trainer.sources), len(recipe.ratios)), torch.nan)
        )
        losses = {
            (layer, ratio): loss[i, j].item()
            for i, layer in enumerate(self.trainer.sources)
            for j, ratio in enumerate(recipe.ratios)
        }
        shared = {
            "step": at.step,
            "tokens": at.step * recipe.accumulate * self.trainer.length,
            "seconds": at.seconds,
            "lr": recipe.learning_rate(max(at.step - 1, 0)),
        }
        for row in found.to_dict("records"):
            at.rows.append({**shared, "loss": losses[row["layer"], row["compress_ratio"]], **row})  # type: ignore[dict-item]
        self.folder.write_log(pd.DataFrame(at.rows, columns=list(LOG_COLUMNS)))
        worst = found.sort_values("relative_coverage").iloc[0]
        score = _score(found)
        log.info(
            "step %d of %d: loss %.4f, held-out relative coverage %.4f (worst %.4f: layer %d, ratio %d), %.0f tokens/s",
            at.step, recipe.steps, loss.mean(), score, worst["relative_coverage"], worst["layer"],
            worst["compress_ratio"], shared["tokens"] / at.seconds if at.seconds else 0,
        )  # fmt: skip
        at.loss, at.since = 0.0, 0
        at.worse = 0 if score > at.best else at.worse + 1
        if score > at.best and self.schedule.patience is not None:
            at.best_weights = _copied(self.trainer.state()["weights"])
        at.best = max(at.best, score)

    def _held_out(self, checks: bool = False) -> pd.DataFrame:
        """Held-out figures of the weights as they are: a row a source, layer and ratio."""
        frames = []
        for label, documents in self.held_out.items():
            frame = self.trainer.evaluate(documents, rows=self.schedule.held_out_rows, checks=checks)
            frames.append(frame[["layer", "compress_ratio", "topk", *HELD_OUT_METRICS]].assign(held_out=label))
        return pd.concat(frames, ignore_index=True)

    def _finish(self) -> float:
        """Weight files and manifest; the held-out figures in them are those of the rounded weights."""
        from sparsity_lab.job import machine

        at, trainer, dtype = self.at, self.trainer, DTYPES[self.schedule.weights_dtype]
        if at.best_weights is not None:
            trainer.load_weights(at.best_weights)
        for module in trainer.modules.values():
            module.to(dtype).float()
        figures = self._held_out()
        if trainer.config.quant != "none":
            agreement = pd.concat(
                trainer.agreement(documents, rows=self.schedule.held_out_rows).assign(held_out=label)
                for label, documents in self.held_out.items()
            )
            figures = figures.merge(agreement, on=["held_out", "layer", "compress_ratio"])
        tokens = at.step * trainer.recipe.accumulate * trainer.length
        about = {
            **{key: self.folder.identity[key] for key in ("recipe", "data")},
            **{key: value for key, value in machine().items() if key in ("git", "versions")},
            "steps": at.step,
            "tokens": tokens,
        }
        for ratio in trainer.recipe.ratios:
            save_weights(
                self.folder.path / f"ratio{ratio}.safetensors",
                {layer: trainer.modules[layer, ratio] for layer in trainer.sources},
                trainer.config, trainer.model, dtype=dtype, topology=trainer.topologies[ratio].describe(),
                held_out=by_layer(figures[figures["compress_ratio"] == ratio]), **about,
            )  # fmt: skip
        self.folder.finish(
            {
                "config": self.settings,
                "parameters": {str(r): self._parameters(r) for r in trainer.recipe.ratios},
                "training": {"steps": at.step, "tokens": tokens, "seconds": at.seconds},
                "held_out": json.loads(figures.to_json(orient="records")),
                **machine(),
            }
        )
        return _score(figures)

    def _parameters(self, ratio: int) -> int:
        """Parameters of one layer's indexer."""
        return sum(p.numel() for p in self.trainer.modules[self.trainer.sources[0], ratio].parameters())


def by_layer(figures: pd.DataFrame) -> dict[str, dict[str, dict[str, float]]]:
    """Held-out figures of one ratio as nested plain values: source -> layer -> metric -> value."""
    metrics = [name for name in figures if name not in ("held_out", "layer", "compress_ratio", "topk")]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in figures.to_dict("records"):
        values = {str(name): round(float(row[name]), 6) for name in metrics}
        found.setdefault(str(row["held_out"]), {})[str(row["layer"])] = values
    return found


def _score(figures: pd.DataFrame) -> float:
    return float(figures["relative_coverage"].mean())


def _copied(weights: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: {key: tensor.clone() for key, tensor in state.items()} for name, state in weights.items()}


def _next(step: int, every: int) -> int:
    """The first multiple of `every` after `step`."""
    return (step // every + 1) * every
