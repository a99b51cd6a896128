"""One of the processes that test_pretrain_fsdp.py starts with torchrun: python pretrain_worker.py OUT_FOLDER.

On whatever devices its environment shows it: a GPU each, or the CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tiny_pretrain
import torch

from sparsity_lab.models.deepseek_v41.parallel import Shard, launched, own_device
from sparsity_lab.pretrain import Pretrainer
from sparsity_lab.pretrain_run import PretrainRun, PretrainSchedule
from sparsity_lab.pretrain_shard import local

SHAPE = {"index_n_heads": 3}  # which two processes cannot halve
STEPS, EVALUATE = 4, 2  # dense, sparse twice, pool
SCHEDULE = {"evaluate_every": EVALUATE, "held_out_sequences": 2, "evaluate_batch": 2}


def curve(trainer: Pretrainer) -> dict[str, torch.Tensor]:
    """Steps by hand: their losses and norms, and the weights after them."""
    steps, shard = trainer.recipe.steps or 0, trainer.shard
    data = tiny_pretrain.batches(trainer.recipe, rank=shard.rank, world=shard.world)
    found = [trainer.step(data, step, steps) for step in range(steps)]
    told = {f"{name}s": torch.stack([one[name] for one in found]).cpu() for name in ("language", "index", "norm")}
    return told | {name: tensor.to("cpu", copy=True) for name, tensor in trainer.weights().items()}


def ways(out: Path) -> dict[str, dict[str, Any]]:
    """Other trainings than the usual one: of the indexers alone, and in bfloat16 by AdamW."""
    indexers = {"train": "indexers", "dense": 1.0, "sparse": 0.0, "start": out / "fsdp" / "model"}
    return {"indexers": {**indexers, "steps": 2}, "bfloat16": {"dtype": "bfloat16", "optimiser": "adamw", "steps": 2}}


def held(trainer: Pretrainer) -> list[int]:
    """Numbers this process holds: of weights, of optimiser states."""
    states = [value for o in trainer.optimisers for state in o.state.values() for value in state.values()]
    return [sum(local(x).numel() for x in tensors) for tensors in (trainer.model.parameters(), states)]


def interrupt(run: PretrainRun) -> None:
    """Run to the first evaluation, which is not made."""

    def stop() -> None:
        raise KeyboardInterrupt

    run._evaluate = stop  # type: ignore[method-assign]
    try:
        run.run()
    except KeyboardInterrupt:
        return
    raise AssertionError("it ran to its end")


def main(out: Path, shard: Shard) -> None:
    """What test_pretrain_fsdp.py looks at, into OUT_FOLDER/RANK.pt."""

    device = own_device(shard, "auto") if torch.cuda.is_available() else "cpu"
    common: dict[str, Any] = {"shape": SHAPE, "shard": shard, "device": device}

    def run(name: str, parallel: str = "fsdp", every: int = EVALUATE) -> PretrainRun:
        schedule = PretrainSchedule(**SCHEDULE, checkpoint_every=every)
        return tiny_pretrain.run(out / name, schedule=schedule, parallel=parallel, steps=STEPS, **common)

    run("fsdp").run()
    interrupt(run("parts", every=1))
    try:
        run("parts", "ddp").run()
    except ValueError as error:
        refusal = str(error)
    parts = run("parts")
    parts.run()
    found = {"held": held(parts.trainer), "refusal": refusal, "weights": parts.trainer.weights()}
    trainers = {name: {"parallel": "fsdp", **changes} for name, changes in ways(out).items()}
    trainers["ddp"] = {"parallel": "ddp", "steps": STEPS}
    for name, changes in trainers.items():
        found[name] = curve(tiny_pretrain.trainer(**common, **changes))
    torch.save(found, out / f"{shard.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), launched())
