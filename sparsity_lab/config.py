"""The configuration schema, and the way from a composed configuration to a `Job`. The only Hydra-aware module beside
the launcher: everything else takes explicit values.

Schemas live in Hydra's ConfigStore, values and comments in conf/. Fields typed Any accept one value or a list: a list
makes one job a grid.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from sparsity_lab.cells import Cell, expand
from sparsity_lab.lightning import IndexerConfig
from sparsity_lab.metrics import METRICS


@dataclass
class SmolLM2Model:
    name: str = MISSING
    dtype: str = MISSING
    device: str = MISSING
    attn_implementation: str | None = None


@dataclass
class HFModelConfig(SmolLM2Model):
    path: str = MISSING
    gguf_file: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    attention: str = MISSING


@dataclass
class DeepseekV41ModelConfig:
    name: str = MISSING
    size: str = MISSING
    path: str | None = None
    seed: int = MISSING
    dtype: str = MISSING
    device: str = MISSING
    attention: str = MISSING
    window_quant: str | None = MISSING
    kv_quant: str | None = MISSING
    index_quant: str | None = MISSING
    engram: bool = MISSING


@dataclass
class RecordedModelConfig:
    name: str = MISSING
    path: str = MISSING
    device: str = MISSING
    kind: str = "recorded"  # what tells a recording from a model: its name is the recorded model's


@dataclass
class ShippedText:
    name: str = MISSING
    num_documents: int = MISSING
    length: int = MISSING
    seed: int = MISSING
    skip: int = 0
    shard: int = 0
    num_shards: int = 1


@dataclass
class FileText(ShippedText):
    path: str = MISSING


@dataclass
class JsonlText(FileText):
    field: str = MISSING


@dataclass
class RecordedText:
    name: str = MISSING
    num_documents: int | None = MISSING
    length: int = MISSING
    shard: int = 0
    num_shards: int = 1
    kind: str = "recorded"


@dataclass
class Baseline:
    name: str = MISSING


@dataclass
class KeyBaseline(Baseline):
    head_reduction: str = MISSING


@dataclass
class IndexerOptions:
    index_n_heads: int = MISSING
    index_head_dim: int = MISSING
    rope_head_dim: int = MISSING
    head_dim: int = MISSING
    q_lora_rank: int | None = None
    rope_theta: float = MISSING
    rope_layout: str = MISSING
    rope_place: str = MISSING
    relu: bool = MISSING
    hadamard: bool = MISSING
    quant: str = MISSING
    key_norm: str = MISSING
    norm_eps: float = MISSING


@dataclass
class WeightedScorer(Baseline):
    weights: str | None = None
    seed: int = 0


@dataclass
class LightningScorer(IndexerOptions, WeightedScorer):  # fields in the order of the bases from the right
    pass


@dataclass
class CandidateConfig:
    source_layer: Any = None
    topk_blocks: Any = None
    block_size: Any = None


@dataclass
class SelectionConfig:
    compress_ratio: Any = MISSING
    topk: Any = MISSING
    window: Any = MISSING
    share: Any = MISSING
    exclude_window: Any = MISSING
    sinks: Any = MISSING
    index_source_layers: Any = None
    candidate: CandidateConfig = field(default_factory=CandidateConfig)
    zipped: Any = None


@dataclass
class MeasureConfig:
    rows: int | None = MISSING
    detail_rows: int = MISSING
    seed: int = MISSING
    layers: list[int] | None = MISSING
    envelope: bool = MISSING
    checks: bool = MISSING
    row_tile: int | None = MISSING


@dataclass
class RecallConfig:
    model: Any = MISSING
    data: Any = MISSING
    scorer: Any = MISSING
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    results_dir: str = MISSING
    experiment_name: str = MISSING
    name: str = MISSING
    objective: str = MISSING
    dry_run: bool = MISSING


@dataclass
class RecordOptions:
    folder: str = MISSING
    layers: list[int] | None = MISSING
    rows: int | None = MISSING
    seed: int = MISSING
    values: bool = MISSING
    inputs: bool = MISSING


@dataclass
class RecordConfig:
    model: Any = MISSING
    data: Any = MISSING
    record: RecordOptions = field(default_factory=RecordOptions)
    dry_run: bool = MISSING


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
class BenchConfig:
    model: Any = MISSING
    data: Any = MISSING
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    cases: list[str] = MISSING
    lengths: list[int] = MISSING
    jobs: int = MISSING
    repeats: int = MISSING
    record: str | None = None


@dataclass
class BenchV41Config:
    size: str = MISSING
    length: int = MISSING
    repeats: int = MISSING
    seed: int = MISSING
    record: str | None = MISSING


def register() -> None:
    """Put the schemas into Hydra's ConfigStore; every option in conf/ names its own in its defaults list."""
    store = ConfigStore.instance()
    store.store(name="recall_schema", node=RecallConfig)
    store.store(name="bench_schema", node=BenchConfig)
    store.store(name="bench_v41_schema", node=BenchV41Config)
    store.store(name="distill_schema", node=DistillConfig)
    store.store(name="record_schema", node=RecordConfig)
    groups: dict[str, dict[str, type]] = {
        "model": {
            "smollm2_schema": SmolLM2Model,
            "hf_schema": HFModelConfig,
            "recorded_schema": RecordedModelConfig,
            "deepseek_v41_schema": DeepseekV41ModelConfig,
        },
        "data": {
            "shipped_schema": ShippedText,
            "file_schema": FileText,
            "jsonl_schema": JsonlText,
            "recorded_schema": RecordedText,
        },
        "scorer": {
            "baseline_schema": Baseline,
            "key_baseline_schema": KeyBaseline,
            "lightning_schema": LightningScorer,
        },
        "selection": {"selection_schema": SelectionConfig},
        "measure": {"measure_schema": MeasureConfig},
    }
    for group, schemas in groups.items():
        for name, node in schemas.items():
            store.store(group=group, name=name, node=node)


def _basename(path: str) -> str:
    """Last part of a hub name or path, without .gguf: `Qwen/Qwen2.5-0.5B` is Qwen2.5-0.5B."""
    return Path(path).expanduser().resolve().name.removesuffix(".gguf")


def _recorded(what: str, *, _root_: DictConfig) -> Any:
    """`${recorded:model}`, `:data` and `:length` of the recording at model.path, so that its results go by the names of
    live ones. Where it cannot be read there are stand-ins: the job fails a moment later and says why."""
    from sparsity_lab.models.recorded import RecordingError, read_recording

    path = OmegaConf.select(_root_, "model.path")
    try:
        manifest = read_recording(path) if path else None
    except RecordingError:
        manifest = None
    if manifest is None:
        return 0 if what == "length" else "recorded"
    return manifest["data"]["length"] if what == "length" else manifest[what]["name"]


def _native(what: str, *, _root_: DictConfig) -> Any:
    """`${native:topk}`, `:window` and `:zipped` of the model's own sparse attention, from its configuration alone."""
    from sparsity_lab.models import native_selection
    from sparsity_lab.native import native_cells

    settings: Any = OmegaConf.to_container(_root_.model, resolve=True)
    native = native_selection(settings)
    if native is None:
        raise ValueError(f"selection=native: model {settings['name']} has no sparse attention of its own")
    return native_cells(native) if what == "zipped" else getattr(native, what)


# at import, not in register(): the processes of joblib, submitit and Ray import this module and no entry point
OmegaConf.register_new_resolver("basename", _basename, replace=True)
OmegaConf.register_new_resolver("recorded", _recorded, replace=True)
OmegaConf.register_new_resolver("native", _native, replace=True)


@dataclass(frozen=True)
class Job:
    """One resolved configuration as plain values."""

    config: dict[str, Any]  # the whole resolved configuration
    model: dict[str, Any]
    data: dict[str, Any]
    scorer: dict[str, Any]
    scorer_label: str
    measure: dict[str, Any]
    cells: tuple[Cell, ...]
    failed: tuple[dict[str, Any], ...]
    folder: Path
    objective: str
    dry_run: bool

    @property
    def pass_key(self) -> str:
        """Jobs with the same key share one pass: same model, data, rows and results folder."""
        return json.dumps([self.model, self.data, self.measure, str(self.folder)], sort_keys=True)


def resolve(config: DictConfig) -> dict[str, Any]:
    """A composed configuration as plain values.

    Raises:
        ValueError: missing mandatory values (named), or only one of model and data taken from a recording.
    """
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ValueError(f"{', '.join(missing)}: mandatory, but no value given")
    plain: Any = OmegaConf.to_container(config, resolve=True)
    replayed = {name: plain.get(name, {}).get("kind") == "recorded" for name in ("model", "data")}
    if replayed["model"] and not replayed["data"]:
        raise ValueError("model=recorded: has only the documents that were recorded; add data=recorded")
    if replayed["data"] and not replayed["model"]:
        raise ValueError("data=recorded: takes the documents of a recording; add model=recorded model.path=FOLDER")
    return plain


def read_job(config: DictConfig) -> Job:
    """Check a composed configuration and turn it into a `Job`.

    Raises:
        ValueError: what `resolve` raises, a value out of range, or no valid cell at all.
    """
    values = resolve(config)
    if values["objective"] not in METRICS:
        raise ValueError(f"objective={values['objective']}: must be one of {', '.join(METRICS)}")
    for key in ("experiment_name", "name"):
        if not values[key].strip("./"):
            raise ValueError(f"{key}={values[key]!r}: must name a folder of its own below results_dir")
    selection = dict(values["selection"])
    pool = selection.pop("candidate")
    if any(value is not None for value in pool.values()):
        selection["candidate"] = _pools(pool)
    label = scorer_label(values["scorer"])
    cells, failed = expand(label, **selection)
    if not cells:
        raise ValueError(failed[0]["reason"])
    return Job(
        config=values,
        model=values["model"],
        data=values["data"],
        scorer=values["scorer"],
        scorer_label=label,
        measure=values["measure"],
        cells=tuple(cells),
        failed=tuple(failed),
        folder=Path(values["results_dir"]) / values["experiment_name"] / values["name"],
        objective=values["objective"],
        dry_run=values["dry_run"],
    )


def _pools(pool: dict[str, Any]) -> list[dict[str, Any] | None]:
    """A `source_layer` of null (alone or in a list) means single-level; the other fields then do not matter."""
    sources = pool["source_layer"] if isinstance(pool["source_layer"], list) else [pool["source_layer"]]
    for key, value in pool.items():
        if value is None and (key != "source_layer" or sources == [None]):
            given = {k: v for k, v in pool.items() if v is not None}
            raise ValueError(f"selection.candidate.{key}: needed for a two-level selection, given {given}")
    single: list[dict[str, Any] | None] = [None] if None in sources else []
    return [*single, {**pool, "source_layer": [s for s in sources if s is not None]}]


def scorer_label(scorer: dict[str, Any]) -> str:
    """Name of a scorer in results: its own, and in brackets the options that are not the defaults."""
    defaults: dict[str, Any] = {"head_reduction": "softmax", "weights": None, "seed": 0}
    defaults |= dataclasses.asdict(IndexerConfig())
    changed = [f"{k}={v}" for k, v in scorer.items() if k != "name" and v != defaults.get(k)]
    return scorer["name"] + (f"[{', '.join(changed)}]" if changed else "")
