"""Attention of DeepSeek V4.1: raw window and selected compressed positions in one softmax, with a sink per head.

Shapes: b batch, s query rows of a call, h heads (of this rank), d head dim, n compressed positions, k selected.
K = V: one latent a token, shared by all heads. Source: DeepSeek V4.1's inference code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsity_lab.activations import CompressedKeys, IndexActivations, LayerActivations, Observer
from sparsity_lab.compressor import Compressor, CompressorState
from sparsity_lab.index_state import KeyCache
from sparsity_lab.indexer import Indexer
from sparsity_lab.models.deepseek_v41.cache import Cache, WindowCache
from sparsity_lab.models.deepseek_v41.config import DeepseekV41Config
from sparsity_lab.models.deepseek_v41.parallel import Shard
from sparsity_lab.norm import RMSNorm
from sparsity_lab.quant import fake_quant
from sparsity_lab.rope import rotate_channels
from sparsity_lab.selection import as_mask

TILE_ELEMENTS = 1 << 24  # numbers a tile of query rows may hold at once: gathered KV and logits
GATHER_COST = 8  # of fetching one selected key, in heads' worth of products with it


@dataclass
class Call:
    """What one forward call tells every layer."""

    start: int  # absolute position of its first token
    cache: Cache
    freqs: Callable[[bool], Tensor]  # (compressed layer?) -> rotary table [≥ start + s, rope/2]
    dense: bool = False  # attend to every visible compressed position instead of the selected ones
    observer: Observer | None = None
    observed: frozenset[int] = frozenset()
    index: dict[int, IndexActivations] = field(default_factory=dict)  # index source -> what it scored with

    def select(self, layer: Attention, x: Tensor, qr: Tensor, latent: Tensor | None, table: Tensor) -> Tensor | None:
        """Top-k of a layer's index source, int32 [b, s, ≤ k]; None in a window-only layer."""
        return layer.select(x, qr, latent, self, table)

    def attend(
        self, layer: Attention, q: Tensor, window: Tensor, compressed: Tensor, selected: Tensor | None
    ) -> Tensor:
        """What a layer's heads make of its keys, [b, s, h, d]; see the function of this name."""
        c = layer.config
        return attend(
            q, window, compressed, selected, layer.attn_sink,
            start=self.start, window_size=c.sliding_window, ratio=layer.ratio,
        )  # fmt: skip


class Attention(nn.Module):
    """One layer's attention, with compressor and indexer where the topology gives it that role."""

    def __init__(self, config: DeepseekV41Config, layer: int, shard: Shard) -> None:
        super().__init__()
        c, topology = config, config.topology
        self.config, self.layer, self.shard, self.topology = config, layer, shard, topology
        self.ratio = c.compress_ratios[layer]
        self.kv_source = topology.kv_source(layer)
        self.heads = shard.part(c.num_attention_heads, "num_attention_heads")
        self.groups = shard.part(c.o_groups, "o_groups")
        self.attn_sink = nn.Parameter(torch.zeros(self.heads, dtype=torch.float32))
        self.wq_a = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.wq_b = nn.Linear(c.q_lora_rank, self.heads * c.head_dim, bias=False)
        self.wkv = nn.Linear(c.hidden_size, c.head_dim, bias=False)
        self.kv_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.wo_a = nn.Linear(self.heads * c.head_dim // self.groups, self.groups * c.o_lora_rank, bias=False)
        self.wo_b = nn.Linear(self.groups * c.o_lora_rank, c.hidden_size, bias=False)
        is_source = layer in topology.kv_source_layers
        self.compressor = Compressor(c.hidden_size, c.head_dim, self.ratio, c.rms_norm_eps) if is_source else None
        self.indexer: Indexer | None = None
        if layer in topology.index_source_layers:
            self.indexer = Indexer(
                c.hidden_size, c.index_n_heads, c.index_head_dim, c.qk_rope_head_dim, c.q_lora_rank,
                c.head_dim if is_source else None, c.rms_norm_eps, rope_layout="adjacent", rope_place="last",
                quant=c.index_quant, local_heads=shard.part(c.index_n_heads, "index_n_heads"),
                sum_ranks=None if shard.world == 1 else shard.sum,
            )  # fmt: skip
            self.role = topology.index_role(
                layer,
                topk=c.index_topk,
                topk_blocks=c.candidate_topk_blocks,
                block_size=c.candidate_block_size,
            )

    def forward(self, x: Tensor, call: Call) -> Tensor:
        """x [b, s, hidden] -> [b, s, hidden]."""
        c, start, seqlen = self.config, call.start, x.shape[1]
        table = call.freqs(self.ratio > 0)
        freqs = table[start : start + seqlen]
        qr = self.q_norm(self.wq_a(x))
        q = self._rotate(self.wq_b(qr).unflatten(-1, (self.heads, c.head_dim)), freqs)
        kv = fake_quant(self._rotate(self.kv_norm(self.wkv(x)), freqs), c.window_quant)
        window = call.cache.windows.setdefault(self.layer, WindowCache(c.sliding_window)).extend(kv)
        latent = self._compress(x, call, table)
        selected = call.select(self, x, qr, latent, table)
        compressed = self._compressed(call, like=kv)
        chosen = None if call.dense else selected
        out = call.attend(self, q, window, compressed, chosen)
        if call.observer is not None and self.layer in call.observed:
            call.observer(self._activations(q, window, x, out, compressed, chosen, call))
        out = self._rotate(out, freqs, inverse=True)
        grouped, weight = (
            out.flatten(2).unflatten(2, (self.groups, -1)),
            self.wo_a.weight.unflatten(0, (self.groups, -1)),
        )
        low_rank = torch.einsum("bsgi,gri->bsgr", grouped, weight)
        return self.shard.sum(self.wo_b(low_rank.flatten(2)))

    def _rotate(self, x: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
        width = self.config.qk_rope_head_dim
        return rotate_channels(x, freqs, width, place="last", layout="adjacent", inverse=inverse)

    def _compress(self, x: Tensor, call: Call, table: Tensor) -> Tensor | None:
        """At a KV source: the latents [b, m, d] of the groups this call completes, also put into the cache."""
        if self.compressor is None:
            return None
        cache = call.cache
        latent = self.compressor(x, cache.groups.setdefault(self.layer, CompressorState()))
        entries = cache.compressed.setdefault(self.layer, KeyCache())
        if latent is not None:
            # a group stands at its first token
            at = slice(entries.length * self.ratio, None, self.ratio)
            freqs = table[at][: latent.shape[1]]
            entries.append(fake_quant(self._rotate(latent, freqs), self.config.kv_quant))
        return latent

    def select(self, x: Tensor, qr: Tensor, latent: Tensor | None, call: Call, table: Tensor) -> Tensor | None:
        """Top-k of this layer's index source, int32 [b, s, ≤ k]; None in a window-only layer."""
        if not self.ratio:
            return None
        state = call.cache.index
        if self.indexer is None:
            return state.latest_topk(call.start, x.shape[1])
        picks = self.indexer(x, qr, latent, call.start, table, state, self.role)
        if call.observer is not None:
            call.index[self.layer] = self._index_activations(x, qr, call, table)
        return picks

    def _compressed(self, call: Call, like: Tensor) -> Tensor:
        """Compressed KV [b, n, d] of this layer's source as of this call."""
        entries = None if self.kv_source is None else call.cache.compressed[self.kv_source].view()
        return like[:, :0] if entries is None else entries

    def _index_activations(self, x: Tensor, qr: Tensor, call: Call, table: Tensor) -> IndexActivations:
        """What the indexer scored with, all heads."""
        assert self.indexer is not None
        keys = call.cache.index.keys[self.role.owner].view()
        q = self.indexer.queries(qr, table[call.start : call.start + x.shape[1]])
        return IndexActivations(
            layer=self.layer,
            q=self.shard.gather(q, 2),
            w=self.shard.gather(self.indexer.head_weights(x), 2),
            k=q[:, :0, 0] if keys is None else keys,
            ratio=self.ratio,
        )

    def _activations(
        self, q: Tensor, window: Tensor, x: Tensor, out: Tensor, compressed: Tensor, selected: Tensor | None, call: Call
    ) -> LayerActivations:
        """For the observer: all heads, keys with an axis for their one head. `window` holds every token of a prompt."""
        keys = CompressedKeys(compressed.unsqueeze(1), compressed.unsqueeze(1), self.ratio) if self.ratio else None
        source = self.topology.index_source(self.layer)
        return LayerActivations(
            layer=self.layer,
            q=self.shard.gather(q, 2).transpose(1, 2),
            k=window.unsqueeze(1),
            v=window.unsqueeze(1),
            x=x,
            output=self.shard.gather(out, 2),
            scale=self.config.head_dim**-0.5,
            sink=self.shard.gather(self.attn_sink.detach(), 0),
            window=self.config.sliding_window,
            compressed=keys,
            selected=selected,
            index=None if source is None else call.index[source],
        )


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
    tile_elements: int = TILE_ELEMENTS,
) -> Tensor:
    """softmax over the last `window_size` tokens, the selected compressed positions and the sink, times the values.

    Args:
        q: [b, s, h, d], rows at absolute positions start … start + s - 1.
        window: [b, p + s, d], the tokens' KV; the last s are those of the rows, p earlier ones precede them.
        compressed: [b, n, d]; selected: int32 [b, s, k], -1 = nothing; None = every visible position.
        sink: [h] logits, in the denominator only; ratio: tokens a compressed position (0 = there are none).
        tile_elements: bound on the numbers held at once; rows are taken in tiles (at least one row is).
    Returns:
        [b, s, h, d] in q's dtype; logits and softmax in float32.
    """
    seqlen, heads, width = q.shape[1:]
    earlier, n = window.shape[1] - seqlen, compressed.shape[1]
    # gathering moves d numbers a selected key, which only pays when few of the keys are selected
    gather = selected is not None and selected.shape[2] * (1 + GATHER_COST / heads) < n / 2
    keys = selected.shape[2] * (1 + width // heads) if gather and selected is not None else n
    step = max(1, min(window_size, tile_elements // (q.shape[0] * heads * (keys + 2 * window_size))))
    padded = F.pad(compressed, (0, 0, 0, 1)) if gather else compressed  # what -1 looks up: zeros
    tiles = []
    for first in range(0, seqlen, step):
        rows = slice(first, min(first + step, seqlen))
        at = torch.arange(rows.start, rows.stop, device=q.device).unsqueeze(-1)
        near = slice(max(0, earlier + first - window_size + 1), earlier + rows.stop)
        token = torch.arange(near.start, near.stop, device=q.device) - earlier
        outside = (token > at) | (token <= at - window_size)
        chosen = None if selected is None else selected[:, rows]
        if gather and chosen is not None:
            far, blocked = _gathered(padded, chosen)
        else:
            visible = (start + at + 1) // ratio if ratio else at.new_zeros(at.shape)
            far, blocked = _masked(compressed, chosen, visible)
        tiles.append(_softmax_sum(q[:, rows], window[:, near], outside, far, blocked, sink, width**-0.5))
    return torch.cat(tiles, dim=1)


def _gathered(padded: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen entries themselves: [b, n + 1, d], [b, T, k] -> values [b, T, k, d], blocked [b, T, k]."""
    blocked = chosen < 0
    batch = torch.arange(padded.shape[0], device=padded.device).view(-1, 1, 1)
    return padded[batch, chosen.masked_fill(blocked, padded.shape[1] - 1).long()], blocked


def _masked(compressed: Tensor, chosen: Tensor | None, visible: Tensor) -> tuple[Tensor, Tensor]:
    """All entries some row may see: [b, n, d], visible [T, 1] -> values [b, m, d], blocked [b or 1, T, m]."""
    most = int(visible[-1])
    hidden = (torch.arange(most, device=visible.device) >= visible).unsqueeze(0)
    if chosen is None:
        return compressed[:, :most], hidden
    return compressed[:, :most], ~as_mask(chosen, most)


def _softmax_sum(
    q: Tensor, near: Tensor, outside: Tensor, far: Tensor, blocked: Tensor, sink: Tensor, scale: float
) -> Tensor:
    """A tile: q [b, T, h, d], near [b, L, d], outside [T, L], far [b, m, d] or [b, T, m, d], blocked [b or 1, T, m]."""
    raw = (_logits(q, near) * scale).masked_fill(outside.unsqueeze(1), float("-inf"))
    more = (_logits(q, far) * scale).masked_fill(blocked.unsqueeze(2), float("-inf"))
    logits = torch.cat([raw, more, sink.float().view(1, 1, -1, 1).expand(*raw.shape[:3], 1)], dim=-1)
    p = logits.softmax(dim=-1).to(q.dtype)
    return _values(p[..., : raw.shape[-1]], near) + _values(p[..., raw.shape[-1] : -1], far)


def _logits(q: Tensor, keys: Tensor) -> Tensor:
    """float32 [b, T, h, m] of keys [b, m, d] or [b, T, m, d]."""
    if keys.dim() == 3:
        return (q.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, q.shape[1:3]).float()
    return (q @ keys.transpose(2, 3)).float()


def _values(p: Tensor, values: Tensor) -> Tensor:
    """p [b, T, h, m] times values [b, m, d] or [b, T, m, d]: [b, T, h, d]."""
    if values.dim() == 3:
        return (p.flatten(1, 2) @ values).unflatten(1, p.shape[1:3])
    return p @ values
