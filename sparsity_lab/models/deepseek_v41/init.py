"""Random weights, the same on every device and however many processes share the model."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from sparsity_lab.models.deepseek_v41.config import DeepseekV41Config
from sparsity_lab.models.deepseek_v41.layout import Slot, build, slots
from sparsity_lab.models.deepseek_v41.model import DeepseekV41Model
from sparsity_lab.models.deepseek_v41.parallel import SINGLE, Shard

INIT_VERSION = 1  # raise it whenever the same seed would give other weights


def random_model(
    config: DeepseekV41Config,
    *,
    seed: int = 0,
    shard: Shard = SINGLE,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> DeepseekV41Model:
    """A model with normal weights scaled by their fan-in; every tensor depends on (seed, its name) alone."""
    model = build(config, shard=shard, device=device, dtype=dtype)
    for slot in slots(model):
        slot.fill(_initial(slot, config, seed), shard)
    return model


def _initial(slot: Slot, config: DeepseekV41Config, seed: int) -> Tensor:
    """The whole stored tensor, float32 on the CPU."""
    name, shape = slot.name, slot.shape
    if name.endswith(("norm.weight", "q_weight", "k_weight", "_scale")):
        return torch.ones(shape)
    if name.endswith("_base"):
        copies = config.hc_mult  # copies begin nearly unmixed
        return torch.cat([torch.zeros(2 * copies), 2 * torch.eye(copies).flatten()])
    if name.endswith(("attn_sink", "gate.bias", "gate.bias_vl")):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    values = torch.randn(shape, generator=generator)
    return values if name.endswith("embed.weight") else values * shape[-1] ** -0.5
