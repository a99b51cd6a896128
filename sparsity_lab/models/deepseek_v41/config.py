"""Configuration of the DeepSeek V4.1 text model: the published fields, named sizes, and what must hold of them.

Source: config.json of DeepSeek-V4.1-Flash and its inference code; `SIZES["flash"]` is that model's shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sparsity_lab.quant import QuantFormat, check_format
from sparsity_lab.topology import NativeSelection, Topology, check_pool

ScoringFunc = Literal["softmax", "sigmoid", "sqrtsoftplus"]


@dataclass(frozen=True)
class YarnConfig:
    """YaRN of the layers with compressed keys; it changes frequencies only."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32
    beta_slow: float = 1


@dataclass(frozen=True)
class EngramConfig:
    """Hashed n-gram tables, added to the streams before the attention of `layer_ids`.

    num_embeddings: rows of each layer's table, the sum of its bucket primes; compressed_vocab_size: ids that tokens
    are mapped to before hashing.
    """

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    head_dim: int
    n_heads: int
    max_ngram_size: int
    vocab_size: int
    pad_token_id: int
    compressed_vocab_size: int

    def __post_init__(self) -> None:
        for name in ("layer_ids", "num_embeddings"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True)
class DeepseekV41Config:
    """Shape and conventions of a model; field names are DeepSeek's.

    The three `*_quant` formats are fake-quantised storage of window KV, compressed KV, and index queries and keys;
    "none" switches one off. `allow_small_pool` admits a candidate pool that cannot fill the selection.

    Raises:
        ValueError: with the field that breaks a rule.
    """

    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    qk_rope_head_dim: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layers: tuple[int, ...]
    index_source_layers: tuple[int, ...]
    candidate_source_layer: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    scoring_func: ScoringFunc = "sqrtsoftplus"
    gate_temp: float = 1.0
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-20
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: YarnConfig | None = None
    engram: EngramConfig | None = None
    window_quant: QuantFormat = "fp8_ue8m0"
    kv_quant: QuantFormat = "fp4_e4m3"
    index_quant: QuantFormat = "fp4_ue8m0"
    max_position_embeddings: int = 1 << 20
    allow_small_pool: bool = False

    def __post_init__(self) -> None:
        for name in ("compress_ratios", "kv_source_layers", "index_source_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        topology = self.topology  # checks the layers' roles
        self._check_sizes()
        if self.scoring_func not in get_args(ScoringFunc):
            raise ValueError(f"scoring_func={self.scoring_func!r}: must be one of {get_args(ScoringFunc)}")
        check_format(self.window_quant, self.head_dim, "window_quant", "head_dim")
        check_format(self.kv_quant, self.head_dim, "kv_quant", "head_dim")
        check_format(self.index_quant, self.index_head_dim, "index_quant", "index_head_dim")
        tables = self.engram.layer_ids if self.engram else ()
        if any(not 0 <= layer < self.num_hidden_layers for layer in tables):
            raise ValueError(
                f"engram_layer_ids={list(tables)}: must lie within the model's layers 0 to {self.num_hidden_layers - 1}"
            )
        source = topology.candidate_source_layer
        if source is not None:
            if not self.allow_small_pool:
                check_pool(self.index_topk, self.candidate_topk_blocks, self.candidate_block_size)
            self._check_shared_keys(topology, source)

    @property
    def topology(self) -> Topology:
        return Topology(
            self.compress_ratios, self.kv_source_layers, self.index_source_layers, self.candidate_source_layer
        )

    @property
    def num_hidden_layers(self) -> int:
        return len(self.compress_ratios)

    @property
    def native_selection(self) -> NativeSelection:
        pooled = self.candidate_source_layer is not None
        return NativeSelection(
            self.topology,
            self.index_topk,
            self.sliding_window,
            compressed=True,
            topk_blocks=self.candidate_topk_blocks if pooled else None,
            block_size=self.candidate_block_size if pooled else None,
        )

    def describe(self) -> dict[str, Any]:
        """All fields as plain values; `from_dict` takes them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], **changes: Any) -> DeepseekV41Config:
        """From a config.json, published or written by this toolkit; fields that do not matter here are passed over.

        Raises:
            ValueError: fields that are needed and not there, or a model this code does not compute.
        """
        given = dict(fields.get("text_config") or fields)
        given |= {new: given[old] for old, new in _PUBLISHED_NAMES.items() if old in given}
        layers = given.get("num_hidden_layers")
        if layers is not None and "compress_ratios" in given:
            if layers > len(given["compress_ratios"]):
                raise ValueError(
                    f"num_hidden_layers={layers}: compress_ratios has {len(given['compress_ratios'])} entries"
                )
            given["compress_ratios"] = given["compress_ratios"][:layers]  # draft layers follow in published files
        if given.get("candidate_source_layer") == -1:
            given["candidate_source_layer"] = None
        _refuse_foreign(given)
        given.setdefault("yarn", _yarn(given))
        given.setdefault("engram", _engram(given))
        for name, kind in (("yarn", YarnConfig), ("engram", EngramConfig)):
            if isinstance(given[name], Mapping):
                given[name] = kind(**given[name])
        known = {field.name: field for field in dataclasses.fields(cls)}
        lacking = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in {**given, **changes}]
        if lacking:
            raise ValueError(f"config of a DeepSeek V4.1 model: {', '.join(lacking)} missing")
        return cls(**{name: value for name, value in given.items() if name in known} | changes)

    def to_published(self) -> dict[str, Any]:
        """A config.json in DeepSeek's names; `from_dict` takes it back."""
        fields = dataclasses.asdict(self)
        for new, old in _PUBLISHED_NAMES.items():
            fields[new] = fields.pop(old)
        if fields["candidate_source_layer_id"] is None:
            fields["candidate_source_layer_id"] = -1
        yarn, engram = fields.pop("yarn"), fields.pop("engram")
        fields["rope_scaling"] = None if yarn is None else {"rope_type": "yarn", **yarn}
        fields |= {f"engram_{name}": value for name, value in (engram or {"layer_ids": []}).items()}
        return {
            "model_type": "deepseek_v41",
            "architectures": ["DeepseekV41ForCausalLM"],
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": 1,
            **fields,
        }

    def _check_sizes(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                if field.name == "n_shared_experts" and value == 0:
                    continue
                raise ValueError(f"{field.name}={value!r}: must be a whole number of at least 1")
        rope = self.qk_rope_head_dim
        if rope % 2 or rope > min(self.head_dim, self.index_head_dim):
            raise ValueError(
                f"qk_rope_head_dim={rope}: must be even and at most head_dim={self.head_dim} and "
                f"index_head_dim={self.index_head_dim}"
            )
        if self.num_attention_heads % self.o_groups:
            raise ValueError(f"o_groups={self.o_groups}: must divide num_attention_heads={self.num_attention_heads}")
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok}: at most n_routed_experts={self.n_routed_experts}"
            )

    @staticmethod
    def _check_shared_keys(topology: Topology, source: int) -> None:
        for layer in topology.index_source_layers:
            if layer > source and topology.kv_source(layer) != topology.kv_source(source):
                raise ValueError(
                    f"candidate_source_layer={source}: its consumer layer {layer} uses the keys of layer "
                    f"{topology.kv_source(layer)}, the pool is made of those of layer {topology.kv_source(source)}"
                )


_PUBLISHED_NAMES = {
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
}


def _refuse_foreign(given: Mapping[str, Any]) -> None:
    """Fields whose other values mean another computation."""
    for name, value in (("num_key_value_heads", 1), ("attention_bias", False), ("hidden_act", "silu")):
        if given.get(name, value) != value:
            raise ValueError(f"{name}={given[name]!r}: a DeepSeek V4.1 model has {value!r}")
    if given.get("tie_word_embeddings"):
        raise ValueError("tie_word_embeddings=True: a DeepSeek V4.1 model has a head of its own")


def _yarn(given: Mapping[str, Any]) -> YarnConfig | None:
    # configurations written by transformers 5 may hold the latter only
    scaling = given.get("rope_scaling") or (given.get("rope_parameters") or {}).get("compress") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"rope_scaling.rope_type={kind!r}: must be yarn, or rope_scaling null")
    names = [field.name for field in dataclasses.fields(YarnConfig)]
    return YarnConfig(**{name: scaling[name] for name in names if name in scaling})


def _engram(given: Mapping[str, Any]) -> EngramConfig | None:
    if not given.get("engram_layer_ids"):
        return None
    values: dict[str, Any] = {f.name: given.get(f"engram_{f.name}") for f in dataclasses.fields(EngramConfig)}
    lacking = [f"engram_{name}" for name, value in values.items() if value is None]
    if lacking:
        raise ValueError(f"config of a DeepSeek V4.1 model with engram tables: {', '.join(lacking)} missing")
    return EngramConfig(**values)


SIZES: dict[str, DeepseekV41Config] = {
    # for tests and first steps: every part of the architecture in 1.2 M parameters
    "tiny": DeepseekV41Config(
        vocab_size=384, hidden_size=64, num_attention_heads=4, head_dim=64, q_lora_rank=32, qk_rope_head_dim=16,
        o_groups=2, o_lora_rank=16, sliding_window=16, compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1),
        kv_source_layers=(2, 4), index_source_layers=(2, 4, 6), candidate_source_layer=4, candidate_topk_blocks=8,
        candidate_block_size=4, index_n_heads=4, index_head_dim=32, index_topk=16, moe_intermediate_size=64,
        n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, max_position_embeddings=65536,
    ),
    # what `model=v41_mini` is: trained, about 7 M parameters, context 4096
    "mini": DeepseekV41Config(
        vocab_size=6144, hidden_size=192, num_attention_heads=4, head_dim=96, q_lora_rank=96, qk_rope_head_dim=32,
        o_groups=2, o_lora_rank=64, sliding_window=64, compress_ratios=(0, 0, *[2] * 2, *[1] * 5),
        kv_source_layers=(2, 4), index_source_layers=(2, 4, 6, 8), candidate_source_layer=4,
        candidate_topk_blocks=128, candidate_block_size=8, index_n_heads=12, index_head_dim=64, index_topk=128,
        moe_intermediate_size=64, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
        max_position_embeddings=4096,
    ),
    # about 200 M parameters, for timing on a CPU
    "mid": DeepseekV41Config(
        vocab_size=8192, hidden_size=512, num_attention_heads=8, head_dim=128, q_lora_rank=192, qk_rope_head_dim=32,
        o_groups=4, o_lora_rank=128, sliding_window=128, compress_ratios=(0, 0, *[2] * 4, *[1] * 6),
        kv_source_layers=(2, 6), index_source_layers=(2, 4, 6, 8, 10), candidate_source_layer=6,
        candidate_topk_blocks=64, candidate_block_size=8, index_n_heads=8, index_head_dim=64, index_topk=128,
        moe_intermediate_size=512, n_routed_experts=18, n_shared_experts=1, num_experts_per_tok=2,
        max_position_embeddings=131072,
    ),
    "flash": DeepseekV41Config(
        vocab_size=129280, hidden_size=5120, num_attention_heads=64, head_dim=512, q_lora_rank=1280,
        qk_rope_head_dim=64, o_groups=8, o_lora_rank=1024, sliding_window=128,
        compress_ratios=(0, 0, *[2] * 18, *[1] * 20), kv_source_layers=(2, 8, 14, 20),
        index_source_layers=(2, 8, 14, 20, 24, 28, 32, 36), candidate_source_layer=20, candidate_topk_blocks=2048,
        candidate_block_size=8, index_n_heads=32, index_head_dim=128, index_topk=512, moe_intermediate_size=2304,
        n_routed_experts=384, n_shared_experts=1, num_experts_per_tok=6,
        yarn=YarnConfig(factor=16, original_max_position_embeddings=65536),
    ),
}  # fmt: skip
