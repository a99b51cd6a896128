"""Golden V4.1 models loaded through the checkpoint code, and a trace of everything their calls compute.

`run_model` is the adapter function of shared/goldens/check_goldens.py.
"""

import dataclasses
import json
import math
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from golden_cases import as_mask
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparsity_lab.indexer import Indexer, index_scores
from sparsity_lab.models.deepseek_v41 import SIZES, Cache, DeepseekV41Config, DeepseekV41Model
from sparsity_lab.models.deepseek_v41.checkpoint import load_checkpoint
from sparsity_lab.models.deepseek_v41.init import random_model
from sparsity_lab.selection import adjust_scores

MODELS = Path(__file__).parent / "goldens" / "models"
UNQUANTISED = {"window_quant": "none", "kv_quant": "none", "index_quant": "none"}
Trace = dict[str, Tensor]


@cache
def manifest() -> dict[str, dict[str, Any]]:
    """Golden model name -> its entry."""
    models = json.loads((MODELS / "manifest.json").read_text(encoding="utf-8"))["models"]
    return {entry["name"]: entry for entry in models}


NAMES = tuple(manifest())


@cache
def golden_io(name: str) -> dict[str, Tensor]:
    return load_file(MODELS / manifest()[name]["io"])


def golden_weights(name: str) -> dict[str, Tensor]:
    return load_file(MODELS / manifest()[name]["weights"])


@cache
def golden_model(name: str) -> DeepseekV41Model:
    return load_from_folder(manifest()[name]["config"], golden_weights(name))


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """A checkpoint of one file in the unquantised layout."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors")


def load_from_folder(config: dict[str, Any], weights: dict[str, Tensor]) -> DeepseekV41Model:
    # one golden has a pool that cannot always fill the selection
    parsed = DeepseekV41Config.from_dict(config, allow_small_pool=True)
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), config, weights)
        return load_checkpoint(folder, parsed)


def tiny_config(**changes: Any) -> DeepseekV41Config:
    """The tiny size, with few Sinkhorn iterations, which are most of a small call's time."""
    return DeepseekV41Config.from_dict(SIZES["tiny"].describe(), **{"hc_sinkhorn_iters": 3} | changes)


def random_tiny(seed: int = 0, **changes: Any) -> DeepseekV41Model:
    """Random weights, the parameters that are constant at first included."""
    model = random_model(tiny_config(**changes), seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith(("_scale", "_base", "sink", "gate.bias", "q_weight", "k_weight")):
                p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    return model


def prompt(length: int, batch: int = 1, vocab: int = 384, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def run_in_pieces(model: DeepseekV41Model, ids: Tensor, cuts: Iterable[int]) -> tuple[Tensor, Trace, Cache]:
    """Logits, trace and final cache of ids [b, s], cut before each of `cuts` into calls with one cache."""
    held, logits = Cache(), []
    with Tracer(model, ids.shape[0]) as tracer:
        for piece in ids.tensor_split(sorted(cuts), dim=1):
            if piece.shape[1]:
                logits.append(model(piece, held))
    return torch.cat(logits, dim=1), tracer.joined(), held


def run_model(
    config: dict[str, Any], weights: dict[str, Tensor], input_ids: Tensor, first: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The contract of check_goldens.py: `first` tokens in the first call, the rest one by one."""
    logits, trace, held = run_in_pieces(load_from_folder(config, weights), input_ids, range(first, input_ids.shape[1]))
    return logits, trace | cached(held)


def cached(held: Cache) -> dict[str, Tensor]:
    """Compressed KV and index keys by KV source, named as in the io files."""
    entries = {f"compressed_kv.L{i}": keys.view() for i, keys in held.compressed.items()}
    return entries | {f"index_k.L{i}": keys.view() for i, keys in held.index.keys.items()}


class Tracer:
    """Collects what the golden io files hold by forward hooks; the calls' parts are joined along the tokens."""

    def __init__(self, model: DeepseekV41Model, batch: int) -> None:
        self.model, self.batch = model, batch
        self.parts: dict[str, list[Tensor]] = {}
        self.handles: list[Any] = []

    def __enter__(self) -> "Tracer":
        for i, block in enumerate(self.model.model.layers):
            self._hook(block, lambda args, out, i=i: {f"streams.L{i}": out[0][:1], f"pre.L{i}": out[1][:1]})
            self._hook(block.attn, lambda args, out, i=i: {f"attn_out.L{i}": out[:1]})
            self._hook(block.ffn.gate, lambda args, out, i=i: self._routing(i, *out))
            if block.attn.indexer is not None:
                self._hook(
                    block.attn.indexer,
                    lambda args, out, i=i, indexer=block.attn.indexer: _selection(indexer, i, args, out),
                )
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _hook(self, module: torch.nn.Module, collect: Callable[[Any, Any], dict[str, Tensor]]) -> None:
        def hook(module: torch.nn.Module, args: Any, out: Any) -> None:
            for name, tensor in collect(args, out).items():
                self.parts.setdefault(name, []).append(tensor)

        self.handles.append(module.register_forward_hook(hook))

    def _routing(self, layer: int, weights: Tensor, chosen: Tensor) -> dict[str, Tensor]:
        dense = weights.new_zeros(len(weights), self.model.config.n_routed_experts).scatter_(1, chosen, weights)
        shape = (self.batch, -1)
        experts = chosen.sort(dim=-1).values
        return {f"experts.L{layer}": experts.unflatten(0, shape), f"expert_weights.L{layer}": dense.unflatten(0, shape)}

    def joined(self) -> Trace:
        """Name -> [b, s, ...], without the batch axis where only the first sequence is kept."""
        joined = {name: _join(name, parts) for name, parts in self.parts.items()}
        for name in [name for name in joined if name.startswith("candidates")]:
            joined[name] = joined[name][..., : joined[name.replace("candidates", "topk")].shape[-1]]
        return {name: t[0] if name.startswith(("streams", "pre", "attn_out")) else t for name, t in joined.items()}


def _selection(indexer: Indexer, layer: int, args: Any, picks: Tensor) -> dict[str, Tensor]:
    """Of one call of an indexer: scores, -inf where it may not select, top-k and, at its source, the pool."""
    x, qr, _, start, table, state, role = args
    keys = state.keys[role.owner].view()
    if keys is None:
        nothing = x.new_zeros(*x.shape[:2], 0)
        found = {"index_scores": nothing, "topk": nothing.bool()}
        return {f"{name}.L{layer}": t for name, t in found.items()}
    positions = torch.arange(start, start + x.shape[1], device=x.device)
    scores = index_scores(indexer.queries(qr, table[positions]), keys, indexer.head_weights(x))
    scores = scores if indexer.sum_ranks is None else indexer.sum_ranks(scores)
    scores = adjust_scores(scores, positions, role.ratio)
    found = {"topk": as_mask(picks, 0, keys.shape[1])}
    if role.candidate != "none":
        pool = state.pool
        if role.candidate == "consumer":
            scores = scores.masked_fill(~pool.mask(), float("-inf"))
        else:
            # kept blocks are kept whole, also with positions that come in later calls
            whole = -(-pool.width // pool.block_size) * pool.block_size
            found["candidates"] = dataclasses.replace(pool, width=whole).mask()
    return {f"{name}.L{layer}": t for name, t in {**found, "index_scores": scores}.items()}


def _join(name: str, parts: list[Tensor]) -> Tensor:
    """Along the tokens; calls before the last one knew of fewer compressed positions."""
    if name.startswith(("index_scores", "topk", "candidates")):
        width, fill = max(part.shape[-1] for part in parts), -math.inf if name.startswith("index") else False
        parts = [F.pad(part, (0, width - part.shape[-1]), value=fill) for part in parts]
    return torch.cat(parts, dim=1)
