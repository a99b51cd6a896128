"""What a trained V4.1 model can do, for its card: held-out loss sparse against dense, coverage of its own indexers,
repeated random spans, and identifiers copied over more than a thousand tokens, all through the model as it is served.

Shapes: n sequences, t tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsity_lab.activations import LayerActivations
from sparsity_lab.cells import expand
from sparsity_lab.dense import RowTile
from sparsity_lab.documents import Document, Documents, encode
from sparsity_lab.measurement import measure, sample_rows
from sparsity_lab.models.deepseek_v41 import DeepseekV41
from sparsity_lab.models.deepseek_v41.checkpoint import located
from sparsity_lab.native import Native, native_cells
from sparsity_lab.pretrain_data import token_bytes
from sparsity_lab.results import bootstrap_interval

Advance = Callable[[int, int], None]
MODES = {"sparse": False, "dense": True}
_LETTERS = ("b", "d", "f", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z"), ("a", "e", "i", "o", "u")


def read_held_out(path: str, sequences: int | None) -> dict[str, np.ndarray]:
    """Kind -> the first `sequences` of a training's held_out.npz (None: all), [n, t + 1]; "shipped" = of the shipped
    model.

    Raises:
        ValueError: no such file.
    """
    file = located("shipped") / "held_out.npz" if path == "shipped" else Path(path)
    try:
        with np.load(file, allow_pickle=False) as held:
            return {kind: held[kind][:sequences] for kind in held.files}
    except (OSError, ValueError) as error:
        raise ValueError(f"held_out={path}: cannot be read ({error})") from error


@torch.inference_mode()
def losses(model: DeepseekV41, tokens: Tensor, *, dense: bool) -> tuple[Tensor, Tensor]:
    """Of one sequence int64 [t]: negative log-likelihood of each token but the first in nats, and whether it was the
    likeliest, both [t - 1] on the CPU. dense: attend to everything visible instead of what the indexers select."""
    hidden = model.model.hidden(tokens[None, :-1].to(model.device), dense=dense)[0]
    logits = F.linear(hidden.float(), model.model.lm_head.weight.float())
    wanted = tokens[1:].to(model.device)
    return F.cross_entropy(logits, wanted, reduction="none").cpu(), (logits.argmax(-1) == wanted).cpu()


def held_out(model: DeepseekV41, sequences: Mapping[str, np.ndarray], advance: Advance) -> dict[str, Any]:
    """Kind -> bits a byte and nats a token, sparse and dense; `sparse_over_dense`: ratio of losses, all kinds."""
    sizes, found, sums = torch.from_numpy(token_bytes(model.tokenizer)), {}, dict.fromkeys(MODES, 0.0)
    total, done = sum(len(rows) for rows in sequences.values()), 0
    for kind, rows in sequences.items():
        nll, size = dict.fromkeys(MODES, 0.0), 0
        for row in torch.from_numpy(rows.astype(np.int64)):
            size += int(sizes[row[1:]].sum())
            for mode, dense in MODES.items():
                nll[mode] += float(losses(model, row, dense=dense)[0].double().sum())
            done += 1
            advance(done, total)
        tokens = rows.shape[0] * (rows.shape[1] - 1)
        found[kind] = {"sequences": len(rows), "bytes": size} | {
            f"{unit}_{mode}": nll[mode] / scale
            for mode in MODES
            for unit, scale in (("bits_per_byte", math.log(2) * size), ("nats_per_token", tokens))
        }
        sums = {mode: sums[mode] + nll[mode] for mode in MODES}
    return {**found, "sparse_over_dense": sums["sparse"] / sums["dense"]}


def coverage(model: DeepseekV41, sequences: np.ndarray, *, rows: int | None, advance: Advance) -> dict[str, Any]:
    """Layer -> relative coverage of the model's own selection at its own k (within the pool, where it has one)."""
    native = model.native
    assert native is not None
    fields = {"topk": native.topk, "window": native.window, "share": "layer", "exclude_window": False, "sinks": 0}
    cells, failed = expand("native", **fields, compress_ratio=1, zipped=native_cells(native))
    if failed:
        raise ValueError(failed[0]["reason"])
    scorers = {"native": Native(model)}
    results = measure(
        model, _documents(sequences), cells, scorers=scorers, rows=rows, envelope=False, detail_rows=0, progress=advance
    )
    frame = results.frame(resamples=1)
    source = native.topology.candidate_source_layer
    found: dict[str, float] = {}
    for layer in sorted(frame["layer"].unique()):
        part = frame[frame["layer"] == layer]
        pooled = part["candidate_source_layer"].notna()
        inside = part[pooled] if source is not None and pooled.any() and int(layer) > source else part[~pooled]
        found[str(layer)] = float((inside if len(inside) else part)["relative_coverage"].mean())
    return {"layers": found, "mean": float(np.mean(list(found.values()))), "worst": min(found.values())}


def shared_bound(model: DeepseekV41, sequences: np.ndarray, *, rows: int | None, advance: Advance) -> dict[str, Any]:
    """Layer -> relative coverage, at the model's own k, of the best selection for all layers that its index source
    serves together (most of their dense masses' sum), without a pool: what an indexer can reach that knows them."""
    native, documents = model.native, _documents(sequences)
    assert native is not None
    topology, found = native.topology, dict[str, list[float]]()
    for number, document in enumerate(documents):
        some, masses = sample_rows(document.tokens.numel(), rows, 0, document.id).to(model.device), dict[int, Tensor]()

        def keep(acts: LayerActivations, some: Tensor = some, masses: dict[int, Tensor] = masses) -> None:
            tile, ratio = RowTile(acts, some, "", 0), topology.compress_ratios[acts.layer]
            counted = tile.visible(ratio) > native.topk
            masses[acts.layer] = tile.ranked_mass("layer", ratio).masked_fill(tile.hidden(ratio), 0.0)[0, counted]

        model.observe(document.tokens[None], keep, [i for i, ratio in enumerate(topology.compress_ratios) if ratio])
        for source in {topology.index_source(layer) for layer in masses}:
            served = [layer for layer in masses if topology.index_source(layer) == source]
            shared = torch.stack([masses[layer] for layer in served]).sum(0).topk(native.topk).indices
            for layer in served:
                best = masses[layer].topk(native.topk).values.sum(-1)
                share = masses[layer].gather(-1, shared).sum(-1) / best.clamp_min(1e-30)
                found.setdefault(str(layer), []).append(float(share.mean()))
        advance(number + 1, len(documents))
    means = {layer: float(np.mean(found[layer])) for layer in sorted(found, key=int)}
    return {"layers": means, "mean": float(np.mean(list(means.values())))}


def _documents(sequences: np.ndarray) -> Documents:
    inputs = torch.from_numpy(sequences[:, :-1].astype(np.int64))
    return Documents(tuple(Document(i, row, f"held out {i}") for i, row in enumerate(inputs)), {"name": "held_out"})


def induction(model: DeepseekV41, *, distance: int, sequences: int, seed: int, advance: Advance) -> dict[str, Any]:
    """Random tokens that come again after `distance`: loss and accuracy at their first and second coming, sparse and
    dense; `low` and `high`: 95 % interval of the second's accuracy over the sequences."""
    generator, vocab = np.random.default_rng([seed, distance]), model.model.config.vocab_size
    first, second = slice(0, distance - 1), slice(distance + 8, None)  # a few tokens to see that it is a repetition
    found: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
    for number in range(sequences):
        half = generator.integers(1, vocab, size=distance)
        tokens = torch.from_numpy(np.concatenate([half, half]))
        for mode, dense in MODES.items():
            parts = [part[where] for part in losses(model, tokens, dense=dense) for where in (first, second)]
            found[mode].append([float(part.float().mean()) for part in parts])
        advance(number + 1, sequences)
    names = ("nats_first", "nats_second", "accuracy_first", "accuracy_second")
    return {"distance": distance, "sequences": sequences, "chance": 1 / vocab} | {
        mode: _means(dict(zip(names, np.array(rows).T, strict=True)), "accuracy_second") for mode, rows in found.items()
    }


def copying(
    model: DeepseekV41, background: np.ndarray, *, distance: int, count: int, seed: int, advance: Advance
) -> dict[str, Any]:
    """Made-up identifiers that are assigned in code and named again more than `distance` tokens later: share of their
    tokens, after the first, that are predicted, sparse and dense; `control`: the same of one that was never assigned;
    `low` and `high`: 95 % interval of the first over the identifiers."""
    generator = np.random.default_rng([seed, distance])
    known = len(encode(model.tokenizer, "\n    return")) + 1  # the first token of the name is given
    found: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
    for number in range(count):
        name, other = _identifier(generator), _identifier(generator)
        row = background[number % len(background)].astype(np.int64)
        shift = int(generator.integers(0, max(1, len(row) - distance - 200)))
        start = encode(model.tokenizer, f"\n    {name} = compute(values)\n    print( {name})\n")
        control, again = (encode(model.tokenizer, f"\n    return {which}") for which in (other, name))
        between = row[shift + 64 : shift + 64 + distance]
        tokens = torch.from_numpy(np.concatenate([row[shift : shift + 64], start, between, control, again]))
        for mode, dense in MODES.items():
            right = losses(model, tokens, dense=dense)[1].float()
            asked = right[-len(again) :], right[: -len(again)][-len(control) :]
            found[mode].append([float(part[known:].mean()) for part in asked])
        advance(number + 1, count)
    return {"distance": distance, "identifiers": count} | {
        mode: _means(dict(zip(("copied", "control"), np.array(rows).T, strict=True)), "copied")
        for mode, rows in found.items()
    }


def _means(values: Mapping[str, np.ndarray], main: str) -> dict[str, float]:
    """Means, and the interval of one of them (none of a single value)."""
    means: dict[str, float] = {name: float(array.mean()) for name, array in values.items()}
    if len(values[main]) < 2:
        return means
    low, high = bootstrap_interval(values[main])
    return means | {"low": float(low), "high": float(high)}


def _identifier(generator: np.random.Generator) -> str:
    """Six syllables, such as no corpus has: never a token or two."""
    parts = ["".join(str(generator.choice(letters)) for letters in _LETTERS) for _ in range(6)]
    return "".join(parts[:3]) + "_" + "".join(parts[3:])
