"""A whole pretraining: how many steps fit the time, the loop with its evaluations and checkpoints, the finished model.

What its folder holds, beside `data` (see `pretrain_prepare`): training.csv (a row an evaluation), losses.csv (a row a
step), manifest.json, status, checkpoint.pt while unfinished, and `model`, a checkpoint folder in bfloat16 with its
tokenizer, which `model=deepseek_v41 model.path=...` loads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from sparsity_lab.distill_folder import RunFolder
from sparsity_lab.models.deepseek_v41.checkpoint import save_checkpoint
from sparsity_lab.models.loading import fingerprint
from sparsity_lab.pretrain import Pretrainer
from sparsity_lab.pretrain_attention import Stage
from sparsity_lab.pretrain_data import Batches, token_bytes
from sparsity_lab.pretrain_model import flops_per_token, in_bfloat16, peak_flops
from sparsity_lab.pretrain_prepare import Prepared
from sparsity_lab.pretrain_record import read_record
from sparsity_lab.results import write_table, write_text

FETCHED = 20  # steps after which their losses are fetched from the device
TIMED, WARM = 6, 3  # steps of each stage that are timed, after so many that are not
MARGIN = 0.94  # share of the time that is planned for
log = logging.getLogger("sparsity_lab")


@dataclass(frozen=True)
class PretrainSchedule:
    """evaluate_every, checkpoint_every: in optimiser steps; held_out_sequences: at each evaluation;
    evaluate_batch: sequences at a time."""

    evaluate_every: int = 100
    checkpoint_every: int = 500
    held_out_sequences: int = 8
    evaluate_batch: int = 4

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"schedule.{name}={value}: must be at least 1")


class _TimeUp(KeyboardInterrupt):
    """The recipe's seconds are over before the last step."""


@dataclass
class _Progress:
    """What a run has done so far; all of it is in a checkpoint."""

    step: int = 0
    steps: int = 0
    seconds: float = 0.0  # in training steps
    losses: list[list[float]] = field(default_factory=list)  # a row a step: step, language, index, imbalance, norm
    rows: list[dict[str, Any]] = field(default_factory=list)


class PretrainRun:
    """One pretraining in a folder; `run` starts it, goes on with it, or finds it finished.

    Args:
        settings: what the manifest says beside the run's own description.
        progress: called with (steps done, steps in all).
        began: time.perf_counter() from which the recipe's seconds count; None = from `run`.
    Raises:
        ValueError: the record beside the weights that this one starts from is damaged, or not of a training.
    """

    def __init__(
        self,
        trainer: Pretrainer,
        batches: Batches,
        prepared: Prepared,
        folder: Path,
        schedule: PretrainSchedule,
        *,
        settings: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        began: float | None = None,
    ) -> None:
        self.began = time.perf_counter() if began is None else began
        self.trainer, self.batches, self.prepared, self.schedule = trainer, batches, prepared, schedule
        self.settings, self.advance, self.at = dict(settings or {}), progress, _Progress()
        self.earlier = None if trainer.start is None else read_record(trainer.start)
        self.sizes = torch.from_numpy(token_bytes(prepared.tokenizer))
        self.leads = trainer.shard.rank == 0
        recipe = trainer.recipe.describe()
        recipe.pop("seconds")  # of a call; what follows from it is in the checkpoint
        identity = {
            "config": trainer.config.describe(),
            "recipe": recipe,
            "data": {"shares": dict(batches.shares), "digest": prepared.corpus["digest"]},
            "world": trainer.shard.world,
            "start": None if trainer.start is None else fingerprint(str(trainer.start)),
        }
        self.folder = RunFolder(folder, json.loads(json.dumps(identity)), "a pretraining")

    def run(self, preflight: bool = False) -> float:
        """Train to the end and write the model; returns the held-out bits per byte, sparse.

        Args:
            preflight: try everything a training does (each stage, an evaluation, a checkpoint written and read) in a
                few steps, report the speed, and stop.
        Raises:
            ValueError: the folder holds a run with other settings, or the loss is no number any more.
        """
        if preflight:
            self._plan(preflight)
            return math.nan
        if (manifest := self.folder.finished()) is not None:
            log.info("%s is complete already; nothing to do", self.folder.path)
            return float(manifest["held_out"]["bits_pool"])
        found = self.folder.load_checkpoint(torch.device("cpu"))
        if found is not None:
            self.trainer.load_state(found["state"])
            self.at = _Progress(**found["at"])
            log.info("going on from step %d of %d", self.at.step, self.at.steps)
        if not self.leads:
            return self._work(fresh=found is None)
        with contextlib.suppress(_TimeUp), self.folder.running():
            return self._work(fresh=found is None)
        return math.nan

    def _work(self, *, fresh: bool) -> float:
        if fresh:
            self.at.steps = self._plan()
        self._train()
        return self._finish()

    def _plan(self, preflight: bool = False) -> int:
        """Number of steps: as the recipe says, or as many as fit its seconds by the speed of each stage, measured."""
        trainer, recipe = self.trainer, self.trainer.recipe
        if recipe.steps is not None and not preflight:
            return recipe.steps
        times = {stage: self._time(stage) for stage in ("dense", "sparse", "pool")}
        began = time.perf_counter()
        self._evaluate_now("pool", self.schedule.held_out_sequences)
        evaluation = time.perf_counter() - began
        self._check_checkpoint()
        trainer.reset()
        shares = (recipe.dense, recipe.sparse, 1 - recipe.dense - recipe.sparse)
        mean = sum(share * seconds for share, seconds in zip(shares, times.values(), strict=True))
        mean += evaluation / self.schedule.evaluate_every
        left = (recipe.seconds or math.inf) * MARGIN - (time.perf_counter() - self.began) - 4 * evaluation
        steps = recipe.steps or max(1, int(left / mean))
        if trainer.shard.world > 1:
            agreed = torch.tensor([steps], device=trainer.device)
            torch.distributed.broadcast(agreed, 0)
            steps = int(agreed)
        tokens = recipe.sequences * recipe.length
        memory = torch.cuda.max_memory_allocated() / 2**30 if trainer.device.type == "cuda" else 0.0
        log.info(
            "ms a step: %s; an evaluation %.1f s; %d steps, %.1f M tokens, %.0f tokens/s; %.1f GiB of GPU memory%s",
            ", ".join(f"{stage} {1000 * seconds:.0f}" for stage, seconds in times.items()), evaluation, steps,
            steps * tokens / 1e6, tokens / mean, memory, "".join(f"; {note}" for note in trainer.notes),
        )  # fmt: skip
        return steps

    def _time(self, stage: Stage) -> float:
        """Seconds a step of a stage; moves the weights."""
        recipe = self.trainer.recipe
        # where in a long schedule the stage is in force
        place = {"dense": 0.0, "sparse": recipe.dense, "pool": recipe.dense + recipe.sparse}[stage]
        whole = 1_000_000
        first = min(round(place * whole), whole - WARM - TIMED)
        for number in range(WARM + TIMED):
            if number == WARM:
                self._wait()
                began = time.perf_counter()
            found = self.trainer.step(self.batches, first + number, whole)
        self._check_finite(float(found["language"]), float(found["index"].sum()), number)
        self._wait()
        return (time.perf_counter() - began) / TIMED

    def _wait(self) -> None:
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.device)

    def _check_checkpoint(self) -> None:
        """A checkpoint survives being written and read."""
        state = self.trainer.state()
        if not self.leads:
            return
        folder = RunFolder(self.folder.path / ".check", self.folder.identity)
        folder.save_checkpoint({"state": state, "at": vars(self.at)})
        found = folder.load_checkpoint(torch.device("cpu"))
        assert found is not None
        for name, tensor in state["weights"].items():
            if not torch.equal(tensor.cpu(), found["state"]["weights"][name]):
                raise ValueError(f"{self.folder.path}: {name} of a checkpoint differs from what was written")
        shutil.rmtree(folder.path)

    def _train(self) -> None:
        at, schedule, trainer = self.at, self.schedule, self.trainer
        pending, mark = list[dict[str, Tensor]](), time.perf_counter()
        budget = math.inf if trainer.recipe.seconds is None or trainer.shard.world > 1 else trainer.recipe.seconds
        while at.step < at.steps:
            pending.append(trainer.step(self.batches, at.step, at.steps))
            at.step += 1
            last = at.step == at.steps
            evaluate = last or at.step % schedule.evaluate_every == 0
            save = at.step % schedule.checkpoint_every == 0
            if not (evaluate or save or len(pending) == FETCHED):
                continue
            self._note(pending)
            pending.clear()
            at.seconds += time.perf_counter() - mark
            late = time.perf_counter() - self.began > budget and not last
            if self.leads:
                self.advance(at.step, at.steps)
            if evaluate:
                self._evaluate()
            if save or late:
                self._save()
            if late:
                return
            mark = time.perf_counter()

    def _note(self, pending: list[dict[str, Tensor]]) -> None:
        """Fetch the losses of the last steps from the device."""
        for step, found in enumerate(pending, start=self.at.step - len(pending)):
            row = [float(found["language"]), float(found["index"].mean())]
            self._check_finite(row[0], row[1], step)
            self.at.losses.append([step, *row, float(found["imbalance"]), float(found["norm"])])

    @staticmethod
    def _check_finite(language: float, index: float, step: int) -> None:
        if not math.isfinite(language + index):
            raise ValueError(f"step {step}: the loss is {language}, of the indexers {index}; lower recipe.lr")

    def _save(self) -> None:
        state = self.trainer.state()
        if self.leads:
            self.folder.save_checkpoint({"state": state, "at": vars(self.at)})

    def _evaluate_now(self, stage: Stage, limit: int | None) -> dict[str, float]:
        inputs, targets = self.prepared.held(limit=limit)
        stages: tuple[Stage, ...] = ("dense",) if stage == "dense" else ("dense", stage)
        return self.trainer.evaluate(inputs, targets, self.sizes, stages, self.schedule.evaluate_batch)

    def _evaluate(self) -> None:
        """Add a row to training.csv."""
        at, recipe = self.at, self.trainer.recipe
        stage = recipe.stage(at.step - 1, at.steps)
        found = self._evaluate_now(stage, self.schedule.held_out_sequences)
        if not self.leads:
            return
        before = at.rows[-1] if at.rows else {"step": 0, "seconds": 0.0}
        recent = pd.DataFrame(
            at.losses[int(before["step"]) :], columns=["step", "loss", "index_loss", "imbalance", "norm"]
        )
        tokens = recipe.sequences * recipe.length
        speed = (at.step - before["step"]) * tokens / max(at.seconds - before["seconds"], 1e-9)
        peak = peak_flops(self.trainer.device)
        work = speed * flops_per_token(self.trainer.config, recipe.length, backward=not recipe.frozen)
        share = work / self.trainer.shard.world / peak if peak else None
        coverages = [value for name, value in found.items() if name.startswith("coverage_")]
        row = {
            "step": at.step,
            "tokens": at.step * tokens,
            "seconds": at.seconds,
            "stage": stage,
            "lr": recipe.lr * recipe.rate(at.step - 1, at.steps),
            **{name: float(recent[name].mean()) for name in ("loss", "index_loss", "imbalance", "norm")},
            "tokens_per_second": speed,
            "peak_share": share,
            **found,
        }
        at.rows.append(row)
        write_table(pd.DataFrame(at.rows), self.folder.path / "training.csv")
        log.info(
            "step %d of %d (%s): loss %.3f, held out %.3f (%.3f bits a byte)%s, index loss %.3f, coverage %.3f (worst "
            "%.3f), fullest expert %.2f, norm %.2f, %.0f tokens/s%s",
            at.step, at.steps, stage, row["loss"], found["loss_dense"], found["bits_dense"],
            "" if stage == "dense" else f", {stage} {found[f'loss_{stage}']:.3f}", row["index_loss"],
            sum(coverages) / max(len(coverages), 1), min(coverages, default=math.nan), row["imbalance"], row["norm"],
            speed, "" if share is None else f", {100 * share:.1f} % of the peak",
        )  # fmt: skip

    def _finish(self) -> float:
        """The model's folder, the losses and the manifest; a model is also written where the time was too short.

        Raises:
            _TimeUp: so it was; the same command goes on.
        """
        from sparsity_lab.job import machine

        at, trainer = self.at, self.trainer
        path = self.folder.path / "model"
        weights = trainer.weights()
        if self.leads:
            shutil.rmtree(path, ignore_errors=True)
            save_checkpoint(in_bfloat16(trainer.config, weights), path)
            self.prepared.tokenizer.save_pretrained(path)
        figures = self._evaluate_now("pool", None)
        if not self.leads:
            return math.nan
        write_table(
            pd.DataFrame(at.losses, columns=["step", "loss", "index_loss", "imbalance", "norm"]),
            self.folder.path / "losses.csv",
        )
        tokens = at.step * trainer.recipe.sequences * trainer.recipe.length
        training = {"steps": at.step, "of": at.steps, "tokens": tokens, "seconds": at.seconds, "notes": trainer.notes}
        record = {
            "config": {key: value for key, value in self.settings.items() if key != "results_dir"},
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            "training": training,
            "held_out": figures,
            "corpus": self.prepared.corpus,
            "start": self.earlier,
            **machine(),
        }
        write_text(path / "record.json", json.dumps(record, indent=1) + "\n")
        if at.step < at.steps:
            log.warning("the time is up at step %d of %d; the same command goes on", at.step, at.steps)
            raise _TimeUp
        self.folder.finish(record)
        return figures["bits_pool"]
