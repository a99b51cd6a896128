"""The lightning indexer: a few light heads score every compressed position, the best k are attended.

Shapes: b batch, s query rows of this call, h index heads, d index head dim, n compressed positions, r ratio, k top-k.

    I[s, j] = Σ_h w_h · relu(q_h · k_j),   w = weights_proj(x) · d^-0.5 · h^-0.5

One class serves all generations by configuration. DeepSeek V4.1: `rope_layout="adjacent", rope_place="last"`, keys from
the compressor's latent, RMS key norm, `quant="fp4_ue8m0"`. V3.2: `rope_layout="half", rope_place="first",
hadamard=True, key_norm="layer", quant="fp8_e4m3_128"`, ratio 1, where the latent is the attention input itself.

Sources: the published inference code of DeepSeek V3.2 and V4.1; the V3.2 report for the formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsity_lab import kernels
from sparsity_lab.compressor import PLAIN
from sparsity_lab.index_state import CandidatePool, IndexRole, KeyCache, SharedIndexState
from sparsity_lab.norm import RMSNorm
from sparsity_lab.quant import QuantFormat, check_format, check_hadamard_width, fake_quant, hadamard_transform
from sparsity_lab.rope import Layout, Place, rotate_channels
from sparsity_lab.selection import adjust_scores, rank_blocks, select_topk

KeyNorm = Literal["rms", "layer", "none"]
TILE_ELEMENTS = 1 << 24  # per-head scores held at once: 64 MiB
INT32_MAX = 2**31 - 1


def index_scores(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    relu: bool = True,
    *,
    visible: Tensor | None = None,
    tile_elements: int = TILE_ELEMENTS,
) -> Tensor:
    """Σ_h w_h · relu(q_h · k_j) in float32, whatever the dtypes: in bfloat16 most scores would be tied.

    Args:
        q: [b, s, h, d]; k: [b, n, d]; w: [b, s, h].
        relu: without it the sum over heads is linear, and the heads are merged before the product.
        visible: int64 [s], positions each row may see; a kernel does without the others, which then score -inf.
        tile_elements: bound on the b·rows·h·n per-head scores held at once (at least one row is).
    Returns:
        float32 [b, s, n]; without `visible` every position is scored.
    """
    heads, n = q.shape[2], k.shape[1]
    if kernels.multiplies(q) and q.dtype == k.dtype and not (torch.is_grad_enabled() and q.requires_grad):
        return _kernel_scores(q, k, w, relu, visible)
    with torch.autocast(q.device.type, enabled=False):
        w, keys = w.float(), k.float().transpose(1, 2)
        if not relu:
            return torch.matmul(torch.einsum("bsh,bshd->bsd", w, q.float()), keys)
        if q.shape[1] == 0 or n == 0:
            return q.new_zeros(q.shape[0], q.shape[1], n, dtype=torch.float32)
        rows = max(1, tile_elements // (q.shape[0] * heads * n))
        tiles = []
        for q_rows, w_rows in zip(q.split(rows, dim=1), w.split(rows, dim=1), strict=True):
            per_head = torch.matmul(q_rows.float().flatten(1, 2), keys).relu_().unflatten(1, (-1, heads))
            tiles.append(torch.matmul(w_rows.unsqueeze(2), per_head).squeeze(2))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)


def _kernel_scores(q: Tensor, k: Tensor, w: Tensor, relu: bool, visible: Tensor | None) -> Tensor:
    from sparsity_lab.kernels.index_scores import index_scores

    if visible is None:
        visible = torch.full((q.shape[1],), k.shape[1], device=q.device)
    documents = zip(q.transpose(1, 2), k, w.transpose(1, 2), strict=True)
    found = [scores for one in documents if (scores := index_scores(*one, visible, relu=relu).scores) is not None]
    return found[0].unsqueeze(0) if len(found) == 1 else torch.stack(found)


class Indexer(nn.Module):
    """Index queries, head weights and, for a key owner, index keys; `forward` is a whole call of one index layer.

    Args:
        dim: width of x.
        index_n_heads, index_head_dim: h and d.
        rope_head_dim: rotated channels of d.
        q_lora_rank: width of the query latent qr.
        head_dim: width of the key latent; None for a layer that reads another layer's keys.
        norm_eps: epsilon of the key norm.
        rope_layout, rope_place: pairing and place of the rotated channels ("adjacent" | "half", "first" | "last").
        relu: apply the ReLU to per-head scores.
        hadamard: rotate queries and keys by a Hadamard matrix before they are quantised.
        quant: fake quantisation of queries and keys, after RoPE and rotation, over all channels.
        key_norm: "rms", "layer" (with bias, as V3.2) or "none".
        local_heads: how many of the heads this process holds; None = all.
        sum_ranks: adds up the processes' scores, which are sums over their heads.
        linear: makes the query projection of (q_lora_rank, channels).
    Raises:
        ValueError: values that do not fit together.
    """

    def __init__(
        self,
        dim: int,
        index_n_heads: int,
        index_head_dim: int,
        rope_head_dim: int,
        q_lora_rank: int,
        head_dim: int | None,
        norm_eps: float,
        *,
        rope_layout: Layout,
        rope_place: Place,
        relu: bool = True,
        hadamard: bool = False,
        quant: QuantFormat = "fp4_ue8m0",
        key_norm: KeyNorm = "rms",
        local_heads: int | None = None,
        sum_ranks: Callable[[Tensor], Tensor] | None = None,
        linear: Callable[[int, int], nn.Module] = PLAIN,
    ) -> None:
        super().__init__()
        _check_config(index_n_heads, index_head_dim, rope_head_dim, rope_layout, rope_place, key_norm)
        check_format(quant, index_head_dim, width_key="index_head_dim")
        if hadamard:
            check_hadamard_width(index_head_dim)
        self.index_n_heads, self.index_head_dim, self.rope_head_dim = index_n_heads, index_head_dim, rope_head_dim
        self.rope_layout, self.rope_place = rope_layout, rope_place
        self.relu, self.hadamard, self.quant = relu, hadamard, quant
        self.local_heads, self.sum_ranks = local_heads or index_n_heads, sum_ranks
        self.wq_b = linear(q_lora_rank, self.local_heads * index_head_dim)
        self.weights_proj = nn.Linear(dim, self.local_heads, bias=False)
        self.wk = None if head_dim is None else nn.Linear(head_dim, index_head_dim, bias=False)
        self.k_norm = None if head_dim is None else _make_key_norm(key_norm, index_head_dim, norm_eps)

    def queries(self, qr: Tensor, freqs_cis: Tensor) -> Tensor:
        """Index queries of any rows: qr [b, s, q_lora_rank], freqs_cis [s, rope/2], one row a query -> [b, s, h, d]."""
        return self._place(self.wq_b(qr).unflatten(-1, (self.local_heads, self.index_head_dim)), freqs_cis)

    def head_weights(self, x: Tensor) -> Tensor:
        """float32 [b, s, h] weights of the heads, both scales included; they may be negative. x: [b, s, dim]."""
        scale = self.index_head_dim**-0.5 * self.index_n_heads**-0.5
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weights_proj.weight.float()) * scale

    def keys(self, latent: Tensor, freqs_cis: Tensor) -> Tensor:
        """Index keys of any compressed positions.

        Args:
            latent: [b, n, head_dim], the compressor's output, before any RoPE.
            freqs_cis: [n, rope/2], the table's rows at the groups' first tokens j·r.
        Returns:
            [b, n, d].
        Raises:
            ValueError: this indexer has no keys of its own.
        """
        if self.wk is None:
            raise ValueError("head_dim=None: this indexer reads another layer's keys and cannot make any")
        keys = self.wk(latent)
        return self._place(keys if self.k_norm is None else self.k_norm(keys), freqs_cis)

    def _place(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        """RoPE, rotation, quantisation: the one path of queries and keys, so that they cannot differ."""
        x = rotate_channels(x, freqs_cis, self.rope_head_dim, place=self.rope_place, layout=self.rope_layout)
        return fake_quant(hadamard_transform(x) if self.hadamard else x, self.quant)

    def forward(
        self,
        x: Tensor,
        qr: Tensor,
        latent: Tensor | None,
        start_pos: int,
        freqs_cis: Tensor,
        state: SharedIndexState,
        role: IndexRole,
        offset: int = 0,
    ) -> Tensor:
        """Select for the tokens at absolute positions start_pos … start_pos + s - 1, in one prefill, chunks or steps.

        A query at position p sees the (p + 1) // r complete groups before it. Calls must follow each other without a
        gap, all sequences of the batch in step; padding is not supported.

        Args:
            x: [b, s, dim]; qr: [b, s, q_lora_rank].
            latent: [b, m, head_dim], the groups this call completes, any number; None when there are none, and for
                readers of another layer's keys.
            freqs_cis: the whole table [≥ start_pos + s, rope/2], row p for absolute position p.
            state: shared by the index layers; gets this call's keys, candidate pool and top-k.
            role: this layer's place in the topology.
            offset: added to every selected position.
        Returns:
            int32 [b, s, min(k, n)] compressed positions in position order, -1 at the end for what is missing; the width
            is 0 while nothing is visible. Never unreachable or out of the pool (the published code may return such).
        Raises:
            ValueError: arguments that do not belong together, calls out of order, NaN scores.
        """
        _check_call(x, qr, start_pos, freqs_cis, offset)
        seqlen, end = x.shape[1], start_pos + x.shape[1]
        if role.owner == role.layer:
            self._publish_keys(latent, start_pos, end, freqs_cis, state, role)
        elif latent is not None:
            raise ValueError(f"latent given to layer {role.layer}, which reads the keys of layer {role.owner}")
        keys = _owner_keys(state, role, end)
        if keys is None:
            picks = torch.empty(x.shape[0], seqlen, 0, dtype=torch.int32, device=x.device)
            blocks: Tensor | None = picks
        else:
            if offset + keys.shape[1] - 1 > INT32_MAX:
                raise ValueError(f"offset={offset}: {keys.shape[1]} positions behind it do not fit int32")
            picks, blocks = self._select(x, qr, keys, start_pos, freqs_cis, state, role, offset)
        if blocks is not None and role.candidate == "source":
            width = 0 if keys is None else keys.shape[1]
            state.pool = CandidatePool(blocks, width, role.block_size, start_pos, role.owner, role.ratio)
        state.topk, state.topk_start = picks, start_pos
        return picks

    def _publish_keys(
        self,
        latent: Tensor | None,
        start_pos: int,
        end: int,
        freqs_cis: Tensor,
        state: SharedIndexState,
        role: IndexRole,
    ) -> None:
        """Append the keys of the groups this call completes; refuse before anything is changed."""
        cache = state.keys.setdefault(role.layer, KeyCache())
        given = 0 if latent is None else latent.shape[1]
        if cache.length != start_pos // role.ratio:
            raise ValueError(
                f"start_pos={start_pos}: layer {role.layer} has keys of {cache.length} groups, expected "
                f"{start_pos // role.ratio}; calls must follow each other without a gap"
            )
        if cache.length + given != end // role.ratio:
            raise ValueError(
                f"latent: {given} groups given, but positions {start_pos} to {end - 1} complete "
                f"{end // role.ratio - cache.length} at compress_ratio={role.ratio}"
            )
        if latent is not None and given:
            cache.append(self.keys(latent, freqs_cis[cache.length * role.ratio : end : role.ratio][:given]))

    def _select(
        self,
        x: Tensor,
        qr: Tensor,
        keys: Tensor,
        start_pos: int,
        freqs_cis: Tensor,
        state: SharedIndexState,
        role: IndexRole,
        offset: int,
    ) -> tuple[Tensor, Tensor | None]:
        """Top-k and, at a candidate source, kept blocks of all rows, tile by tile: memory is rows of a tile × n."""
        seqlen, n = x.shape[1], keys.shape[1]
        q, w = self.queries(qr, freqs_cis[start_pos : start_pos + seqlen]), self.head_weights(x)
        positions = torch.arange(start_pos, start_pos + seqlen, device=x.device)
        pool = state.pool_for(role, start_pos, seqlen) if role.candidate == "consumer" else None
        step = max(1, TILE_ELEMENTS // (x.shape[0] * n))
        picks, blocks = [], []
        for first in range(0, seqlen, step):
            rows = slice(first, first + step)
            scores = index_scores(q[:, rows], keys, w[:, rows], self.relu)
            scores = scores if self.sum_ranks is None else self.sum_ranks(scores)
            scores = adjust_scores(scores, positions[rows], role.ratio)
            if role.candidate == "source":
                blocks.append(_kept_blocks(scores, (positions[rows] + 1) // role.ratio, role))
            picks.append(select_topk(scores, role.topk, pool=None if pool is None else pool.mask(rows), offset=offset))
        return torch.cat(picks, dim=1), torch.cat(blocks, dim=1) if blocks else None


def _kept_blocks(scores: Tensor, lengths: Tensor, role: IndexRole) -> Tensor:
    """Numbers of the pool's blocks: scores [b, s, n] -> int32 [b, s, ≤ topk_blocks], ascending, -1 at the end."""
    ranks = rank_blocks(scores, lengths, role.block_size)
    total = ranks.shape[-1]
    numbers = torch.arange(total, device=ranks.device).expand_as(ranks)
    kept = numbers.masked_fill(ranks >= role.topk_blocks, total).sort(dim=-1).values[..., : role.topk_blocks]
    return kept.masked_fill(kept == total, -1).int()


def _owner_keys(state: SharedIndexState, role: IndexRole, end: int) -> Tensor | None:
    """The owner's keys [b, n, d] as of this call; None while no group is complete."""
    cache = state.keys.get(role.owner)
    expected = end // role.ratio
    have = 0 if cache is None else cache.length
    if have != expected:
        raise ValueError(
            f"layer {role.layer} needs {expected} keys of layer {role.owner} at compress_ratio={role.ratio}, there are "
            f"{have}: the owner runs first in every call, with the same ratio"
        )
    return None if cache is None else cache.view()


def _make_key_norm(kind: KeyNorm, width: int, eps: float) -> nn.Module | None:
    if kind == "none":
        return None
    return RMSNorm(width, eps) if kind == "rms" else nn.LayerNorm(width, eps)


def _check_config(heads: int, width: int, rope: int, layout: str, place: str, key_norm: str) -> None:
    if heads < 1 or width < 1:
        raise ValueError(f"index_n_heads={heads}, index_head_dim={width}: must be at least 1")
    if not 2 <= rope <= width or rope % 2:
        raise ValueError(f"rope_head_dim={rope}: must be even, from 2 to index_head_dim={width}")
    for name, value, allowed in (
        ("rope_layout", layout, get_args(Layout)),
        ("rope_place", place, get_args(Place)),
        ("key_norm", key_norm, get_args(KeyNorm)),
    ):
        if value not in allowed:
            raise ValueError(f"{name}={value!r}: must be one of {allowed}")


def _check_call(x: Tensor, qr: Tensor, start_pos: int, freqs_cis: Tensor, offset: int) -> None:
    if isinstance(start_pos, Tensor):
        raise ValueError("start_pos is a tensor: ragged (padded) batches are not supported, run them one by one")
    if start_pos < 0 or offset < 0:
        raise ValueError(f"start_pos={start_pos}, offset={offset}: must not be negative")
    if x.dim() != 3 or qr.dim() != 3 or x.shape[:2] != qr.shape[:2]:
        raise ValueError(f"x {tuple(x.shape)} and qr {tuple(qr.shape)}: must be [b, s, dim] and [b, s, q_lora_rank]")
    if x.shape[0] < 1 or x.shape[1] < 1:
        raise ValueError(f"x {tuple(x.shape)}: needs at least one sequence and one token")
    if freqs_cis.shape[0] < start_pos + x.shape[1]:
        raise ValueError(
            f"freqs_cis has {freqs_cis.shape[0]} rows: positions up to {start_pos + x.shape[1] - 1} are needed"
        )
