"""How indexers are distilled: the settings that `distill.Trainer` follows."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from sparsity_lab.cells import Selection

TARGETS = ("own", "served")
SCHEDULES = ("cosine", "constant")


@dataclass(frozen=True)
class Recipe:
    """How indexers are trained.

    Args:
        ratios: compress ratios trained side by side; topk: positions selected at each of them, for the sparse stage and
            the held-out figures.
        steps: optimiser steps in all; sparse_steps: the last so many use the sparse loss.
        accumulate: documents a step; rows: query rows sampled of each, None = all.
        lr: peak learning rate of AdamW; warmup: steps until it is reached; schedule: cosine (to 0) or constant.
        target: own = the layer's dense mass; served = the mean over the layers that will use its selection.
        index_source_layers: layers that get an indexer; None = every layer.
        window, exclude_window: as in `cells.Selection`; positions that exclude_window leaves out are not in the loss.
        autocast: projections in bfloat16; scores and loss stay in float32.
        seed: of weights, data order and row samples.
    Raises:
        ValueError: a value out of range, by its key.
    """

    ratios: tuple[int, ...] = (1, 2, 4)
    topk: tuple[int, ...] = (64, 32, 16)
    steps: int = 1000
    sparse_steps: int = 0
    accumulate: int = 1
    rows: int | None = 512
    lr: float = 3e-3
    warmup: int = 50
    schedule: str = "cosine"
    weight_decay: float = 0.0
    target: str = "own"
    index_source_layers: tuple[int, ...] | None = None
    window: int = 128
    exclude_window: bool = False
    autocast: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("ratios", "topk", "index_source_layers"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))
        if not self.ratios or len(set(self.ratios)) != len(self.ratios):
            raise ValueError(f"recipe.ratios={list(self.ratios)}: needs at least one ratio, each once")
        if len(self.topk) != len(self.ratios):
            raise ValueError(f"recipe.topk={list(self.topk)}: needs one value for each of ratios={list(self.ratios)}")
        self.selections()  # checks ratios, topk and the window
        least = {"steps": 1, "sparse_steps": 0, "accumulate": 1, "rows": 1, "warmup": 0, "weight_decay": 0, "seed": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"recipe.{name}={value}: must be at least {low}")
        if self.sparse_steps > self.steps:
            raise ValueError(f"recipe.sparse_steps={self.sparse_steps}: must be at most recipe.steps={self.steps}")
        if not self.lr > 0:
            raise ValueError(f"recipe.lr={self.lr}: must be above 0")
        for name, allowed in (("target", TARGETS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"recipe.{name}={getattr(self, name)!r}: must be one of {', '.join(allowed)}")

    def selections(self) -> list[Selection]:
        """What the indexers are trained for, one selection a ratio."""
        return [
            Selection(compress_ratio=ratio, topk=k, window=self.window, exclude_window=self.exclude_window)
            for ratio, k in zip(self.ratios, self.topk, strict=True)
        ]

    def learning_rate(self, step: int) -> float:
        """Of optimiser step `step`, from 0: a linear warm-up times the schedule."""
        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        fall = 0.5 * (1 + math.cos(math.pi * step / self.steps)) if self.schedule == "cosine" else 1.0
        return self.lr * rise * fall

    def describe(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        fields = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
