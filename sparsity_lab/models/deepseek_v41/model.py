"""The DeepSeek V4.1 text model: embedding, hyper-connected blocks, head.

Shapes: b batch, s tokens of a call, c stream copies (hc_mult), d hidden size.
Source: DeepSeek V4.1's inference code; parameter names are those of its checkpoints, except that routed experts are
stacked (see `checkpoint.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from sparsity_lab.activations import Observer
from sparsity_lab.models.deepseek_v41.attention import Attention, Call
from sparsity_lab.models.deepseek_v41.cache import Cache
from sparsity_lab.models.deepseek_v41.config import DeepseekV41Config
from sparsity_lab.models.deepseek_v41.engram import Engram, NgramHash
from sparsity_lab.models.deepseek_v41.hyper import Mix, collapse, expand, mix, sinkhorn
from sparsity_lab.models.deepseek_v41.moe import MoE
from sparsity_lab.models.deepseek_v41.parallel import SINGLE, Shard
from sparsity_lab.norm import RMSNorm
from sparsity_lab.rope import precompute_freqs_cis


class Block(nn.Module):
    """Attention and mixture of experts of one layer, each between a collapse and an expansion of the streams."""

    def __init__(self, config: DeepseekV41Config, layer: int, shard: Shard) -> None:
        super().__init__()
        c = config
        self.config, self.sinkhorn = c, sinkhorn
        rows, width = c.hc_mult * (2 + c.hc_mult), c.hc_mult * c.hidden_size
        for site in ("attn", "ffn"):
            self.register_parameter(f"hc_{site}_fn", nn.Parameter(torch.empty(rows, width, dtype=torch.float32)))
            self.register_parameter(f"hc_{site}_base", nn.Parameter(torch.zeros(rows, dtype=torch.float32)))
            self.register_parameter(f"hc_{site}_scale", nn.Parameter(torch.ones(3, dtype=torch.float32)))
        self.engram = None
        if c.engram is not None and layer in c.engram.layer_ids:
            self.engram = Engram(c, c.engram.layer_ids.index(layer))
        self.attn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attn = Attention(c, layer, shard)
        self.ffn_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.ffn = MoE(c, shard)

    def forward(self, streams: Tensor, pre: Tensor, call: Call, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """streams [b, s, c, d], pre [b, s, c] of the site before, n-gram rows [b, s, columns] -> the same two."""
        if self.engram is not None and rows is not None:
            streams = self.engram(streams, rows)
        site = self._mix("attn", streams)
        streams = expand(self.attn(self.attn_norm(collapse(streams, pre)), call), streams, site)
        pre, site = site.pre, self._mix("ffn", streams)
        streams = expand(self.ffn(self.ffn_norm(collapse(streams, pre))), streams, site)
        return streams, site.pre

    def _mix(self, site: str, streams: Tensor) -> Mix:
        fn, base, scale = (self.get_parameter(f"hc_{site}_{part}") for part in ("fn", "base", "scale"))
        c = self.config
        return mix(
            streams, fn, base, scale,
            sinkhorn_iters=c.hc_sinkhorn_iters, eps=c.hc_eps, norm_eps=c.rms_norm_eps, sinkhorn=self.sinkhorn,
        )  # fmt: skip


class Backbone(nn.Module):
    """Everything but the head; `model.` in the unquantised layout."""

    def __init__(self, config: DeepseekV41Config, shard: Shard) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer, shard) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DeepseekV41Model(nn.Module):
    """The model, computing logits call by call.

    Args:
        shard: the part of heads and experts this process holds.
    """

    def __init__(self, config: DeepseekV41Config, shard: Shard = SINGLE) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        self.model = Backbone(config, shard)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.hash: NgramHash | None = None  # with engram tables: what `layout.build` puts here
        self._tables: dict[bool, Tensor] = {}

    def forward(
        self, input_ids: Tensor, cache: Cache | None = None, *, last_only: bool = False, **options: Any
    ) -> Tensor:
        """Logits of the tokens that follow those in the cache: what the head makes of `hidden`.

        Args:
            last_only: logits of the last token alone. All others are those of `hidden`.
        Returns:
            float32 [b, s, vocab_size], or [b, 1, vocab_size].
        """
        hidden = self.hidden(input_ids, cache, **options)
        hidden = hidden[:, -1:] if last_only else hidden
        return nn.functional.linear(hidden.float(), self.lm_head.weight.float())

    def hidden(
        self,
        input_ids: Tensor,
        cache: Cache | None = None,
        *,
        attention_mask: Tensor | None = None,
        dense: bool = False,
        observer: Observer | None = None,
        layers: Collection[int] = (),
    ) -> Tensor:
        """What the head reads, [b, s, d], of the tokens that follow those in the cache.

        One call, any chunks, or token by token give the same: a query sees the complete groups before it, whenever they
        came.

        Args:
            input_ids: int64 [b, s]; all sequences have the same length, without padding.
            cache: updated; None = a prompt on its own.
            attention_mask: only to refuse padding.
            dense: attend to every visible compressed position instead of the selected ones.
            observer: called once for each of `layers`, in order; needs a whole prompt (an empty cache).
        Raises:
            ValueError: padded, empty or foreign input, or a cache that does not fit.
        """
        cache = Cache() if cache is None else cache
        self._check_input(input_ids, attention_mask, cache, observer)
        start = cache.begin(input_ids.shape[0])
        end = start + input_ids.shape[1]
        call = Call(start, cache, lambda far: self.freqs(far, end), dense, observer, frozenset(layers))
        hidden = self.run(input_ids, call, self._ngrams(input_ids, cache))
        cache.end(input_ids.shape[1])
        return hidden

    def run(self, input_ids: Tensor, call: Call, rows: Tensor | None = None) -> Tensor:
        """All layers, [b, s] -> [b, s, d]; nothing is checked, and no device is waited for. rows: of engram tables."""
        copies = self.config.hc_mult
        streams = self.model.embed(input_ids).unsqueeze(2).expand(-1, -1, copies, -1)
        pre = streams.new_zeros(*streams.shape[:3], dtype=torch.float32)
        pre[..., 0] = 1
        for block in self.model.layers:
            streams, pre = block(streams, pre, call, rows)
        return self.model.norm(collapse(streams, pre))

    def _ngrams(self, input_ids: Tensor, cache: Cache) -> Tensor | None:
        """Rows of the engram tables for this call's tokens; None without tables."""
        if self.config.engram is None:
            return None
        assert self.hash is not None, "a model with engram tables comes from layout.build"
        return self.hash(input_ids, cache)

    def freqs(self, compressed: bool, length: int) -> Tensor:
        """Rotary table of at least `length` positions, complex64 on the model's device; grown by doubling."""
        table = self._tables.get(compressed)
        device = self.lm_head.weight.device
        if table is None or table.shape[0] < length or table.device != device:
            c, yarn = self.config, self.config.yarn if compressed else None
            # kept for later calls, which may train: not one of autograd's inference tensors
            with torch.inference_mode(False):
                table = precompute_freqs_cis(
                    c.qk_rope_head_dim,
                    1 << (length - 1).bit_length(),
                    0 if yarn is None else yarn.original_max_position_embeddings,
                    c.compress_rope_theta if compressed else c.rope_theta,
                    1.0 if yarn is None else yarn.factor,
                    32 if yarn is None else yarn.beta_fast,
                    1 if yarn is None else yarn.beta_slow,
                ).to(device)
            self._tables[compressed] = table
        return table

    def check_ids(self, input_ids: Tensor) -> None:
        """Raise ValueError unless these are tokens of this vocabulary, [b, s]."""
        if input_ids.dim() != 2 or 0 in input_ids.shape or input_ids.is_floating_point():
            raise ValueError(f"input_ids {input_ids.dtype} {list(input_ids.shape)}: must be whole numbers [b, s]")
        low, high = (int(x) for x in input_ids.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(f"input_ids {low} to {high}: the vocabulary has 0 to {self.config.vocab_size - 1}")

    def _check_input(
        self, input_ids: Tensor, attention_mask: Tensor | None, cache: Cache, observer: Observer | None
    ) -> None:
        self.check_ids(input_ids)
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError(
                "attention_mask has zeros: padded batches are not supported, run ragged prompts one by one"
            )
        if observer is not None and cache.length:
            raise ValueError(f"observer: needs a whole prompt, but the cache holds {cache.length} tokens already")
