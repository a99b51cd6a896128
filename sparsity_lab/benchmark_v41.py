"""The DeepSeek V4.1 forward against the usual eager structure on the same weights.

The eager structure is that of public inference code: a Python loop over the experts, and attention over every token
and compressed position with a materialised bias [s, t + n] that is -inf where the window and the selection end.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsity_lab.models.deepseek_v41 import DeepseekV41Model, load
from sparsity_lab.models.deepseek_v41 import attention as attention_module
from sparsity_lab.models.deepseek_v41.moe import Experts, swiglu


def compare(size: str, length: int, repeats: int, seed: int = 0) -> dict[str, Any]:
    """Time both on one prompt, in turns.

    CPU seconds of this process count, not wall time: they are the same on a machine that others use too.

    Returns:
        parameters, tokens, the two medians in seconds, and their ratio (above 1: ours is faster).
    Raises:
        RuntimeError: the two do not compute the same.
    """
    # in full precision: rounding to fp4 would flip now and then between two orders of summation
    model = load(size, device="cpu", seed=seed, window_quant="none", kv_quant="none", index_quant="none").model
    eager = eager_twin(model)
    tokens = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))
    runs: dict[str, Callable[[], Tensor]] = {"ours": lambda: model.hidden(tokens), "eager": lambda: eager(tokens)}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    found: dict[str, Tensor] = {}
    with torch.inference_mode():
        for _ in range(repeats + 1):  # the first turn warms up
            for name, run in runs.items():
                start = time.process_time()
                found[name] = run()
                seconds[name].append(time.process_time() - start)
    error = float((found["ours"] - found["eager"]).norm() / found["ours"].norm())
    if not error < 1e-4:
        raise RuntimeError(f"the eager structure gives other numbers (relative difference {error:.1e})")
    ours, theirs = (statistics.median(seconds[name][1:]) for name in ("ours", "eager"))
    return {
        "size": size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": length,
        "ours_cpu_seconds": ours,
        "eager_cpu_seconds": theirs,
        "eager / ours": theirs / ours,
        "relative_difference": error,
    }


def eager_twin(model: DeepseekV41Model) -> Callable[[Tensor], Tensor]:
    """The same model, sharing its weights, computed the eager way: token ids -> hidden states."""
    twin = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    for experts in (module for module in twin.modules() if isinstance(module, Experts)):
        experts.forward = partial(_loop, experts)  # type: ignore[method-assign]

    def run(tokens: Tensor) -> Tensor:
        own, attention_module.attend = attention_module.attend, _biased_attend
        try:
            return twin.hidden(tokens)
        finally:
            attention_module.attend = own

    return run


def _loop(experts: Experts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for expert in range(experts.count):
        token, place = torch.where(chosen == expert)
        if token.numel() == 0:
            continue
        gate_up = F.linear(x[token], experts.w13[expert])
        hidden = swiglu(gate_up, experts.limit) * weights[token, place].unsqueeze(-1)
        out[token] += F.linear(hidden.to(x.dtype), experts.w2[expert])
    return out


def _biased_attend(
    q: Tensor, window: Tensor, compressed: Tensor, selected: Tensor | None, sink: Tensor, **options: Any
) -> Tensor:
    seqlen, n = q.shape[1], compressed.shape[1]
    position = torch.arange(seqlen).unsqueeze(-1)
    token = torch.arange(seqlen)
    raw = torch.zeros(q.shape[0], seqlen, seqlen)
    raw.masked_fill_((token > position) | (token <= position - options["window_size"]), float("-inf"))
    far = torch.full((q.shape[0], seqlen, n + 1), float("-inf"))
    if selected is not None:
        far.scatter_(-1, selected.masked_fill(selected < 0, n).long(), 0.0)
    bias = torch.cat([raw, far[..., :n]], dim=-1)
    keys = torch.cat([window, compressed], dim=1)
    logits = torch.einsum("bshd,btd->bsht", q, keys) * q.shape[-1] ** -0.5 + bias.unsqueeze(2)
    logits = torch.cat([logits, sink.view(1, 1, -1, 1).expand(*logits.shape[:3], 1)], dim=-1)
    return torch.einsum("bsht,btd->bshd", logits.softmax(dim=-1)[..., :-1], keys)
