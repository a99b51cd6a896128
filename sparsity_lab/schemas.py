"""The schema of every configuration, one dataclass a group option. Values and comments are in conf/.

Fields typed Any accept one value or a list: a list makes one job a grid.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class CandidateConfig:
    source_layer: Any = None
    topk_blocks: Any = None
    block_size: Any = None


@dataclass
class AppliedConfig:
    scorer: Any = MISSING
    compress_ratio: int = MISSING
    topk: int = MISSING
    window: int = MISSING
    share: str = MISSING
    exclude_window: bool = MISSING
    sinks: int = MISSING
    index_source_layers: list[int] | None = MISSING
    candidate: CandidateConfig = field(default_factory=CandidateConfig)
    layers: Any = MISSING
    dense_layers: int = MISSING


@dataclass
class SmolLM2Model:
    name: str = MISSING
    dtype: str = MISSING
    device: str = MISSING
    attn_implementation: str | None = None
    attention: str = MISSING
    applied: AppliedConfig = field(default_factory=AppliedConfig)


@dataclass
class HFModelConfig(SmolLM2Model):
    path: str = MISSING
    gguf_file: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False


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
class LearnedScorer(Baseline):
    weights: str = MISSING


@dataclass
class LightningScorer(IndexerOptions, WeightedScorer):  # fields in the order of the bases from the right
    pass


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
class RetrievalConfig:
    tasks: list[str] = MISSING
    lengths: list[int] | None = MISSING
    depths: list[float] = MISSING
    documents: int | None = MISSING
    informative: float = MISSING


@dataclass
class HarnessConfig:
    tasks: list[str] = MISSING
    limit: int | None = MISSING
    include_path: str | None = MISSING


@dataclass
class EvaluationConfig:
    layers: Any = MISSING
    dense_layers: int = MISSING
    perplexity: bool = MISSING
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    harness: HarnessConfig = field(default_factory=HarnessConfig)


@dataclass
class EvaluateConfig(RecallConfig):
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


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
class AblationConfig:
    compress_ratio: int = MISSING
    topk: list[int] = MISSING
    pool_positions: list[int] = MISSING
    block_sizes: list[int] = MISSING
    share: str = MISSING
    window: int = MISSING
    exclude_window: bool = MISSING
    sinks: int = MISSING
    joint_pools: list[list[int]] = MISSING


@dataclass
class AttributionConfig:
    source_layer: int | None = MISSING
    topk_blocks: int | None = MISSING
    block_size: int | None = MISSING
    index_source_layers: list[int] | None = MISSING


@dataclass
class AblateMeasureConfig:
    rows: int | None = MISSING
    seed: int = MISSING
    layers: list[int] | None = MISSING
    checks: bool = MISSING
    row_tile: int | None = MISSING


@dataclass
class AblateSourceConfig:
    model: Any = MISSING
    data: Any = MISSING
    scorer: Any = MISSING
    selection: Any = None
    ablation: AblationConfig = field(default_factory=AblationConfig)
    attribution: AttributionConfig = field(default_factory=AttributionConfig)
    measure: AblateMeasureConfig = field(default_factory=AblateMeasureConfig)
    results_dir: str = MISSING
    experiment_name: str = MISSING
    name: str = MISSING
    dry_run: bool = MISSING


@dataclass
class SourceSearchConfig:
    num_sources: list[int] = MISSING
    topk: list[int] | None = MISSING
    pool_positions: int | None = MISSING
    block_size: int | None = MISSING
    latest_candidate: int | None = MISSING
    context_tokens: int = MISSING


@dataclass
class VerifyConfig:
    skip: int | None = MISSING
    num_documents: int | None = MISSING


@dataclass
class SearchSourcesConfig:
    results: str = MISSING
    search: SourceSearchConfig = field(default_factory=SourceSearchConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    results_dir: str = MISSING
    experiment_name: str = MISSING
    name: str = MISSING


@dataclass
class GpuBench:
    parts: list[str] = MISSING
    kernel_tokens: int = MISSING
    lengths: list[int] = MISSING
    rows: int = MISSING
    all_rows_up_to: int = MISSING
    alternative_tokens: list[int] = MISSING
    one_layer_tokens: int = MISSING


@dataclass
class BenchConfig:
    model: Any = MISSING
    data: Any = MISSING
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    cases: list[str] = MISSING
    lengths: list[int] = MISSING
    jobs: int = MISSING
    repeats: int = MISSING
    device: str = MISSING
    gpu: GpuBench = field(default_factory=GpuBench)
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
    from sparsity_lab.schemas_training import TRAINING

    store = ConfigStore.instance()
    store.store(name="recall_schema", node=RecallConfig)
    store.store(name="evaluate_schema", node=EvaluateConfig)
    store.store(name="ablate_source_schema", node=AblateSourceConfig)
    store.store(name="search_sources_schema", node=SearchSourcesConfig)
    store.store(name="bench_schema", node=BenchConfig)
    store.store(name="bench_v41_schema", node=BenchV41Config)
    for name, node in TRAINING.items():
        store.store(name=name, node=node)
    store.store(name="record_schema", node=RecordConfig)
    groups: dict[str, dict[str, type]] = {
        "model": {
            "smollm2_schema": SmolLM2Model,
            "hf_schema": HFModelConfig,
            "recorded_schema": RecordedModelConfig,
            "deepseek_v41_schema": DeepseekV41ModelConfig,
        },
        "model/applied": {"applied_schema": AppliedConfig},
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
            "learned_schema": LearnedScorer,
        },
        "selection": {"selection_schema": SelectionConfig},
        "measure": {"measure_schema": MeasureConfig},
        "evaluation": {"evaluation_schema": EvaluationConfig},
    }
    for group, schemas in groups.items():
        for name, node in schemas.items():
            store.store(group=group, name=name, node=node)
