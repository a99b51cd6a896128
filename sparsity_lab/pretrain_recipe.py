"""How a model is pretrained: the settings that decide its weights, and what follows from them alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from sparsity_lab.pretrain_attention import Stage

TRAINED = ("all", "indexers")
OPTIMISERS = ("muon", "adamw")
PARALLEL = ("ddp", "fsdp")
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class PretrainRecipe:
    """See conf/pretrain.yaml for what each field is; dtype: what a forward computes in.

    Raises:
        ValueError: a value out of range, by its key.
    """

    steps: int | None = None
    seconds: float | None = None
    sequences: int = 8
    length: int = 4096
    train: str = "all"
    optimiser: str = "muon"
    lr: float = 3e-3
    index_lr: float = 1e-3
    embed_lr: float = 1e-2
    mixing_lr: float = 3e-4
    warmup: int = 100
    decay: float = 0.4
    weight_decay: float = 0.05
    clip: float = 1.0
    dense: float = 0.6
    sparse: float = 0.25
    balance: float = 1e-3
    stride: int = 16
    tile: int = 512
    dtype: str = "bfloat16"
    every_expert: bool = True
    fused_sinkhorn: bool = True
    parallel: str = "ddp"
    compile: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ValueError(f"recipe.steps={self.steps}, recipe.seconds={self.seconds}: give one of them")
        least = {"steps": 1, "seconds": 1, "sequences": 1, "length": 2, "warmup": 0, "stride": 1, "tile": 1, "seed": 0}
        least |= {"index_lr": 0, "embed_lr": 0, "mixing_lr": 0, "weight_decay": 0, "balance": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"recipe.{name}={value}: must be at least {low}")
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"recipe.{name}={getattr(self, name)}: must be above 0")
        for name in ("decay", "dense", "sparse"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"recipe.{name}={getattr(self, name)}: must lie between 0 and 1")
        if self.dense + self.sparse > 1:
            raise ValueError(f"recipe.dense={self.dense}, recipe.sparse={self.sparse}: must add up to at most 1")
        if self.tile % self.stride:
            raise ValueError(f"recipe.tile={self.tile}: must be a multiple of recipe.stride={self.stride}")
        choices = {"train": TRAINED, "optimiser": OPTIMISERS, "parallel": PARALLEL, "dtype": DTYPES}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"recipe.{name}={getattr(self, name)!r}: must be one of {', '.join(allowed)}")

    def stage(self, step: int, steps: int) -> Stage:
        """What step `step` of `steps` attends to."""
        if step < round(self.dense * steps):
            return "dense"
        return "sparse" if step < round((self.dense + self.sparse) * steps) else "pool"

    @property
    def frozen(self) -> bool:
        """Whether everything but the indexers stays as it is."""
        return self.train == "indexers"

    @property
    def sharded(self) -> bool:
        """Whether the processes share one model's weights, gradients and optimiser state."""
        return self.parallel == "fsdp"

    def rate(self, step: int, steps: int) -> float:
        """Factor of all peak learning rates: up in `warmup` steps, constant, down to 0 over the last `decay` of all."""
        rise = (step + 1) / self.warmup if step < self.warmup else 1.0
        left = (steps - step) / (self.decay * steps) if self.decay else 1.0
        return min(1.0, rise, left)

    def phase(self, step: int) -> int:
        """The first of a step's rows that indexers are trained on; all come up in turn, far apart."""
        return (step * 7 + 3) % self.stride

    def describe(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return dataclasses.asdict(self)


def compute_dtype(dtype: str, device: torch.device) -> str:
    """Of a forward's copies of the weights: auto is float32 on a CPU, bfloat16 elsewhere."""
    if dtype == "auto":
        return "float32" if device.type == "cpu" else "bfloat16"
    return dtype
