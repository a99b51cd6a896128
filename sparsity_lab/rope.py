"""Rotary position embedding: frequency tables (plain and YaRN) and rotations in both pair layouts.

Shapes: b batch, s query rows, h heads, d rotated channels. A table is complex64 [s, d/2]; every entry has modulus 1.

Which channels form a pair, and where they sit in the head, differs between model generations (DeepSeek V4.1: adjacent
pairs in the last channels; V3.2: half-split pairs in the first channels), so both are arguments and never constants.

Source: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071) in the form of the DeepSeek V3 and V4.1 inference code:
frequencies only, no magnitude factor.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

Layout = Literal["adjacent", "half"]
Place = Literal["first", "last"]


def precompute_freqs_cis(
    dim: int,
    seqlen: int,
    original_seq_len: int,
    base: float,
    factor: float,
    beta_fast: float,
    beta_slow: float,
) -> Tensor:
    """The table exp(i · position · frequency) for positions 0 … seqlen-1, computed in float32.

    With YaRN, a channel that turns more than `beta_fast` times within `original_seq_len` tokens keeps its frequency,
    one that turns less than `beta_slow` times is divided by `factor`, and a linear ramp joins the two.

    Args:
        dim: rotated channels (even).
        seqlen: rows of the table.
        original_seq_len: training context in tokens; 0 means plain RoPE, and the last three arguments are not used.
        base: RoPE theta.
        factor: context extension factor.
        beta_fast, beta_slow: turns at the two ends of the ramp.
    Returns:
        complex64 [seqlen, dim/2] on the CPU, unit modulus.
    Raises:
        ValueError: a dimension or base for which there is no table.
    """
    if dim < 2 or dim % 2:
        raise ValueError(f"dim={dim}: must be even and at least 2")
    if seqlen < 0 or original_seq_len < 0:
        raise ValueError(f"seqlen={seqlen}, original_seq_len={original_seq_len}: must not be negative")
    if not base > 1:
        raise ValueError(f"base={base}: must be larger than 1")
    freqs = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if original_seq_len > 0:
        if not factor > 0 or not beta_fast > 0 or not beta_slow > 0:
            raise ValueError(f"factor={factor}, beta_fast={beta_fast}, beta_slow={beta_slow}: must be positive")
        ramp = _yarn_ramp(dim, original_seq_len, base, beta_fast, beta_slow)
        freqs = freqs / factor * ramp + freqs * (1 - ramp)
    angles = torch.outer(torch.arange(seqlen, dtype=torch.float32), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def _yarn_ramp(dim: int, original_seq_len: int, base: float, beta_fast: float, beta_slow: float) -> Tensor:
    """How far each of the dim/2 frequencies is interpolated: 0 keeps it, 1 divides it by the factor."""

    def channel(turns: float) -> float:
        """The (fractional) frequency index that makes this many turns in the training context."""
        return dim * math.log(original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(channel(beta_fast)), 0)
    high = min(math.ceil(channel(beta_slow)), dim - 1)  # dim - 1, not dim/2 - 1: as published
    steps = torch.arange(dim // 2, dtype=torch.float32)
    return ((steps - low) / max(high - low, 1e-3)).clamp(0, 1)


def apply_rotary_emb(x: Tensor, freqs_cis: Tensor, inverse: bool = False, layout: Layout = "adjacent") -> Tensor:
    """Rotate all channels of x; a new tensor, computed in float32, in x's dtype.

    Args:
        x: [b, s, d] or [b, s, h, d], the rotated channels only.
        freqs_cis: complex64 [s, d/2], one row per sequence position of x.
        inverse: rotate back.
        layout: "adjacent" pairs channels (2i, 2i+1); "half" pairs (i, i + d/2).
    Returns:
        The shape and dtype of x.
    Raises:
        ValueError: shapes that do not belong together, or an unknown layout.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"layout={layout!r}: must be one of {get_args(Layout)}")
    if x.dim() not in (3, 4):
        raise ValueError(f"x has shape {tuple(x.shape)}: must be [b, s, d] or [b, s, h, d]")
    if not freqs_cis.is_complex() or freqs_cis.shape != (x.shape[1], x.shape[-1] / 2):
        raise ValueError(
            f"freqs_cis is {freqs_cis.dtype} {tuple(freqs_cis.shape)}: must be complex [s, d/2] for x {tuple(x.shape)}"
        )
    turns = freqs_cis.conj() if inverse else freqs_cis
    turns = turns.unsqueeze(1) if x.dim() == 4 else turns
    wide = x.float()
    if layout == "adjacent":
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
    rotated = torch.complex(*wide.chunk(2, dim=-1)) * turns
    return torch.cat([rotated.real, rotated.imag], dim=-1).to(x.dtype)


def rotate_channels(
    x: Tensor, freqs_cis: Tensor, rope_head_dim: int, *, place: Place, layout: Layout, inverse: bool = False
) -> Tensor:
    """Rotate only the first or last `rope_head_dim` channels of x; the others pass through. A new tensor.

    Args:
        x: [b, s, d] or [b, s, h, d].
        freqs_cis: complex64 [s, rope_head_dim/2].
        place: "first" or "last", where the rotated channels sit.
    Raises:
        ValueError: as `apply_rotary_emb`, an unknown place, or more rotated channels than there are.
    """
    if place not in get_args(Place):
        raise ValueError(f"place={place!r}: must be one of {get_args(Place)}")
    if not 2 <= rope_head_dim <= x.shape[-1] or rope_head_dim % 2:
        raise ValueError(f"rope_head_dim={rope_head_dim}: must be even, from 2 to the head dimension {x.shape[-1]}")
    rest = x.shape[-1] - rope_head_dim
    if place == "last":
        still, turned = x.split([rest, rope_head_dim], dim=-1)
        return torch.cat([still, apply_rotary_emb(turned, freqs_cis, inverse, layout)], dim=-1)
    turned, still = x.split([rope_head_dim, rest], dim=-1)
    return torch.cat([apply_rotary_emb(turned, freqs_cis, inverse, layout), still], dim=-1)
