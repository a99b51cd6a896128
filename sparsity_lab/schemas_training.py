"""The schemas of what trains: distillation of indexers, pretraining, and a trained model's card. See `schemas`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from sparsity_lab.schemas import IndexerOptions


@dataclass
class DistillData:
    length: int = MISSING
    train: list[Any] = MISSING
    held_out: list[Any] = MISSING


@dataclass
class RecipeConfig:
    ratios: list[int] = MISSING
    topk: list[int] = MISSING
    steps: int = MISSING
    sparse_steps: int = MISSING
    accumulate: int = MISSING
    rows: int | None = MISSING
    lr: float = MISSING
    warmup: int = MISSING
    schedule: str = MISSING
    weight_decay: float = MISSING
    target: str = MISSING
    index_source_layers: list[int] | None = MISSING
    window: int = MISSING
    exclude_window: bool = MISSING
    autocast: bool = MISSING
    seed: int = MISSING


@dataclass
class ScheduleConfig:
    evaluate_every: int = MISSING
    checkpoint_every: int = MISSING
    patience: int | None = MISSING
    held_out_rows: int | None = MISSING
    weights_dtype: str = MISSING


@dataclass
class DistillConfig:
    model: Any = MISSING
    data: DistillData = field(default_factory=DistillData)
    indexer: IndexerOptions = field(default_factory=IndexerOptions)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    results_dir: str = MISSING
    experiment_name: str = MISSING
    name: str = MISSING


@dataclass
class PretrainData:
    stdlib: bool = MISSING
    packages: list[str] | None = MISSING
    files: str | None = MISSING
    max_package_bytes: int = MISSING
    held_out_percent: int = MISSING
    held_out_sequences: int = MISSING
    tokenizer_bytes: int = MISSING
    shares: dict[str, float] = MISSING


@dataclass
class PretrainRecipeConfig:
    steps: int | None = MISSING
    seconds: float | None = MISSING
    sequences: int = MISSING
    length: int = MISSING
    train: str = MISSING
    optimiser: str = MISSING
    lr: float = MISSING
    index_lr: float = MISSING
    embed_lr: float = MISSING
    mixing_lr: float = MISSING
    warmup: int = MISSING
    decay: float = MISSING
    weight_decay: float = MISSING
    clip: float = MISSING
    dense: float = MISSING
    sparse: float = MISSING
    balance: float = MISSING
    stride: int = MISSING
    tile: int = MISSING
    every_expert: bool = MISSING
    fused_sinkhorn: bool = MISSING
    parallel: str = MISSING
    compile: bool = MISSING
    seed: int = MISSING


@dataclass
class PretrainScheduleConfig:
    evaluate_every: int = MISSING
    checkpoint_every: int = MISSING
    held_out_sequences: int = MISSING
    evaluate_batch: int = MISSING


@dataclass
class PretrainConfig:
    model: Any = MISSING
    shape: dict[str, Any] = MISSING
    data: PretrainData = field(default_factory=PretrainData)
    recipe: PretrainRecipeConfig = field(default_factory=PretrainRecipeConfig)
    schedule: PretrainScheduleConfig = field(default_factory=PretrainScheduleConfig)
    preflight: bool = MISSING
    results_dir: str = MISSING
    experiment_name: str = MISSING
    name: str = MISSING


@dataclass
class MiniCardConfig:
    model: Any = MISSING
    held_out: str = MISSING
    sequences: int = MISSING
    rows: int | None = MISSING
    distances: list[int] = MISSING
    repeats: int = MISSING
    identifiers: int = MISSING
    seed: int = MISSING
    record: str | None = MISSING
    training: str | None = MISSING


TRAINING = {"distill_schema": DistillConfig, "pretrain_schema": PretrainConfig, "mini_card_schema": MiniCardConfig}
