"""Mixture of experts: the router, and experts computed by one grouped matrix product.

Shapes: T tokens (batch and sequence flattened), d hidden size, i intermediate size, E experts here, k experts a token.
Source: DeepSeek V4.1's inference code.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsity_lab.models.deepseek_v41.config import DeepseekV41Config, ScoringFunc
from sparsity_lab.models.deepseek_v41.parallel import Shard


def router_scores(logits: Tensor, scoring_func: ScoringFunc) -> Tensor:
    """float32 [..., E], positive."""
    if scoring_func == "softmax":
        return logits.softmax(dim=-1)
    return logits.sigmoid() if scoring_func == "sigmoid" else F.softplus(logits).sqrt()


class Gate(nn.Module):
    """Chooses k experts a token by score plus bias, and weighs them by the score alone, in float32."""

    def __init__(self, config: DeepseekV41Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.n_routed_experts, dtype=torch.float32), requires_grad=False)
        # for image tokens: not used here, kept so that checkpoints survive loading and saving
        self.bias_vl = nn.Parameter(torch.zeros(config.n_routed_experts, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, d] -> weights float32 [T, k], experts int64 [T, k]."""
        c = self.config
        scores = router_scores(F.linear(x.float(), self.weight.float()) / c.gate_temp, c.scoring_func)
        chosen = (scores + self.bias).topk(c.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if c.norm_topk_prob and c.num_experts_per_tok > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * c.routed_scaling_factor, chosen


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(gate) · up of [..., 2·i] in float32, gate clamped from above, up on both sides -> [..., i]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class MLP(nn.Module):
    """The shared expert: w2(swiglu(w1 x, w3 x)), its width split over ranks."""

    def __init__(self, config: DeepseekV41Config, width: int, shard: Shard) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        width = shard.part(width, "moe_intermediate_size")
        self.w1 = nn.Linear(config.hidden_size, width, bias=False)
        self.w2 = nn.Linear(width, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d], a rank's part of the sum."""
        return self.w2(swiglu(torch.cat([self.w1(x), self.w3(x)], dim=-1), self.limit).to(x.dtype))


def every_expert(x: Tensor, weights: Tensor, chosen: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    """x [T, d], weights and chosen [T, k], w13 [E, 2·i, d], w2 [E, d, i] -> [T, d]: every expert as a part of one wide
    MLP, where those not chosen weigh nothing."""
    each = x.new_zeros(len(x), len(w13), dtype=weights.dtype).scatter(1, chosen, weights)
    hidden = swiglu(F.linear(x, w13.flatten(0, 1)).unflatten(-1, (len(w13), -1)), limit)
    hidden = (hidden * each.unsqueeze(-1)).to(x.dtype)
    return F.linear(hidden.flatten(1), w2.transpose(0, 1).flatten(1))


class Experts(nn.Module):
    """Routed experts as stacked matrices: w13 [E, 2·i, d] (gate, then up) and w2 [E, d, i]."""

    def __init__(self, config: DeepseekV41Config, shard: Shard) -> None:
        super().__init__()
        self.count = shard.part(config.n_routed_experts, "n_routed_experts")
        self.first = shard.rank * self.count
        self.limit = config.swiglu_limit
        self.every = False  # compute all experts for all tokens: more work, but no sorting; for training small ones
        self.every_expert = every_expert
        self.w13 = nn.Parameter(torch.empty(self.count, 2 * config.moe_intermediate_size, config.hidden_size))
        self.w2 = nn.Parameter(torch.empty(self.count, config.hidden_size, config.moe_intermediate_size))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [T, d], weights and chosen [T, k] -> [T, d], what the experts of this rank contribute, in x's dtype."""
        if self.every:
            return self.every_expert(x, weights, chosen, self.w13, self.w2, self.limit)
        tokens, k = chosen.shape
        here = (chosen >= self.first) & (chosen < self.first + self.count)
        places = here.flatten().nonzero().squeeze(-1)  # of the [T, k] choices, those of this rank's experts
        local = chosen.flatten()[places] - self.first
        places = places[local.argsort(stable=True)]
        ends = torch.bincount(local, minlength=self.count).cumsum(0)
        hidden = swiglu(grouped_linear(x[places // k], self.w13, ends), self.limit)
        hidden = (hidden * weights.flatten()[places].unsqueeze(-1)).to(x.dtype)
        out = grouped_linear(hidden, self.w2, ends).float()
        # one slot a choice and a sum over slots: unlike an atomic add, the same bits in every run
        slots = out.new_zeros(tokens * k, out.shape[-1]).index_put((places,), out)
        return slots.view(tokens, k, -1).sum(1).to(x.dtype)


class MoE(nn.Module):
    """Router, routed experts and shared expert of one layer."""

    def __init__(self, config: DeepseekV41Config, shard: Shard) -> None:
        super().__init__()
        self.shard = shard
        self.gate = Gate(config)
        self.experts = Experts(config, shard)
        shared = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = MLP(config, shared, shard) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, d] -> [b, s, d]."""
        flat = x.flatten(0, 1)
        out = self.experts(flat, *self.gate(flat))
        if self.shared_experts is not None:
            out = out + self.shared_experts(flat)
        return self.shard.sum(out).view_as(x)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows of x through their expert's matrix: x [N, in] sorted by expert, weight [E, out, in], ends [E] -> [N, out].

    One grouped product where PyTorch has it for the device and dtype, else one product an expert.
    """
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    if aligned and _has_grouped_mm(x.device.type, x.dtype):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends.int())
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.cat([F.linear(part, w) for part, w in zip(x.split(sizes), weight, strict=True)])


@cache
def _has_grouped_mm(device: str, dtype: torch.dtype) -> bool:
    """Tried once: what is supported differs between PyTorch's versions, devices and dtypes."""
    if not hasattr(F, "grouped_mm"):
        return False
    x, w = torch.ones(16, 16, device=device, dtype=dtype), torch.ones(2, 16, 16, device=device, dtype=dtype)
    try:
        out = F.grouped_mm(x, w, offs=torch.tensor([8, 16], dtype=torch.int32, device=device))
    except (RuntimeError, NotImplementedError):
        return False
    return bool((out == 16).all())
