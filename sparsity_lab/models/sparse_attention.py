"""Attention over selected tokens only: window, incomplete tail group, and the tokens of the selected positions.

Two ways that give the same: `masked` computes all logits of a few rows and leaves out what is not attended (the
reference), `gathered` looks up the attended keys and values first, which serves where these are few, as in decoding.
FlexAttention would need a block mask per call and, as ratios and groups are no blocks of its own, skip next to nothing.

Shapes: g groups, R query rows, L places of an order (-1 = nothing), h query heads, k key heads, t tokens, A tokens
looked up for a row, r ratio.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsity_lab.activations import LayerActivations
from sparsity_lab.dense import attention_probabilities
from sparsity_lab.metrics import raw_start
from sparsity_lab.selection import as_mask


def attended_tokens(order: Tensor, rows: Tensor, ratio: int, window: int, tokens: int) -> Tensor:
    """What the queries at positions `rows` attend to: order int64 [g, R, L] of selected positions -> bool [g, R, t].

    Exactly the tokens that `total_coverage` and `density` count (see `metrics`).
    """
    places = torch.arange(tokens, device=rows.device)
    raw = (places >= raw_start(rows, ratio, window).unsqueeze(-1)) & (places <= rows.unsqueeze(-1))
    chosen = as_mask(order, tokens // ratio).repeat_interleave(ratio, dim=-1)
    return F.pad(chosen, (0, tokens - chosen.shape[-1])) | raw


def attend(acts: LayerActivations, rows: Tensor, order: Tensor, ratio: int, window: int) -> Tensor:
    """Attention output of a one-document batch over what is attended, float32 [R, h, dv].

    Args:
        rows: int64 [R], positions, which `acts` holds. order: int64 [g, R, L], selected positions.
    """
    widest = order.shape[-1] * ratio + max(window, ratio)
    # no more is looked up than the keys that lie there anyway
    few = rows.numel() * widest <= acts.k.shape[2]
    return (gathered if few else masked)(acts, rows, order, ratio, window)


def masked(acts: LayerActivations, rows: Tensor, order: Tensor, ratio: int, window: int) -> Tensor:
    """The reference; arguments and result as for `attend`, memory h * R * t."""
    v = acts.v[0].float()
    attended = attended_tokens(order, rows, ratio, window, acts.k.shape[2])
    heads = acts.q.shape[1]
    at = rows if acts.rows is not None else rows - (acts.k.shape[2] - acts.q.shape[2])
    p = attention_probabilities(acts, at, attended.repeat_interleave(heads // len(attended), dim=0))
    out = p.unflatten(0, (v.shape[0], -1)).flatten(1, 2) @ v
    return out.view(heads, rows.numel(), -1).transpose(0, 1)


def gathered(acts: LayerActivations, rows: Tensor, order: Tensor, ratio: int, window: int) -> Tensor:
    """Keys and values are looked up, [k, R, A, d]; arguments and result as for `attend`."""
    heads, kv_heads = acts.q.shape[1], acts.k.shape[1]
    tokens, counted = _tokens(order, rows, ratio, window)
    per_key_head = tokens.expand(kv_heads, -1, -1)
    k, v = (_look_up(x[0], per_key_head).float() for x in (acts.k, acts.v))
    at = rows if acts.rows is not None else rows - (acts.k.shape[2] - acts.q.shape[2])
    q = acts.query_rows(at).float().unflatten(0, (kv_heads, -1)).transpose(1, 2) * acts.scale  # [k, R, h / k, d]
    logits = q @ k.transpose(-1, -2)  # [k, R, h / k, A]
    if acts.softcap is not None:
        logits = (logits / acts.softcap).tanh() * acts.softcap
    logits = logits.masked_fill(~counted.unsqueeze(2), float("-inf"))
    if acts.sink is not None:
        sink = acts.sink.float().view(kv_heads, 1, -1, 1).expand(-1, rows.numel(), -1, -1)
        logits = torch.cat([logits, sink], dim=-1)
    p = logits.softmax(-1)[..., : k.shape[2]]
    return (p @ v).transpose(1, 2).reshape(heads, rows.numel(), -1).transpose(0, 1)


def _tokens(order: Tensor, rows: Tensor, ratio: int, window: int) -> tuple[Tensor, Tensor]:
    """The tokens to look up, int64 [g, R, A], and which of them count, each once: bool [g, R, A]. In the others' place
    the query's own token is looked up, so what is not attended cannot matter, be it infinite."""
    start = raw_start(rows, ratio, window).unsqueeze(-1)
    raw = start + torch.arange(max(window, ratio), device=rows.device)
    chosen = (order.unsqueeze(-1) * ratio + torch.arange(ratio, device=rows.device)).flatten(-2)
    picked = (order >= 0).repeat_interleave(ratio, dim=-1) & (chosen < start)
    own = rows.unsqueeze(-1)
    tokens = torch.cat([chosen, raw.expand(len(order), -1, -1)], dim=-1)
    counted = torch.cat([picked, (raw <= own).expand(len(order), -1, -1)], dim=-1)
    return torch.where(counted, tokens, own), counted


def _look_up(x: Tensor, tokens: Tensor) -> Tensor:
    """x [k, t, d] at tokens [k, R, A] -> [k, R, A, d]."""
    heads = torch.arange(x.shape[0], device=x.device).view(-1, 1, 1)
    return x[heads, tokens]
