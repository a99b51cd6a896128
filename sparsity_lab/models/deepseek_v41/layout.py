"""Which stored tensor fills which part of a model's parameters. Loading, saving and random weights all go by it.

Names are those of the unquantised layout: parameter names, but one `experts.<e>.w1|w2|w3.weight` per routed expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsity_lab.models.deepseek_v41.config import DeepseekV41Config
from sparsity_lab.models.deepseek_v41.engram import NgramHash
from sparsity_lab.models.deepseek_v41.model import DeepseekV41Model
from sparsity_lab.models.deepseek_v41.parallel import Shard

# the axis along which the processes split a parameter; all others are whole everywhere
_SPLIT = {
    "attn.attn_sink": 0,
    "attn.wq_b.weight": 0,
    "attn.wo_a.weight": 0,
    "attn.wo_b.weight": 1,
    "indexer.wq_b.weight": 0,
    "indexer.weights_proj.weight": 0,
    "shared_experts.w1.weight": 0,
    "shared_experts.w2.weight": 1,
    "shared_experts.w3.weight": 0,
}


@dataclass(frozen=True)
class Slot:
    """A stored tensor and the memory it fills."""

    name: str
    shape: tuple[int, ...]  # as stored, whole
    target: Tensor  # a view of a parameter: this process's part
    split: int | None = None  # axis of which `target` is a part

    def fill(self, whole: Tensor, shard: Shard) -> None:
        """Copy the stored tensor, or this process's part of it, into the parameter."""
        part = whole
        if self.split is not None:
            size = self.target.shape[self.split]
            part = whole.narrow(self.split, shard.rank * size, size)
        with torch.no_grad():
            self.target.copy_(part)


def slots(model: DeepseekV41Model) -> Iterator[Slot]:
    """The slots of everything this process holds, in the order of the parameters."""
    for name, parameter in model.named_parameters():
        stem, _, leaf = name.rpartition(".")
        if stem.endswith(".experts"):
            yield from _expert_slots(stem, leaf, parameter, model.shard)
            continue
        split = next((axis for suffix, axis in _SPLIT.items() if name.endswith(suffix)), None)
        if split is None or model.shard.world == 1:
            yield Slot(name, tuple(parameter.shape), parameter.data)
            continue
        shape = list(parameter.shape)
        shape[split] *= model.shard.world
        yield Slot(name, tuple(shape), parameter.data, split)


def _expert_slots(stem: str, leaf: str, parameter: Tensor, shard: Shard) -> Iterator[Slot]:
    for i, matrix in enumerate(parameter.data):
        expert = f"{stem}.{shard.rank * len(parameter) + i}"
        parts = zip(("w1", "w3"), matrix.chunk(2), strict=True) if leaf == "w13" else [("w2", matrix)]
        for part, target in parts:
            yield Slot(f"{expert}.{part}.weight", tuple(target.shape), target)


def build(
    config: DeepseekV41Config,
    *,
    shard: Shard,
    device: torch.device | str,
    dtype: torch.dtype,
    token_map: Tensor | None = None,
) -> DeepseekV41Model:
    """A model whose parameters have memory on `device` but no values yet. What V4.1 keeps in float32 stays so."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = DeepseekV41Model(config, shard)
    finally:
        torch.set_default_dtype(before)
    model = model.to_empty(device=device).eval()
    if config.engram is not None:
        model.hash = NgramHash(config.engram, config.vocab_size, token_map).to(device)
    return model
