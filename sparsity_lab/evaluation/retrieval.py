"""Answering retrieval tasks dense and sparse, and tracing where a sparse run lost sight of the needle.

Shapes: h heads, g selection groups, k positions selected, n compressed positions, A answer rows, T needle tokens. Row i
of the answer is the one that predicts its token i: the prompt's last row first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsity_lab.activations import LayerActivations, ObservableModel
from sparsity_lab.cells import Selection
from sparsity_lab.dense import attention_probabilities, per_group
from sparsity_lab.evaluation.needles import EXTRA, Task, score
from sparsity_lab.metrics import raw_start
from sparsity_lab.topology import Topology

SEEN = 0.8  # a miss is the model's own where the selections kept this share of the dense mass on the needle
STAGES = ("found", "pool", "scorer", "reuse", "model")
LOSSES = ("pool", "scorer", "reuse")


@dataclass(frozen=True)
class Answer:
    """What a model generated, and the share of the expected answers in it."""

    text: str
    tokens: Tensor  # int64, without the prompt
    score: float

    def rows(self, task: Task) -> int:
        """Answer rows that the expected answer explains: up to and with the first that goes another way."""
        wanted, got = task.answer_tokens.tolist(), self.tokens.tolist()
        same = 0
        while same < min(len(wanted), len(got)) and wanted[same] == got[same]:
            same += 1
        return min(same + 1, len(wanted))


def answer(model: Any, task: Task) -> Answer:
    """Greedy generation from the task's prompt, by a dense or a sparse model."""
    prompt = task.tokens.unsqueeze(0).to(model.device)
    out = model.generate(prompt, len(task.answer_tokens) + EXTRA)
    tokens = out[0, prompt.shape[1] :].cpu()
    text = model.tokenizer.decode(tokens, skip_special_tokens=True)
    return Answer(text, tokens, score(task.answers, text))


def dense_mass(model: ObservableModel, task: Task, layers: Collection[int]) -> dict[int, Tensor]:
    """Layer -> dense attention of each head from the answer rows to the needle tokens, float32 [h, A, T], while the
    expected answer is read."""
    tokens = torch.cat([task.tokens, task.answer_tokens[:-1]])
    needle = task.needle_tokens().to(model.device)
    rows = torch.arange(len(task.tokens) - 1, len(tokens), device=model.device)
    found: dict[int, Tensor] = {}

    def observe(acts: LayerActivations) -> None:
        found[acts.layer] = attention_probabilities(acts, rows)[..., needle].cpu()

    model.observe(tokens.unsqueeze(0), observe, layers)
    return found


class Trace:
    """Callback of `SparseModel.watch` that notes what each layer could see of the needle at the answer rows."""

    def __init__(self, task: Task, selection: Selection, topology: Topology) -> None:
        self.task, self.selection, self.topology = task, selection, topology
        self.needle = task.needle_tokens()
        self.first = len(task.tokens) - 1
        self._seen: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}  # (layer, answer row) -> bool [g, T] x 3

    def __call__(self, layer: int, rows: Tensor, picks: Tensor, pool: Tensor | None) -> None:
        answer_rows = (rows >= self.first) & (rows < self.first + len(self.task.answer_tokens))
        positions = self.needle // self.selection.compress_ratio
        for i in answer_rows.nonzero().flatten().tolist():
            start = raw_start(rows[i : i + 1].cpu(), self.selection.compress_ratio, self.selection.window)
            picked = (picks[:, i].cpu().unsqueeze(-1) == positions).any(dim=1)
            inside = torch.ones_like(picked) if pool is None else pool[:, i].cpu()[:, positions]
            raw = (self.needle >= start).expand_as(picked)
            self._seen[layer, int(rows[i]) - self.first] = (picked, inside, picked | raw)

    def layers(self, mass: Mapping[int, Tensor], rows: int) -> list[dict[str, Any]]:
        """A dict a layer in which the selection is applied, over the first `rows` answer rows.

        in_pool, in_selection, attended: shares of the needle's tokens. dense_mass: dense attention on the needle, and
        of it pool_lost, scorer_lost and reuse_lost: what was not attended, because the pool did not hold it, because
        the layer did not choose it, or because the layer whose selection it reuses did not.
        """
        kv_heads = max((len(s[0]) for s in self._seen.values()), default=1)
        out = []
        for layer in sorted({layer for layer, _ in self._seen}):
            there = [i for i in range(rows) if (layer, i) in self._seen]
            seen = [self._seen[layer, i] for i in there]
            picked, inside, attended = (torch.stack(parts, dim=1) for parts in zip(*seen, strict=True))
            weight = per_group(mass[layer], self.selection.share, kv_heads).mean(dim=1)[:, there]
            lost = {"pool": ~attended & ~inside, "scorer": ~attended & inside, "reuse": torch.zeros_like(attended)}
            if self.topology.index_source(layer) != layer:
                lost["scorer"], lost["reuse"] = lost["reuse"], lost["scorer"]
            out.append(
                {
                    "layer": layer,
                    "in_pool": float(inside.double().mean()),
                    "in_selection": float(picked.double().mean()),
                    "attended": float(attended.double().mean()),
                    "dense_mass": _mass(weight, torch.ones_like(attended)),
                    **{f"{name}_lost": _mass(weight, where) for name, where in lost.items()},
                }
            )
        return out


def _mass(weight: Tensor, where: Tensor) -> float:
    """Mean over groups and rows of the mass at the needle tokens `where`."""
    return float((weight * where).sum(dim=-1).double().mean())


def kept_mass(layers: list[dict[str, Any]]) -> float | None:
    """Share of the dense mass on the needle that was attended, over all layers; None where there is none. Losses are
    rounded and may add up to a hair more than the whole."""
    total = sum(layer["dense_mass"] for layer in layers)
    lost = sum(layer[f"{name}_lost"] for layer in layers for name in LOSSES)
    return max(0.0, 1 - lost / total) if total else None


def stage(found: float, layers: list[dict[str, Any]]) -> str:
    """Where an answer was lost: `found` if nothing is missing; `model` where the selections kept at least SEEN of the
    dense mass on the needle, over all layers; else the stage that lost most of it."""
    if found == 1:
        return "found"
    lost = {name: sum(layer[f"{name}_lost"] for layer in layers) for name in LOSSES}
    total = sum(layer["dense_mass"] for layer in layers)
    if sum(lost.values()) <= (1 - SEEN) * total:
        return "model"
    return max(lost, key=lambda name: lost[name])
