"""Faster ways to compute parts of a training step: a Triton kernel for the mixing coefficients, and torch.compile.

Each is tried once, forward and backward, on made tensors beside the plain function; where it fails or does not agree,
the plain function stays and a note says so. Compiled are functions of tensors alone: a whole block depends on layer,
stage and the rows of a step, and would be compiled anew for each.

Shapes: T tokens of a step, c stream copies, h heads, d hidden size, i intermediate size, E experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsity_lab import kernels
from sparsity_lab.models.deepseek_v41 import DeepseekV41Config
from sparsity_lab.models.deepseek_v41.hyper import sinkhorn
from sparsity_lab.models.deepseek_v41.moe import every_expert
from sparsity_lab.pretrain_attention import weigh
from sparsity_lab.pretrain_recipe import PretrainRecipe

Function = Callable[..., Tensor]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of outputs and gradients, relative to their norm


@dataclass(frozen=True)
class Parts:
    """What computes the functions of these names."""

    sinkhorn: Function = sinkhorn
    weigh: Function = weigh
    every_expert: Function = every_expert


def choose(
    config: DeepseekV41Config, recipe: PretrainRecipe, device: torch.device, sequences: int, notes: list[str]
) -> Parts:
    """The fastest that work here.

    Args:
        sequences: of a step, in this process.
        notes: gets a line for each that does not work.
    """
    parts = Parts()
    if recipe.fused_sinkhorn and kernels.usable(torch.empty(0, device=device)):
        from sparsity_lab.kernels.sinkhorn import sinkhorn as fused

        made = _examples(config, recipe, device, 1)["sinkhorn"]
        parts = replace(parts, sinkhorn=tried("fused Sinkhorn", sinkhorn, fused, made, notes))
    if not recipe.compile:
        return parts
    for name, made in _examples(config, recipe, device, sequences).items():
        plain = getattr(Parts, name)
        if getattr(parts, name) is plain and (name != "every_expert" or recipe.every_expert):
            # the tiles of a sequence differ in width; all else is alike in every step
            fast = compiled(plain, dynamic=name == "weigh")
            parts = replace(parts, **{name: tried(f"compiled {name}", plain, fast, made, notes)})
    return parts


def compiled(plain: Function, dynamic: bool) -> Function:
    """The function by torch.compile in training; evaluations have other shapes and few calls."""
    fast = torch.compile(plain, dynamic=dynamic)
    return lambda *args: fast(*args) if torch.is_grad_enabled() else plain(*args)


def tried(what: str, plain: Function, fast: Function, made: Sequence[Any], notes: list[str]) -> Function:
    """`fast` if it does what `plain` does with such arguments, else `plain` and a note."""
    try:
        wanted, found = (_results(function, made) for function in (plain, fast))
        for want, got in zip(wanted, found, strict=True):
            error, size = (got.float() - want.float()).norm(), want.float().norm()
            if not error <= TOLERANCE[want.dtype] * size:
                raise ValueError(f"differs by {float(error / size):.1e} of its size")
    except Exception as error:  # whatever a compiler says: the plain function does the same
        notes.append(f"{what} is not used: {(str(error) or type(error).__name__).splitlines()[0]}")
        return plain
    return fast


def _results(function: Function, made: Sequence[Any]) -> list[Tensor]:
    """What it gives, and the gradients of what floats among its arguments."""
    args = [x.clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x for x in made]
    with torch.enable_grad():
        out = function(*args)
        out.float().square().sum().backward()
    return [out.detach(), *(x.grad for x in args if isinstance(x, Tensor) and x.grad is not None)]


def _examples(
    config: DeepseekV41Config, recipe: PretrainRecipe, device: torch.device, sequences: int
) -> dict[str, list[Any]]:
    """Arguments of each part, shaped as in a step of so many sequences."""
    c, tokens, width = config, sequences * recipe.length, config.moe_intermediate_size
    normal = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    dtype = getattr(torch, recipe.dtype)
    rows = min(recipe.tile, recipe.length)
    bias = torch.zeros(1, rows, rows, device=device, dtype=dtype).masked_fill_(normal(1, rows, rows) > 1, -torch.inf)
    bias[..., 0] = 0  # no row without anything to see
    chosen = normal(tokens, c.n_routed_experts).topk(c.num_experts_per_tok).indices
    w13 = normal(c.n_routed_experts, 2 * width, c.hidden_size) / c.hidden_size**0.5
    w2 = normal(c.n_routed_experts, c.hidden_size, width) / width**0.5
    return {
        "sinkhorn": [normal(sequences, recipe.length, c.hc_mult, c.hc_mult), c.hc_sinkhorn_iters, c.hc_eps],
        "weigh": [
            normal(sequences, rows, c.num_attention_heads, rows).to(dtype), bias, c.head_dim**-0.5,
        ],
        "every_expert": [
            normal(tokens, c.hidden_size).to(dtype), normal(tokens, c.num_experts_per_tok).sigmoid(), chosen,
            w13.to(dtype), w2.to(dtype), c.swiglu_limit,
        ],
    }  # fmt: skip
