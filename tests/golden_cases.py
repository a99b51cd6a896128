"""Reads the golden vectors in tests/goldens and runs an indexer case; used by the golden tests of every component."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sparsity_lab.index_state import IndexRole, SharedIndexState
from sparsity_lab.indexer import Indexer, index_scores
from sparsity_lab.selection import adjust_scores

OPS = Path(__file__).parent / "goldens" / "ops"
Case = dict[str, Any]


@cache
def _manifest() -> list[Case]:
    return json.loads((OPS / "manifest.json").read_text(encoding="utf-8"))["cases"]


@cache
def _file(name: str) -> dict[str, Tensor]:
    return load_file(OPS / name)


def cases(family: str, informational: bool = False) -> list[Case]:
    """The cases of a family ("indexer" for both indexer families); informational ones only when asked for."""
    found = [c for c in _manifest() if c["family"].startswith(family)]
    return [c for c in found if bool(c.get("informational")) == informational]


def tensors(case: Case) -> dict[str, Tensor]:
    """Copies of the tensors of one case, without the case's prefix."""
    prefix = "" if case["family"].startswith("indexer") else case["name"] + "."
    held = _file(case["file"])
    return {name.removeprefix(prefix): held[name].clone() for name in case["tensors"]}


def make_roles(case: Case) -> list[IndexRole]:
    """The roles of a case's layers: owners as listed, consumers are the layers after the candidate source."""
    args = case["params"]["args"]
    source, roles, owner = args["candidate_source_layer"], [], 0
    for layer, ratio in enumerate(args["compress_ratios"]):
        owner = layer if layer in args["kv_source_layers"] else owner
        candidate = "none" if source < 0 or layer < source else ("source" if layer == source else "consumer")
        roles.append(
            IndexRole(
                layer,
                owner,
                ratio,
                args["index_topk"],
                candidate,
                args["candidate_topk_blocks"],
                args["candidate_block_size"],
            )
        )
    return roles


def make_layers(case: Case, t: dict[str, Tensor]) -> list[Indexer]:
    """V4.1-style indexers with the case's weights."""
    args = case["params"]["args"]
    layers = []
    for role in make_roles(case):
        indexer = Indexer(
            args["dim"],
            args["index_n_heads"],
            args["index_head_dim"],
            args["rope_head_dim"],
            args["q_lora_rank"],
            args["head_dim"] if role.owner == role.layer else None,
            args["norm_eps"],
            rope_layout="adjacent",
            rope_place="last",
        )
        prefix = f"w.L{role.layer}."
        indexer.load_state_dict({k.removeprefix(prefix): v for k, v in t.items() if k.startswith(prefix)})
        layers.append(indexer)
    return layers


def calls(case: Case, t: dict[str, Tensor]) -> Iterator[tuple[Case, IndexRole, Indexer, SharedIndexState, Tensor]]:
    """Run a case call by call; yields (call, role, indexer, state after the call, indices)."""
    roles, layers, state = make_roles(case), make_layers(case, t), SharedIndexState()
    freqs_cis = torch.view_as_complex(t["freqs_cis"])
    for call in case["calls"]:
        name, role = call["call"], roles[call["layer"]]
        indexer = layers[call["layer"]]
        args = (t[f"{name}.x"], t[f"{name}.qr"], t.get(f"{name}.latent"), call["start_pos"], freqs_cis, state, role)
        yield call, role, indexer, state, indexer(*args, offset=call["offset"])


def scores_of_call(
    call: Case, role: IndexRole, indexer: Indexer, state: SharedIndexState, t: dict[str, Tensor]
) -> Tensor:
    """The index scores of a call that has just run, unreachable positions at -inf: [b, s, n]."""
    name, start = call["call"], call["start_pos"]
    positions = torch.arange(start, start + call["seqlen"])
    q = indexer.queries(t[f"{name}.qr"], torch.view_as_complex(t["freqs_cis"])[positions])
    keys = state.keys[role.owner].view()
    assert keys is not None
    return adjust_scores(index_scores(q, keys, indexer.head_weights(t[f"{name}.x"])), positions, role.ratio)


def as_mask(picks: Tensor, offset: int, width: int) -> Tensor:
    """int32 [b, s, k] indices -> bool [b, s, width]."""
    mask = torch.zeros(*picks.shape[:-1], width + 1, dtype=torch.bool, device=picks.device)
    mask.scatter_(-1, torch.where(picks < 0, width, picks.long() - offset), True)
    return mask[..., :width]


def run_indexer(case: Case, t: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor that shared/goldens/check_goldens.py compares; caches padded with zeros to its shapes."""
    out = {}
    with torch.no_grad():
        for call, role, indexer, state, picks in calls(case, t):
            name = call["call"]
            out[f"{name}.idxs"] = picks
            out[f"{name}.selected"] = as_mask(picks, call["offset"], call["width"])
            out[f"{name}.scores"] = scores_of_call(call, role, indexer, state, t)
            if call["publishes_candidates"] and state.pool is not None:
                out[f"{name}.candidates"] = state.pool.mask()
            if f"{name}.k_cache" in t:
                keys = state.keys[role.owner].view()
                assert keys is not None
                padded = torch.zeros_like(t[f"{name}.k_cache"])
                padded[: keys.shape[0], : keys.shape[1]] = keys
                out[f"{name}.k_cache"] = padded
    return out
