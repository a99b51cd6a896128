"""Pretraining at its smallest: a model of few layers, made-up text, no tokenizer to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from v41_cases import tiny_config

from sparsity_lab.models.deepseek_v41.parallel import SINGLE, Shard
from sparsity_lab.pretrain import Pretrainer
from sparsity_lab.pretrain_data import END, Batches
from sparsity_lab.pretrain_prepare import Prepared
from sparsity_lab.pretrain_recipe import PretrainRecipe
from sparsity_lab.pretrain_run import PretrainRun, PretrainSchedule

VOCAB, LENGTH = 384, 64
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "compress_ratios": (2, 1, 1), "kv_source_layers": (0, 1), "index_source_layers": (0, 1, 2),
    "candidate_source_layer": 1, "moe_intermediate_size": 32, "hc_mult": 2, "index_topk": 8,
    "max_position_embeddings": 64,
}  # fmt: skip
RECIPE: dict[str, Any] = {
    "steps": 6, "sequences": 2, "length": LENGTH, "warmup": 2, "tile": 64, "stride": 8, "dtype": "float32",
    "dense": 0.34, "sparse": 0.33,
}  # fmt: skip


class ByteTokens:
    """Tokens that have names and nothing else."""

    eos_token_id = 0

    def __len__(self) -> int:
        return VOCAB

    def get_vocab(self) -> dict[str, int]:
        return {END: 0} | {f"a{i}": i for i in range(1, VOCAB)}

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "tokenizer.txt").write_text("none")


def stream(count: int = 4000, seed: int = 0) -> np.ndarray:
    """Tokens that follow each other by a rule, so that there is something to learn."""
    start = np.random.default_rng(seed).integers(1, VOCAB, size=count // 50 + 1)
    return ((start[:, None] + 7 * np.arange(50)) % (VOCAB - 1) + 1).ravel()[:count].astype(np.int32)


def batches(recipe: PretrainRecipe, **changes: Any) -> Batches:
    shares = {"code": 0.5, "prose": 0.25, "repeats": 0.25}
    return Batches({"code": stream(), "prose": stream(seed=1)}, shares, recipe.sequences, LENGTH, VOCAB, **changes)


def trainer(
    shape: dict[str, Any] | None = None,
    start: Path | None = None,
    shard: Shard = SINGLE,
    device: str = "cpu",
    **changes: Any,
) -> Pretrainer:
    config, recipe = tiny_config(**SHAPE, **(shape or {})), PretrainRecipe(**RECIPE | changes)
    return Pretrainer(config, recipe, torch.device(device), shard, start)


def run(folder: Path, progress: Any = lambda *_: None, schedule: Any = None, **changes: Any) -> PretrainRun:
    train = trainer(**changes)
    held = stream(4 * LENGTH + 1, seed=5)
    rows = np.stack([held[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(4)]).astype(np.uint16)
    prepared = Prepared(ByteTokens(), {}, {"code": rows[:2], "prose": rows[2:]}, {"digest": "made up"})
    every = schedule or PretrainSchedule(evaluate_every=2, checkpoint_every=2, held_out_sequences=2, evaluate_batch=2)
    parts = {"rank": train.shard.rank, "world": train.shard.world}
    return PretrainRun(train, batches(train.recipe, **parts), prepared, folder, every, progress=progress)
