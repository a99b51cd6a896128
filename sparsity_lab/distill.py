"""Distilling indexers: the model stays frozen, indexers learn to rank positions as its dense attention does.

For every sampled row the loss is KL(D ‖ softmax(I)) over the visible positions: D is the dense mass, normalised over
them, I the index score. In the sparse stage both are taken over the indexer's own top-k only. All index source layers
and ratios are trained in one forward a document, each inside the observer's call for its layer, so no more than one
layer's activations is held (see `Trainer` for `target=served`).

Shapes: R sampled rows, t tokens, n = t // ratio compressed positions.

Source: the warm-up and sparse training stages of the DeepSeek V3.2 report.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from sparsity_lab.activations import LayerActivations, ObservableModel
from sparsity_lab.cells import Cell, Selection
from sparsity_lab.dense import attention_probabilities, default_tile, group_sum
from sparsity_lab.distill_recipe import Recipe
from sparsity_lab.documents import Document, Documents
from sparsity_lab.lightning import IndexerConfig, Lightning, index_freqs, untrained
from sparsity_lab.measurement import measure, measured_layers, sample_rows
from sparsity_lab.selection import adjust_scores, as_mask, order_positions
from sparsity_lab.topology import Topology

BETAS = (0.9, 0.95)


def kl_to_dense(scores: Tensor, mass: Tensor, allowed: Tensor) -> Tensor:
    """KL(D ‖ softmax(I)) over the allowed positions, mean over rows, in nats.

    Args:
        scores: float32 [R, n] index scores; mass: [R, n] dense mass; both are normalised over the allowed positions.
        allowed: bool [R, n], at least one position a row.
    Returns:
        A scalar.
    """
    target = mass.masked_fill(~allowed, 0.0)
    target = target / target.sum(-1, keepdim=True).clamp_min(torch.finfo(target.dtype).tiny)
    # the second fill keeps 0 * -inf, and its gradient, out of the sum
    log_p = scores.masked_fill(~allowed, float("-inf")).log_softmax(-1).masked_fill(~allowed, 0.0)
    return (torch.xlogy(target, target) - target * log_p).sum(-1).mean()


def top_allowed(scores: Tensor, allowed: Tensor, k: int) -> Tensor:
    """bool [R, n]: the k best allowed positions, all of them where there are fewer."""
    return as_mask(order_positions(scores.masked_fill(~allowed, float("-inf")), k), scores.shape[-1])


class _AllSeen(Exception):
    """Ends a forward after the last layer that training needs."""


@dataclass
class _Pending:
    """An index source whose target is still being summed over the layers it serves."""

    x: Tensor  # [1, t, dim]
    mass: Tensor  # float32 [R, t], sum over `layers` layers
    layers: int = 1


class Trainer:
    """Indexers of all index source layers and ratios, their optimiser, and one step of training.

    With `target=served` a source's x and the [R, t] sum of dense masses stay until the last layer it serves has passed.
    Sources serve one stretch of layers each, so there is never more than one of them.

    Raises:
        ValueError: layers that cannot have an indexer; documents too short for the ratios or the window.
    """

    def __init__(self, model: ObservableModel, config: IndexerConfig, recipe: Recipe, length: int) -> None:
        if model.native is not None:
            raise ValueError(f"model={model.name}: has indexers of its own; others are attached to dense models only")
        self.model, self.config, self.recipe, self.length = model, config, recipe, length
        try:
            sources, _ = measured_layers(model, length, recipe.index_source_layers)
        except ValueError as error:
            raise ValueError(str(error).replace("measure.layers", "recipe.index_source_layers")) from error
        self.topologies = {r: Topology.attached(model.num_layers, r, sources) for r in recipe.ratios}
        self.sources = sources
        self.source_of = self._served(sources)
        self.first_row = max(max(recipe.ratios) - 1, recipe.window if recipe.exclude_window else 0)
        if self.first_row >= length:
            raise ValueError(f"data.length={length}: no row sees a position at ratios={list(recipe.ratios)}, {recipe}")
        self.modules = {
            (layer, ratio): untrained(config, model.hidden_size, layer, ratio, recipe.seed).to(model.device)
            for layer in sources
            for ratio in recipe.ratios
        }
        parameters = [p for module in self.modules.values() for p in module.parameters()]
        self.optimiser = torch.optim.AdamW(
            parameters, lr=recipe.lr, betas=BETAS, weight_decay=recipe.weight_decay, fused=model.device.type == "cuda"
        )
        self.freqs = index_freqs(config, length).to(model.device)

    def _served(self, sources: Sequence[int]) -> dict[int, int]:
        """Layer -> the index source whose target it is part of; in order."""
        if self.recipe.target == "own":
            return {layer: layer for layer in sources}
        topology = next(iter(self.topologies.values()))
        layers = measured_layers(self.model, self.length, None)[0]
        found = {layer: topology.index_source(layer) for layer in layers}
        return {layer: source for layer, source in found.items() if source is not None}

    def rows(self, document: str, step: int) -> Tensor:
        """The rows of a document that a step trains on, int64 [≤ recipe.rows] on the CPU."""
        recipe = self.recipe
        rows = sample_rows(self.length, recipe.rows, recipe.seed * 1_000_003 + step, document)
        return rows[rows >= self.first_row]

    def step(self, documents: Sequence[Document], step: int) -> Tensor:
        """One optimiser step; loss float32 [source layers, ratios] of it, on the model's device (nothing waits)."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.learning_rate(step)
        self.optimiser.zero_grad(set_to_none=True)
        losses = [self._document(document, step) for document in documents]
        self.optimiser.step()
        return torch.stack(losses).mean(0)

    def _document(self, document: Document, step: int) -> Tensor:
        """Add a document's gradients; its loss [source layers, ratios]."""
        rows = self.rows(document.id, step).to(self.model.device)
        allowed = {selection.compress_ratio: self._allowed(rows, selection) for selection in self.recipe.selections()}
        sparse = step >= self.recipe.steps - self.recipe.sparse_steps
        last = {source: layer for layer, source in self.source_of.items()}
        losses: list[Tensor] = []
        pending: list[_Pending] = []

        def observe(acts: LayerActivations) -> None:
            source, mass = self.source_of[acts.layer], mean_mass(acts, rows)
            # the model runs in inference mode, whose tensors autograd does not take: copies made outside are ordinary
            with torch.inference_mode(False), torch.enable_grad():
                if acts.layer == source:
                    pending[:] = [_Pending(acts.x.float().clone(), mass.clone())]
                else:
                    pending[0].mass += mass.clone()
                    pending[0].layers += 1
                if acts.layer == last[source]:
                    losses.append(self._layer(source, pending.pop(), rows, allowed, sparse))
            if acts.layer == max(last.values()) and acts.layer < self.model.num_layers - 1:
                raise _AllSeen  # the rest of the forward would be for nothing

        with contextlib.suppress(_AllSeen):
            self.model.observe(document.tokens.unsqueeze(0), observe, list(self.source_of))
        return torch.stack(losses)

    def _layer(self, layer: int, pending: _Pending, rows: Tensor, allowed: dict[int, Tensor], sparse: bool) -> Tensor:
        """Forward and backward of one layer's indexers; loss [ratios]."""
        mass, losses = pending.mass / pending.layers, []
        for ratio, k in zip(self.recipe.ratios, self.recipe.topk, strict=True):
            scores, among = self.scores(layer, ratio, pending.x, rows), allowed[ratio]
            if sparse:
                among = top_allowed(scores.detach(), among, k)
            losses.append(kl_to_dense(scores, group_sum(mass, ratio), among))
        total = torch.stack(losses)
        (total.sum() / self.recipe.accumulate).backward()
        return total.detach()

    def scores(self, layer: int, ratio: int, x: Tensor, rows: Tensor) -> Tensor:
        """Index scores of some rows: x float32 [1, t, dim], rows int64 [R] -> float32 [R, n]."""
        module = self.modules[layer, ratio]
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.recipe.autocast):
            return module.scores(x[:, rows], module.keys(x, self.freqs), self.freqs[rows])[0]

    def _allowed(self, rows: Tensor, selection: Selection) -> Tensor:
        """bool [R, n]: what a selection may take for each row."""
        n = self.length // selection.compress_ratio
        zeros = torch.zeros(len(rows), n, device=rows.device)
        scores = adjust_scores(
            zeros, rows, selection.compress_ratio, window=selection.window, exclude_window=selection.exclude_window
        )
        return scores == 0

    def evaluate(self, documents: Documents, *, rows: int | None, checks: bool = False) -> pd.DataFrame:
        """Held-out figures, a row a layer and ratio: `layer`, `compress_ratio`, `topk` and the metrics of `measure`."""
        names = {f"ratio {s.compress_ratio}": s for s in self.recipe.selections()}
        scorer = InTraining(self.model, self.config, self)
        results = measure(
            self.model, documents, [Cell("lightning", selection) for selection in names.values()],
            scorers={"lightning": scorer}, rows=rows, layers=self.sources, envelope=False, detail_rows=0, checks=checks,
        )  # fmt: skip
        return results.frame(resamples=1)

    def agreement(self, documents: Documents, *, rows: int | None) -> pd.DataFrame:
        """What quantisation changes of the selections: `layer`, `compress_ratio`, `quant_agreement` = |S ∩ S'| / k, S'
        being selected without it; mean over rows that see more than k positions, then over documents."""
        found: list[dict[str, Any]] = []
        for document in documents:
            at = sample_rows(self.length, rows, 0, document.id).to(self.model.device)
            chosen = [(selection, self._allowed(at, selection)) for selection in self.recipe.selections()]

            def observe(acts: LayerActivations, at: Tensor = at, chosen: Any = chosen) -> None:
                for selection, allowed in chosen:
                    ratio, k = selection.compress_ratio, selection.topk
                    indexer = self.modules[acts.layer, ratio].indexer
                    sets = []
                    for quant in (self.config.quant, "none"):
                        indexer.quant = quant
                        sets.append(top_allowed(self.scores(acts.layer, ratio, acts.x.float(), at), allowed, k))
                    indexer.quant = self.config.quant
                    shared = (sets[0] & sets[1])[allowed.sum(-1) > k].sum(-1) / k
                    row = {"layer": acts.layer, "compress_ratio": ratio, "quant_agreement": float(shared.mean())}
                    found.append(row)

            self.model.observe(document.tokens.unsqueeze(0), observe, self.sources)
        return pd.DataFrame(found).groupby(["layer", "compress_ratio"], as_index=False).mean()

    def state(self) -> dict[str, Any]:
        """Everything a later `load_state` needs to go on as if nothing had happened."""
        weights = {f"{layer}.{ratio}": module.state_dict() for (layer, ratio), module in self.modules.items()}
        return {"weights": weights, "optimiser": self.optimiser.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self.load_weights(state["weights"])
        self.optimiser.load_state_dict(state["optimiser"])

    def load_weights(self, weights: dict[str, dict[str, Tensor]]) -> None:
        """Weights only, as `state` names them."""
        for (layer, ratio), module in self.modules.items():
            module.load_state_dict(weights[f"{layer}.{ratio}"])


class InTraining(Lightning):
    """Scorer over the indexers of a trainer as they are now."""

    def __init__(self, model: ObservableModel, config: IndexerConfig, trainer: Trainer) -> None:
        super().__init__(model, config)
        self._modules = trainer.modules

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "in_training": True}


def mean_mass(acts: LayerActivations, rows: Tensor) -> Tensor:
    """M of some rows, float32 [R, t], holding the probabilities of all heads for a few rows at a time only."""
    if acts.compressed is not None:
        raise ValueError(f"layer {acts.layer}: has compressed attention of its own; only dense layers can be distilled")
    tile = default_tile(acts.q.shape[1], acts.k.shape[2])
    return torch.cat([attention_probabilities(acts, part).mean(0) for part in rows.split(tile)])
