"""The V4.1 model's parts as loops over scalars, rows and experts in float64; nothing is imported from the package.

Shapes: b batch, s query rows, h heads, d head dim, n compressed positions, E experts, c stream copies.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

FP4_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def attend(
    q: Tensor,
    window: Tensor,
    compressed: Tensor,
    selected: Tensor | None,
    sink: Tensor,
    *,
    start: int,
    window_size: int,
    ratio: int,
) -> Tensor:
    """q [b,s,h,d], window [b,p+s,d], compressed [b,n,d], selected [b,s,k] or None, sink [h] -> [b,s,h,d]."""
    q, window, compressed, sink = (tensor.detach().double() for tensor in (q, window, compressed, sink))
    batch, rows, heads, width = q.shape
    earlier = window.shape[1] - rows
    out = torch.zeros_like(q)
    for b in range(batch):
        for row in range(rows):
            newest = earlier + row
            near = [window[b, u] for u in range(max(0, newest - window_size + 1), newest + 1)]
            visible = (start + row + 1) // ratio if ratio else 0
            chosen = range(visible) if selected is None else {int(j) for j in selected[b, row] if j >= 0}
            values = torch.stack([*near, *(compressed[b, j] for j in sorted(chosen))])
            for head in range(heads):
                logits = [float(value @ q[b, row, head]) * width**-0.5 for value in values]
                peak = max([*logits, float(sink[head])])
                weights = [math.exp(logit - peak) for logit in logits]
                total = math.fsum(weights) + math.exp(float(sink[head]) - peak)
                out[b, row, head] = sum(w / total * v for w, v in zip(weights, values, strict=True))
    return out


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """One matrix [c, c]."""
    size = len(logits)
    m = [[float(x) for x in row] for row in logits]
    for j in range(size):
        total = math.fsum(math.exp(x - max(m[j])) for x in m[j])
        m[j] = [math.exp(x - max(m[j])) / total + eps for x in m[j]]
    for step in range(iters):
        if step:
            for j in range(size):
                total = math.fsum(m[j]) + eps
                m[j] = [x / total for x in m[j]]
        for k in range(size):
            total = math.fsum(m[j][k] for j in range(size)) + eps
            for j in range(size):
                m[j][k] /= total
    return torch.tensor(m, dtype=torch.float64)


def route(x: Tensor, weight: Tensor, bias: Tensor, config) -> list[dict[int, float]]:
    """For each token of x [T,d]: expert -> weight."""
    routes = []
    for token in x.double():
        scores = []
        logits = [float(row @ token) / config.gate_temp for row in weight.double()]
        for logit in logits:
            if config.scoring_func == "sigmoid":
                scores.append(1 / (1 + math.exp(-logit)))
            elif config.scoring_func == "sqrtsoftplus":
                scores.append(math.sqrt(math.log1p(math.exp(logit))))
            else:
                scores.append(math.exp(logit) / math.fsum(math.exp(other) for other in logits))
        order = sorted(range(len(scores)), key=lambda e: -(scores[e] + float(bias[e])))
        chosen = order[: config.num_experts_per_tok]
        total = math.fsum(scores[e] for e in chosen) if config.norm_topk_prob and len(chosen) > 1 else 1.0
        routes.append({e: scores[e] / total * config.routed_scaling_factor for e in chosen})
    return routes


def expert(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float) -> Tensor:
    """One token [d] through one clamped SwiGLU."""
    gate, up = w1.double() @ x.double(), w3.double() @ x.double()
    hidden = [min(float(g), limit) for g in gate]
    hidden = [g / (1 + math.exp(-g)) * min(max(float(u), -limit), limit) for g, u in zip(hidden, up, strict=True)]
    return w2.double() @ torch.tensor(hidden, dtype=torch.float64)


def ngram_rows(ids: list[int], pad: int, factors: list[int], primes: list[list[int]]) -> list[list[int]]:
    """Table rows of one layer for every token; factors [max_ngram_size], primes [orders][heads]."""
    rows = []
    for at in range(len(ids)):
        found, offset = [], 0
        for order, buckets in enumerate(primes, start=2):
            mixed = 0
            for back in range(order):
                token = ids[at - back] if at >= back else pad
                mixed ^= token * factors[back]
            for prime in buckets:
                found.append(mixed % prime + offset)
                offset += prime
        rows.append(found)
    return rows


def engram(streams: Tensor, entries: Tensor, layer, eps: float) -> Tensor:
    """One token's streams [c,d] and concatenated table entries [columns] through an Engram layer."""
    copies, width = streams.shape
    found = (layer.wkv.weight.double() @ entries.double()).view(copies + 1, width)
    value = found[copies]
    out = streams.double().clone()
    for c in range(copies):
        query = streams[c].double() / math.sqrt(float(streams[c].double().square().mean()) + eps)
        key = found[c] / math.sqrt(float(found[c].square().mean()) + eps)
        match = float((query * layer.q_weight[c].double()) @ (key * layer.k_weight[c].double())) / math.sqrt(width)
        root = math.copysign(math.sqrt(max(abs(match), 1e-6)), match)
        out[c] += value / (1 + math.exp(-root))
    return out


def fp4_values(packed: Tensor) -> np.ndarray:
    """e2m1 numbers of packed bytes [out, in/2], the low half of a byte first -> float64 [out, in]."""
    rows = []
    for line in packed.view(torch.uint8).tolist():
        codes = [code for byte in line for code in (byte % 16, byte // 16)]
        rows.append([FP4_GRID[code % 8] * (-1 if code >= 8 else 1) for code in codes])
    return np.array(rows)


def block_scale(values: Tensor, largest: float, floor: float) -> float:
    """The smallest power of two that brings a block within ±largest."""
    amax = max(float(values.abs().max()), floor)
    scale = 2.0 ** math.floor(math.log2(amax / largest) - 1)
    while scale * largest < amax:
        scale *= 2
    return scale
