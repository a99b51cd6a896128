"""The model of a pretraining: its configuration, its first weights, the copy that is kept, and the work it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparsity_lab.models.deepseek_v41 import DeepseekV41Config, DeepseekV41Model, size_config
from sparsity_lab.models.deepseek_v41.init import random_model
from sparsity_lab.models.deepseek_v41.layout import build
from sparsity_lab.models.deepseek_v41.parallel import SINGLE

EMBED_SCALE, HEAD_SCALE = 0.3, 0.5  # of the first weights, relative to those of `random_model`


def model_config(settings: Mapping[str, Any], shape: Mapping[str, Any]) -> DeepseekV41Config:
    """The configuration of a new model: a named size, its storage formats, and fields given one by one.

    Raises:
        ValueError: a checkpoint is named, or a field that does not exist or fit.
    """
    if settings.get("path") is not None:
        raise ValueError(f"model.path={settings['path']}: pretraining starts from random weights; leave it out")
    fields = size_config(settings["size"]).describe()
    unknown = sorted(set(shape) - set(fields))
    if unknown:
        raise ValueError(f"shape.{unknown[0]}: no field of a DeepSeek V4.1 model; it has {', '.join(fields)}")
    formats = {name: settings[name] for name in ("window_quant", "kv_quant", "index_quant") if settings[name]}
    return DeepseekV41Config.from_dict({**fields, **formats, **shape})


def first_model(config: DeepseekV41Config, seed: int, device: torch.device) -> DeepseekV41Model:
    """Random weights from which training starts: sublayers add nothing at first, logits are small."""
    model = random_model(config, seed=seed, device=device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("wo_b.weight", ".w2", "shared_experts.w2.weight")):
                p.zero_()
        model.model.embed.weight.mul_(EMBED_SCALE)
        model.lm_head.weight.mul_(HEAD_SCALE)
    return model


def in_bfloat16(model: DeepseekV41Model) -> DeepseekV41Model:
    """A copy on the CPU with weights as they are served; what V4.1 keeps in float32 stays so."""
    copy = build(model.config, shard=SINGLE, device="cpu", dtype=torch.bfloat16)
    kept = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in copy.named_parameters():
            p.copy_(kept[name])
    return copy


def flops_per_token(config: DeepseekV41Config, length: int) -> float:
    """Of training, forward and backward: matrices that a token really uses, and causal attention to everything visible;
    what is computed beyond that (experts not chosen, the indexers' selection) does not count as work done."""
    with torch.device("meta"):
        model = DeepseekV41Model(config)
    used = 0.0
    for name, p in model.named_parameters():
        if p.dim() < 2 or "embed." in name:
            continue
        used += p.numel() * (config.num_experts_per_tok / config.n_routed_experts if ".experts." in name else 1)
    keys = sum(config.sliding_window + (length / 2 / ratio if ratio else 0) for ratio in config.compress_ratios)
    return 6 * used + 12 * config.num_attention_heads * config.head_dim * keys


def peak_flops(device: torch.device) -> float | None:
    """Datasheet bf16 FLOP/s of a known GPU."""
    from sparsity_lab.cost.roofline import load_devices

    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    known = {key: peak for key, peak in load_devices().items() if "measured" not in key}
    return next((d.flops_per_second for key, d in known.items() if key.split("_")[0] in name), None)
