"""Hyper-connections: the residual stream is several copies, mixed by coefficients that depend on the input.

Shapes: b batch, s tokens, c copies (hc_mult), d hidden size.
Source: mHC (arXiv 2512.24880) in the single-pass form of DeepSeek V4.1's inference code, where a site's `pre` is used
by the next site.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Mix(NamedTuple):
    """Coefficients of one site, float32."""

    pre: Tensor  # [b, s, c], collapses the streams at the next site
    post: Tensor  # [b, s, c], how much of the site's output each copy takes
    comb: Tensor  # [b, s, c, c], comb[j, k]: how much of copy j goes into copy k; doubly stochastic


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Nearly doubly stochastic matrices [..., c, c]: rows by softmax, then columns and rows normalised in turn."""
    comb = logits.softmax(dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def mix(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    sinkhorn_iters: int,
    eps: float,
    norm_eps: float,
    sinkhorn: Callable[[Tensor, int, float], Tensor] = sinkhorn,
) -> Mix:
    """Coefficients from one projection of the RMS-normalised flattened streams.

    Args:
        streams: [b, s, c, d]; fn: [c·(2 + c), c·d]; base: [c·(2 + c)]; scale: [3].
        sinkhorn: what computes the function of this name; training has a faster one.
    """
    copies = streams.shape[-2]
    flat = streams.flatten(-2).float()
    raw = F.linear(flat, fn.float()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    parts = zip(raw.split([copies, copies, copies**2], -1), base.split([copies, copies, copies**2]), scale, strict=True)
    pre, post, comb = (part * factor + offset for part, offset, factor in parts)
    return Mix(
        pre=torch.sigmoid(pre) + eps,
        post=2 * torch.sigmoid(post),
        comb=sinkhorn(comb.unflatten(-1, (copies, copies)), sinkhorn_iters, eps),
    )


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the copies: [b, s, c, d], [b, s, c] -> [b, s, d] in the streams' dtype."""
    return torch.einsum("bscd,bsc->bsd", streams.float(), pre).to(streams.dtype)


def expand(output: Tensor, streams: Tensor, site: Mix) -> Tensor:
    """out_k = post_k · output + Σ_j comb[j, k] · stream_j: [b, s, d], [b, s, c, d] -> [b, s, c, d]."""
    mixed = torch.einsum("bsjk,bsjd->bskd", site.comb, streams.float())
    return (mixed + site.post.unsqueeze(-1) * output.float().unsqueeze(-2)).to(streams.dtype)
