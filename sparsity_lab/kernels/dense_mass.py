"""Dense attention mass on a GPU, every query row if wanted: two passes of q k^T, nothing of size heads x rows x tokens.

    lse[h, s]  = log Σ_u exp(logit) + the sink           (first pass)
    M[g, s, u] = mean over a group's heads of exp(logit - lse)    (second pass, heads summed in registers)

Then groups of `ratio` tokens are summed in registers too. The plain reference of both stands at the end.

Shapes: h query heads, k key heads, g selection groups, R query rows, t tokens, n = t // ratio, d head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sparsity_lab.dense import group_sum
from sparsity_lab.kernels.launch import Config, lines, precision, tile_order

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _logits(q, k, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scaled, soft-capped logits in units of log 2, [M, N]; q [M, d], k [d, N]."""
    s = tl.dot(q, k, input_precision=PRECISION)
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + exp(2x)), which saturates without overflow
        s = softcap * (1 - 2 / (1 + tl.exp2(s * (2 * scale * LOG2E / softcap))))
        return s * LOG2E
    return s * (scale * LOG2E)


@triton.jit
def _hidden(row, token, window, WINDOW: tl.constexpr):
    """Tokens [N] that the queries at positions row [M] may not see, [M, N]. Queries lie within the document."""
    hidden = token[None, :] > row[:, None]
    if WINDOW:
        hidden |= token[None, :] <= row[:, None] - window
    return hidden


@triton.jit
def _lse_kernel(
    q, k, positions, sink, out, rows, tokens, scale, softcap, window,
    HEADS_PER_KEY: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One head of one tile of rows: a running maximum and sum over the tokens."""
    head = tl.program_id(1)
    r = tl.program_id(0) * M + tl.arange(0, M)
    there = r < rows
    row = tl.load(positions + r, mask=there, other=-1)
    queries = q.load([head * rows + tl.program_id(0) * M, 0])
    first_key = head // HEADS_PER_KEY * tokens
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    newest = tl.max(row, 0).to(tl.int32)
    oldest = tl.min(tl.where(there, row, newest), 0).to(tl.int32)
    # every row sees all tokens before `whole`: no mask is needed there
    start = tl.maximum(oldest - window + 1, 0) // N * N if WINDOW else 0
    whole = start if WINDOW else (oldest + 1) // N * N
    for first in tl.range(start, whole, N):
        s = _logits(queries, k.load([first_key + first, 0]).T, scale, softcap, SOFTCAP, PRECISION)
        new = tl.maximum(top, tl.max(s, 1))
        total = total * tl.exp2(top - new) + tl.sum(tl.exp2(s - new[:, None]), 1)
        top = new
    for first in tl.range(whole, newest + 1, N):
        s = _logits(queries, k.load([first_key + first, 0]).T, scale, softcap, SOFTCAP, PRECISION)
        s = tl.where(_hidden(row, first + tl.arange(0, N), window, WINDOW), float("-inf"), s)
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet
        total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(s - safe[:, None]), 1)
        top = new
    lse = top + tl.log2(total)
    if SINK:
        s = tl.load(sink + head) * LOG2E
        high = tl.maximum(lse, s)
        lse = high + tl.log2(tl.exp2(lse - high) + tl.exp2(s - high))
    tl.store(out + head.to(tl.int64) * rows + r, lse, mask=there)


@triton.jit
def _mass_kernel(
    q, k, lse, positions, out, rows, columns, groups_out, scale, softcap, window, m_tiles, n_tiles,
    KEYS: tl.constexpr, HEADS: tl.constexpr, SAME_KEY: tl.constexpr, RATIO: tl.constexpr, RPAD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BAND: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of rows and positions of one group: the heads' probabilities summed in registers.

    KEYS: key heads that a group reads; HEADS: query heads of the group a key head; SAME_KEY: groups that share a key
    head. A position's tokens take RPAD (a power of two) of the `columns` of k, RATIO of them real.
    """
    m, n = tile_order(tl.program_id(0), m_tiles, n_tiles, BAND)
    group = tl.program_id(1)
    r = m * M + tl.arange(0, M)
    there = r < rows
    row = tl.load(positions + r, mask=there, other=-1)
    width: tl.constexpr = N // RPAD  # positions of the tile
    first = n * width * RATIO
    seen = first <= tl.max(row, 0)
    if WINDOW:
        seen = seen & (
            first + width * RATIO > tl.min(tl.where(there, row, first + width * RATIO + window), 0) - window + 1
        )
    acc = tl.zeros([M, N], tl.float32)
    if seen:
        for i in range(KEYS):
            key_head = (group * KEYS + i) // SAME_KEY
            key = k.load([key_head * columns + n * N, 0]).T
            for j in range(HEADS):
                head = (group * KEYS + i) * HEADS + j
                query = q.load([head * rows + m * M, 0])
                s = _logits(query, key, scale, softcap, SOFTCAP, PRECISION)
                acc += tl.exp2(s - tl.load(lse + head.to(tl.int64) * rows + r, mask=there, other=0.0)[:, None])
        column = tl.arange(0, N)
        member = column % RPAD
        token = first + column // RPAD * RATIO + member
        # a hidden token's exponential may be infinite; it is replaced, never multiplied
        hidden = _hidden(row, token, window, WINDOW) | (member >= RATIO)[None, :]
        acc = tl.where(hidden, 0.0, acc) / (KEYS * HEADS)
    if RPAD > 1:
        acc = tl.sum(tl.reshape(acc, [M, width, RPAD]), 2)
    position = n * width + tl.arange(0, width)
    place = (group.to(tl.int64) * rows + r[:, None]) * groups_out + position[None, :]
    tl.store(out + place, acc, mask=there[:, None] & (position < groups_out)[None, :])


# found by measuring on an H200 (benchmarks/); float32 has twice the bytes a number, so larger tiles do not fit
LSE = {2: Config(128, 128, warps=8), 4: Config(64, 64)}
MASS = {2: Config(64, 128), 4: Config(64, 64)}


def row_lse(
    q: Tensor, k: Tensor, positions: Tensor, scale: float, *, softcap: float | None = None, sink: Tensor | None = None,
    window: int | None = None, config: Config | None = None,
) -> Tensor:  # fmt: skip
    """Log-sum-exp of each row's visible logits, in units of log 2, a sink included: float32 [h, R].

    Args:
        q: [h, R, d]; k: [k, t, d]; positions: int64 [R], ascending, each below t.
        sink: float [h], one logit a head; window: the last tokens a sliding-window layer sees.
    Raises:
        ValueError: query heads that are no multiple of the key heads.
    """
    config = config or LSE[q.element_size()]
    heads, rows, _ = q.shape
    per_key = _heads_per_key(q, k)
    out = torch.empty(heads, rows, dtype=torch.float32, device=q.device)
    if rows:
        _lse_kernel[(triton.cdiv(rows, config.m), heads)](
            lines(q, config.m), lines(k, config.n),
            positions.contiguous(), q if sink is None else sink.float().contiguous(), out,
            rows, k.shape[1], scale, softcap or 0.0, window or 0, HEADS_PER_KEY=per_key, M=config.m, N=config.n,
            SOFTCAP=softcap is not None, WINDOW=window is not None, SINK=sink is not None, PRECISION=precision(q),
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    return out


def dense_mass(
    q: Tensor, k: Tensor, positions: Tensor, scale: float, *, share: str = "layer", ratio: int = 1,
    softcap: float | None = None, sink: Tensor | None = None, window: int | None = None, lse: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:  # fmt: skip
    """Dense mass of some rows, summed over groups of `ratio` tokens: float32 [g, R, t // ratio].

    Args:
        q, k, positions, sink, window: as `row_lse` takes them; lse: its answer, if it is at hand.
        share: "layer" (g = 1), "kv_head" (g = k), or "head" (g = h: every head by itself).
        config: tile of the plain kernel; None = the best kernel there is for these inputs.
    Raises:
        ValueError: heads that do not divide, an unknown share, a ratio below 1 or above the tile's width.
    """
    hopper = config is None and softcap is None and window is None and _on_hopper(q, k)
    config = config or MASS[q.element_size()]
    heads, rows, _ = q.shape
    per_key, key_heads = _heads_per_key(q, k), k.shape[0]
    groups = {
        "layer": (1, key_heads, per_key, 1),
        "kv_head": (key_heads, 1, per_key, 1),
        "head": (heads, 1, 1, per_key),
    }
    if share not in groups:
        raise ValueError(f"share={share!r}: must be one of {', '.join(groups)}")
    if not 1 <= ratio <= config.n:
        raise ValueError(f"ratio={ratio}: must be from 1 to the tile's width {config.n}")
    if lse is None:
        lse = row_lse(q, k, positions, scale, softcap=softcap, sink=sink, window=window)
    number, keys, per_group, same_key = groups[share]
    positions = positions.contiguous()
    n, member = k.shape[1] // ratio, triton.next_power_of_2(ratio)
    out = torch.empty(number, rows, n, dtype=torch.float32, device=q.device)
    if out.numel():
        if member != ratio:
            k = F.pad(k[:, : n * ratio].unflatten(1, (n, ratio)), (0, 0, 0, member - ratio)).flatten(1, 2)
        if hopper:
            from sparsity_lab.kernels import dense_mass_hopper

            dense_mass_hopper.launch(q, k, lse, positions, scale, out, keys, per_group, same_key, ratio, member)
            return out
        m_tiles, n_tiles = triton.cdiv(rows, config.m), triton.cdiv(n * member, config.n)
        _mass_kernel[(m_tiles * n_tiles, number)](
            lines(q, config.m), lines(k, config.n), lse, positions, out, rows, k.shape[1], n, scale, softcap or 0.0,
            window or 0, m_tiles, n_tiles, KEYS=keys, HEADS=per_group, SAME_KEY=same_key, RATIO=ratio, RPAD=member,
            M=config.m, N=config.n, BAND=config.band, SOFTCAP=softcap is not None, WINDOW=window is not None,
            PRECISION=precision(q), num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    return out


def _on_hopper(q: Tensor, k: Tensor) -> bool:
    if not q.is_cuda:
        return False
    from sparsity_lab.kernels import dense_mass_hopper

    return dense_mass_hopper.serves(q, k)


def _heads_per_key(q: Tensor, k: Tensor) -> int:
    if q.shape[0] % k.shape[0]:
        raise ValueError(f"{q.shape[0]} query heads are no multiple of {k.shape[0]} key heads")
    return q.shape[0] // k.shape[0]


def reference(
    q: Tensor, k: Tensor, positions: Tensor, scale: float, *, share: str = "layer", ratio: int = 1,
    softcap: float | None = None, sink: Tensor | None = None, window: int | None = None,
) -> Tensor:  # fmt: skip
    """What `dense_mass` computes, head by head in plain PyTorch and float64: [g, R, t // ratio]."""
    heads, per_key = [], _heads_per_key(q, k)
    token = torch.arange(k.shape[1], device=q.device)
    for h, query in enumerate(q.double()):
        logits = query @ k[h // per_key].double().T * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        hidden = token > positions.unsqueeze(-1)
        if window is not None:
            hidden |= token <= positions.unsqueeze(-1) - window
        logits = logits.masked_fill(hidden, float("-inf"))
        if sink is not None:
            logits = torch.cat([logits, sink[h].double().expand(len(logits), 1)], dim=-1)
        heads.append(logits.softmax(-1)[:, : len(token)])
    number = {"layer": 1, "kv_head": k.shape[0], "head": q.shape[0]}[share]
    return group_sum(torch.stack(heads).unflatten(0, (number, -1)).mean(1), ratio)
