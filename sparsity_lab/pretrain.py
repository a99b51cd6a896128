"""Pretraining DeepSeek V4.1 models of any size: one step of training, the held-out figures, and all of the state.

Weights are kept in float32; each forward uses copies in the recipe's dtype, as the model stores them when it is served
(mixing coefficients, sinks and router biases stay float32). Experts are balanced without an auxiliary loss, by moving
the router's biases against the load.

Shapes: b sequences, t tokens.
Source: DeepSeek-V3 (arXiv 2412.19437) for the balancing; `pretrain_attention` for the indexers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sparsity_lab import pretrain_optim, pretrain_shard
from sparsity_lab.models.deepseek_v41 import DeepseekV41Config, DeepseekV41Model
from sparsity_lab.models.deepseek_v41.model import Block
from sparsity_lab.models.deepseek_v41.parallel import Shard
from sparsity_lab.pretrain_attention import Stage, TrainingCall
from sparsity_lab.pretrain_data import IGNORE, Batches
from sparsity_lab.pretrain_fast import Function, choose
from sparsity_lab.pretrain_model import first_model
from sparsity_lab.pretrain_recipe import PretrainRecipe

KEPT = ("_fn", "_base", "_scale", "attn_sink", "gate.bias", "gate.bias_vl")  # float32 in every forward


class Forward(nn.Module):
    """Inputs and targets in, losses out; what torchrun's processes wrap to average their gradients."""

    def __init__(self, model: DeepseekV41Model, recipe: PretrainRecipe, weigh: Function) -> None:
        super().__init__()
        self.inner = _Inner(model, recipe, weigh)
        kind = getattr(torch, recipe.dtype)
        self.cast = {
            name: kind for name, p in self.inner.named_parameters() if not name.endswith(KEPT) and p.dtype != kind
        }

    def shard(self, device: torch.device) -> None:
        """Cut the weights over the processes; what is gathered of them then comes in the recipe's dtype."""
        kept = [p for name, p in self.inner.named_parameters() if name.endswith(KEPT)]
        recipe, blocks = self.inner.recipe, self.inner.model.model.layers
        pretrain_shard.shard(
            self.inner, blocks, kept, device=device, dtype=getattr(torch, recipe.dtype),
            # frozen blocks have no backward of their own that would gather them again
            gathers_twice=not recipe.frozen,
        )  # fmt: skip
        self.cast = {}

    def forward(
        self, inputs: Tensor, targets: Tensor, counted: Tensor, stage: Stage, phase: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss to minimise, and its parts: of the language [] (the sum over `counted` tokens), of each index source
        [sources]."""
        nll, index, _ = self.detailed(inputs, targets, stage, phase)
        language = nll.sum() / counted.clamp_min(1)
        return language + index.sum(), language.detach(), index.detach()

    def detailed(
        self, inputs: Tensor, targets: Tensor, stage: Stage, phase: int = 0
    ) -> tuple[Tensor, Tensor, TrainingCall]:
        """Negative log-likelihood of each token, float32 [b·t] (0 where ignored), the loss of each index source
        [sources], and what the layers left behind."""
        cast = {name: self.inner.get_parameter(name).to(kind) for name, kind in self.cast.items()}
        found: tuple[Tensor, Tensor, TrainingCall] = torch.func.functional_call(
            self.inner, cast, (inputs, targets, stage, phase)
        )
        return found


class _Inner(nn.Module):
    def __init__(self, model: DeepseekV41Model, recipe: PretrainRecipe, weigh: Function) -> None:
        super().__init__()
        self.model, self.recipe, self.weigh = model, recipe, weigh

    def forward(self, inputs: Tensor, targets: Tensor, stage: Stage, phase: int) -> tuple[Tensor, Tensor, TrainingCall]:
        recipe, model = self.recipe, self.model
        call = TrainingCall.over(
            model, inputs.shape[1], stage=stage, tile=recipe.tile, stride=recipe.stride, phase=phase, weigh=self.weigh
        )
        if recipe.sharded:
            call = cast(TrainingCall, pretrain_shard.Opaque(call))
        logits = F.linear(model.run(inputs, call), model.lm_head.weight).float()
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
        return nll, torch.stack(list(call.index_losses().values()) or [nll.new_zeros(())]), call


class Pretrainer:
    """A model in training: weights, optimisers, and what one step does.

    Args:
        shard: this process's place among those of torchrun; each has a part of every batch and, by recipe.parallel, a
            whole model or a part of it.
        start: folder of a checkpoint to start from; None = random weights.
    Raises:
        ValueError: a model that this code does not train, or a recipe that does not fit it.
    """

    def __init__(
        self,
        config: DeepseekV41Config,
        recipe: PretrainRecipe,
        device: torch.device,
        shard: Shard | None = None,
        start: Path | None = None,
    ) -> None:
        if config.engram is not None:
            raise ValueError("model.engram: a model with n-gram tables cannot be trained here")
        if recipe.frozen and start is None:
            raise ValueError("recipe.train=indexers: needs a trained model in model.path (or model=v41_mini)")
        if recipe.sharded and (shard or Shard()).world == 1:
            raise ValueError("recipe.parallel=fsdp: shards a model over the processes of torchrun; there is only one")
        if recipe.length > config.max_position_embeddings:
            raise ValueError(
                f"recipe.length={recipe.length}: the model takes at most {config.max_position_embeddings} tokens"
            )
        self.config, self.recipe, self.device, self.shard = config, recipe, device, shard or Shard()
        self.start = start
        self.notes: list[str] = []  # what was chosen because something did not work here
        self.parts = choose(config, recipe, device, max(1, recipe.sequences // self.shard.world), self.notes)
        self.reset()

    def reset(self) -> None:
        """Go back to the beginning."""
        recipe = self.recipe
        built_on = torch.device("cpu") if recipe.sharded else self.device  # which need not hold the whole model
        self.model = first_model(self.config, recipe.seed, built_on, self.start)
        if recipe.frozen:
            for name, p in self.model.named_parameters():
                p.requires_grad_(pretrain_optim.is_indexer(name))
        blocks = cast(list[Block], list(self.model.model.layers))
        for block in blocks:
            block.ffn.experts.every = recipe.every_expert
            block.ffn.experts.every_expert = self.parts.every_expert
            block.sinkhorn = self.parts.sinkhorn
        self.forward = Forward(self.model, recipe, self.parts.weigh)
        self.step_forward: Any = self.forward
        if recipe.sharded:
            self.forward.shard(self.device)
        elif self.shard.world > 1:
            local = [self.device.index] if self.device.type == "cuda" else None
            self.step_forward = nn.parallel.DistributedDataParallel(self.forward, device_ids=local)
        self.optimisers = pretrain_optim.make(
            self.model, optimiser=recipe.optimiser, lr=recipe.lr, index_lr=recipe.index_lr,
            embed_lr=recipe.embed_lr, mixing_lr=recipe.mixing_lr, weight_decay=recipe.weight_decay,
        )  # fmt: skip
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.apart = [p for name, p in parameters.items() if recipe.sharded and name.endswith(KEPT)]
        self.clipped = [
            [p for name, p in parameters.items() if pretrain_optim.is_indexer(name) == index] for index in (False, True)
        ]
        gates = [block.ffn.gate for block in blocks]
        self.biases = [gate.bias for gate in gates]
        self.loads = torch.zeros(len(gates), self.config.n_routed_experts, device=self.device)
        for layer, gate in enumerate(gates):
            gate.register_forward_hook(partial(self._count, layer))

    def _count(self, layer: int, gate: nn.Module, args: Any, found: tuple[Tensor, Tensor]) -> None:
        experts = torch.arange(self.config.n_routed_experts, device=self.device)
        self.loads[layer] += (found[1].unsqueeze(-1) == experts).sum((0, 1))

    def step(self, batches: Batches, step: int, steps: int) -> dict[str, Tensor]:
        """One optimiser step; losses of it as tensors on the device (nothing waits for them): language [], index
        [sources], imbalance [] (the fullest expert's load relative to the mean, mean over layers), norm []."""
        recipe = self.recipe
        inputs, targets = (x.to(self.device, non_blocking=True) for x in batches.at(step))
        self.loads.zero_()
        self.model.train()
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["peak"] * recipe.rate(step, steps)
            optimiser.zero_grad(set_to_none=True)
        counted = (targets != IGNORE).sum()
        if self.shard.world > 1:
            dist.all_reduce(counted)
            counted = counted / self.shard.world
        loss, language, index = self.step_forward(
            inputs, targets, counted, recipe.stage(step, steps), recipe.phase(step)
        )
        loss.backward()
        pretrain_shard.average(self.apart)
        norms = [pretrain_shard.clip(part, recipe.clip) for part in self.clipped if part]
        for optimiser in self.optimisers:
            optimiser.step()
        if self.shard.world > 1:
            for shared in (self.loads, language, index):
                dist.all_reduce(shared)
            language, index = language / self.shard.world, index / self.shard.world
        if not recipe.frozen:
            self._balance()
        imbalance = (self.loads.amax(-1) / self.loads.mean(-1)).mean()
        return {"language": language, "index": index, "imbalance": imbalance, "norm": norms[0].detach()}

    @torch.no_grad()
    def _balance(self) -> None:
        """Raise the bias of experts below the mean load, lower those above it."""
        towards = torch.sign(self.loads.mean(-1, keepdim=True) - self.loads) * self.recipe.balance
        for bias, move in zip(self.biases, towards, strict=True):
            bias.add_(move)

    @torch.no_grad()
    def evaluate(
        self, inputs: Tensor, targets: Tensor, sizes: Tensor, stages: tuple[Stage, ...], batch: int
    ) -> dict[str, float]:
        """Of held-out sequences [n, t]: `loss_<stage>` (nats a token), `bits_<stage>` (bits a byte) and, where the
        dense stage is among them, `coverage_<layer>` (relative, at the trained k).

        Args:
            sizes: bytes a token, [vocab]; batch: sequences at a time.
        """
        self.model.eval()
        found: dict[str, list[float]] = {}
        size = float(sizes[targets].sum())
        for stage in stages:
            nll, coverage = 0.0, dict[int, list[float]]()
            for some, wanted in zip(inputs.split(batch), targets.split(batch), strict=True):
                losses, _, call = self.forward.detailed(some.to(self.device), wanted.to(self.device), stage)
                nll += float(losses.double().sum())
                if stage == "dense":
                    for layer, share in call.relative_coverage(self.config.index_topk).items():
                        coverage.setdefault(layer, []).append(float(share))
            found[f"loss_{stage}"] = [nll / targets.numel()]
            found[f"bits_{stage}"] = [nll / math.log(2) / size]
            found |= {f"coverage_{layer}": shares for layer, shares in coverage.items()}
        if self.recipe.sharded:
            pretrain_shard.free(self.forward)
        return {name: float(np.mean(values)) for name, values in found.items()}

    def weights(self) -> dict[str, Tensor]:
        """All of them, whole, in the first process; every process has to ask."""
        return pretrain_shard.whole_state(self.model.state_dict(), keep=self.shard.rank == 0)

    def state(self) -> dict[str, Any]:
        """Everything a later `load_state` needs to go on as if nothing had happened, in the first process; every
        process has to ask."""
        keep = self.shard.rank == 0
        return {
            "weights": self.weights(),
            "optimisers": [pretrain_shard.optimiser_state(optimiser, keep) for optimiser in self.optimisers],
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
        for name, tensor in self.model.state_dict().items():
            pretrain_shard.local(tensor).copy_(pretrain_shard.part(state["weights"][name], tensor))
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            pretrain_shard.load_optimiser(optimiser, saved)
