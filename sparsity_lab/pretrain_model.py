"""The model of a pretraining: its configuration, its first weights, the copy that is kept, and the work it takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsity_lab.models.deepseek_v41 import DeepseekV41Config, DeepseekV41Model, size_config
from sparsity_lab.models.deepseek_v41.checkpoint import load_checkpoint, located, read_config
from sparsity_lab.models.deepseek_v41.init import random_model
from sparsity_lab.models.deepseek_v41.layout import build
from sparsity_lab.models.deepseek_v41.parallel import SINGLE
from sparsity_lab.pretrain_optim import is_indexer

EMBED_SCALE, HEAD_SCALE = 0.3, 0.5  # of the first weights, relative to those of `random_model`


def starting_folder(settings: Mapping[str, Any]) -> Path | None:
    """Where `model.path` is; None for a model that starts from random weights."""
    return None if settings.get("path") is None else located(settings["path"])


def model_config(settings: Mapping[str, Any], shape: Mapping[str, Any]) -> DeepseekV41Config:
    """The configuration of the model to train: a checkpoint's or a named size's, its storage formats, and fields given
    one by one.

    Raises:
        ValueError: no checkpoint there, or a field that does not exist or fit.
    """
    start = starting_folder(settings)
    fields = (size_config(settings["size"]) if start is None else read_config(start)).describe()
    unknown = sorted(set(shape) - set(fields))
    if unknown:
        raise ValueError(f"shape.{unknown[0]}: no field of a DeepSeek V4.1 model; it has {', '.join(fields)}")
    formats = {name: settings[name] for name in ("window_quant", "kv_quant", "index_quant") if settings[name]}
    return DeepseekV41Config.from_dict({**fields, **formats, **shape})


def first_model(
    config: DeepseekV41Config, seed: int, device: torch.device, start: Path | None = None
) -> DeepseekV41Model:
    """The weights from which training starts: a checkpoint's, or random ones with which sublayers add nothing at first
    and logits are small.

    Args:
        start: folder of the checkpoint; indexers of another shape than its own start anew.
    Raises:
        ValueError: anything else differs in shape.
    """
    if start is not None:
        return _from_checkpoint(config, seed, device, start)
    model = random_model(config, seed=seed, device=device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("wo_b.weight", ".w2", "shared_experts.w2.weight")):
                p.zero_()
        model.model.embed.weight.mul_(EMBED_SCALE)
        model.lm_head.weight.mul_(HEAD_SCALE)
    return model


def _from_checkpoint(config: DeepseekV41Config, seed: int, device: torch.device, start: Path) -> DeepseekV41Model:
    model = random_model(config, seed=seed, device=device)
    found = dict(load_checkpoint(start, device=device).named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in found and found[name].shape == p.shape:
                p.copy_(found[name])
            elif not is_indexer(name):
                have = list(found[name].shape) if name in found else "none"
                raise ValueError(
                    f"shape: {name} would be {list(p.shape)}, in {start} it is {have}; only indexers may differ"
                )
    return model


def in_bfloat16(config: DeepseekV41Config, weights: Mapping[str, Tensor]) -> DeepseekV41Model:
    """A model on the CPU with such weights as they are served; what V4.1 keeps in float32 stays so."""
    model = build(config, shard=SINGLE, device="cpu", dtype=torch.bfloat16)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    return model


def flops_per_token(config: DeepseekV41Config, length: int, *, backward: bool = True) -> float:
    """Of training, forward and backward (a frozen model: forward): matrices that a token really uses, and causal
    attention to everything visible; what is computed beyond that (experts not chosen, the indexers' selection) does not
    count as work done."""
    with torch.device("meta"):
        model = DeepseekV41Model(config)
    used = 0.0
    for name, p in model.named_parameters():
        if p.dim() < 2 or "embed." in name:
            continue
        used += p.numel() * (config.num_experts_per_tok / config.n_routed_experts if ".experts." in name else 1)
    keys = sum(config.sliding_window + (length / 2 / ratio if ratio else 0) for ratio in config.compress_ratios)
    forward = 2 * used + 4 * config.num_attention_heads * config.head_dim * keys
    return forward * (3 if backward else 1)


def peak_flops(device: torch.device) -> float | None:
    """Datasheet bf16 FLOP/s of a known GPU."""
    from sparsity_lab.cost.roofline import load_devices

    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    known = {key: peak for key, peak in load_devices().items() if "measured" not in key}
    return next((d.flops_per_second for key, d in known.items() if key.split("_")[0] in name), None)
