"""Tiny random models, one per family of attention, saved as real checkpoints (safetensors and tokenizer).

Their weights are large enough that attention is far from uniform, and no bias, norm or sink is left at its neutral
value, so whatever is forgotten shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 300
CONTEXT = 256
WINDOW = 24  # of the sliding layers
SLIDING, FULL = "sliding_attention", "full_attention"

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_GQA = {**_SHARED, "num_key_value_heads": 2, "head_dim": 8}
_GEMMA = {**_GQA, "query_pre_attn_scalar": 12, "sliding_window": WINDOW, "tie_word_embeddings": True}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _GQA,
    "qwen2": {**_SHARED, "num_key_value_heads": 2},
    "qwen3": _GQA,
    "mistral": {**_GQA, "sliding_window": WINDOW},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "num_hidden_layers": 4},
    "gemma3_text": {**_GEMMA, "num_hidden_layers": 6, "layer_types": [*[SLIDING] * 5, FULL]},
    "gpt_oss": {
        **_GQA,
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, FULL] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gpt_neox": {**_SHARED, "rotary_pct": 0.5},
    "opt": {**_SHARED, "word_embed_proj_dim": 48, "ffn_dim": 64},
}
FAMILIES = tuple(CONFIGS)
EAGER_ONLY = ("gemma2", "gpt_oss")  # soft-cap and sinks: transformers' sdpa has neither
CASES = [(f, a) for f in FAMILIES for a in ("eager", "sdpa") if a == "eager" or f not in EAGER_ONLY]

TOPK = 6  # of the families with an indexer of their own
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
_MOE = {
    **_SHARED,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "index_topk": TOPK,
    "index_n_heads": 4,
    "index_head_dim": 16,
}
_DSA = {
    **_MOE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}
_CSA, _HCA = "compressed_sparse_attention", "heavily_compressed_attention"
NATIVE_CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {
        **_DSA,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0, **_YARN},
    },
    "glm_moe_dsa": {**_DSA, "indexer_types": ["full", "shared", "full", "shared"]},
    "deepseek_v4": {
        **_MOE,
        "num_hidden_layers": 5,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "sliding_window": 9,
        "layer_types": [SLIDING, _CSA, _HCA, _CSA, _CSA],
        "compress_rates": {_CSA: 4, _HCA: 8},
        "mlp_layer_types": ["hash_moe", *["moe"] * 4],
        "o_groups": 2,
        "o_lora_rank": 8,
        "hc_mult": 2,
        "rope_parameters": {"rope_type": "yarn", **_YARN},
    },
}
NATIVE_FAMILIES = tuple(NATIVE_CONFIGS)
_ALL = {**CONFIGS, **NATIVE_CONFIGS}


def windows(family: str) -> dict[int, int | None]:
    """Layer -> sliding window, as the configurations above say."""
    config = CONFIGS[family]
    layers = range(config["num_hidden_layers"])
    if family == "mistral":
        return dict.fromkeys(layers, config["sliding_window"])
    kinds = {"gemma2": [SLIDING, FULL] * 2}.get(family, config.get("layer_types", [FULL] * len(layers)))
    return {i: WINDOW if kinds[i] == SLIDING else None for i in layers}


def build(family: str, **changes: Any) -> Any:
    """A model of `family` in memory, the same on every call; `changes` are fields of its config."""
    config = AutoConfig.for_model(family, **{**_ALL[family], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(list(_ALL).index(family))
        return randomise(AutoModelForCausalLM.from_config(config, dtype=torch.float32)).eval()


@torch.no_grad()
def randomise(model: nn.Module) -> nn.Module:
    """Normal weights instead of the small ones of training's start; norms around their neutral value, too."""
    for name, weight in model.named_parameters():
        neutral = weight if weight.ndim == 1 else torch.zeros_like(weight)
        weight.copy_(neutral + torch.randn_like(weight) * (1.0 if "sinks" in name else 0.2))
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """A checkpoint as `save_pretrained` writes it, with a tokenizer."""
    model.save_pretrained(folder, **options)
    tiny_tokenizer(VOCAB).save_pretrained(folder)
    return folder


def make(family: str, folder: Path, **changes: Any) -> Path:
    """A checkpoint of `family` in `folder`."""
    return save(build(family, **changes), folder)


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids int64 [1, length]."""
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def write_gguf(path: Path) -> Any:
    """A GGUF file of the tiny qwen2 (its GGUF names need no permutation of q and k); gives the model it holds."""
    import gguf

    model, tokenizer = build("qwen2"), tiny_tokenizer(VOCAB)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, model.config.num_hidden_layers)
    vocabulary = [word for word, _ in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])]
    vocabulary += [f"<unused{i}>" for i in range(len(vocabulary), VOCAB)]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]

    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(model.config.hidden_size)
    writer.add_block_count(model.config.num_hidden_layers)
    writer.add_feed_forward_length(model.config.intermediate_size)
    writer.add_head_count(model.config.num_attention_heads)
    writer.add_head_count_kv(model.config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in model.state_dict().items():
        stem, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
