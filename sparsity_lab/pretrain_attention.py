"""Attention and selection in training: whole sequences at once, few large products, nothing waits for the device.

A `TrainingCall` takes the place of an inference `Call`. Attention runs over masks instead of gathered keys, tile by
tile of query rows, so that each tile only looks at keys up to its last row. Indexers learn on the side: at every
`stride`-th row the attention that is computed anyway is their target, and their inputs are detached, so the language
loss never reaches them nor their loss anything else.

Shapes: b batch, s tokens (all of a sequence), h heads, d head dim, n compressed positions, R sampled rows.
Source: the indexer training of the DeepSeek V3.2 report; a layer that reuses a selection counts in its source's target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsity_lab.distill import kl_to_dense
from sparsity_lab.indexer import index_scores
from sparsity_lab.models.deepseek_v41.attention import Attention, Call
from sparsity_lab.models.deepseek_v41.cache import Cache
from sparsity_lab.models.deepseek_v41.model import DeepseekV41Model
from sparsity_lab.selection import adjust_scores, block_scores

Stage = Literal["dense", "sparse", "pool"]
ALIGN = 8  # keys and channels come in multiples of this many, as matrix units like them
NEVER = float("-inf")


def weigh(logits: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attention probabilities of a tile: logits [b, rows, h, m], bias [1 or b, rows, m]."""
    return torch.add(bias.unsqueeze(-2), logits, alpha=scale).softmax(dim=-1)


@dataclass
class IndexTarget:
    """What one index source is to learn from: its scores and the attention of the layers that it serves."""

    scores: Tensor  # float32 [b, R, n], with gradient to the indexer
    allowed: Tensor | None  # bool [b, s, n], its selection; None while everything visible is attended
    ratio: int
    mass: Tensor | float = 0.0  # [b, R, n], sum over heads and layers


@dataclass
class TrainingCall(Call):
    """One forward of whole sequences.

    Args:
        stage: dense = attend to everything visible; sparse = to the top-k of the indexers; pool = as sparse, with the
            candidate pool.
        tile: query rows of a tile, a multiple of `stride`; phase: the first of the rows indexers are trained on,
            below `stride`.
        weigh: what computes the function of this name.
    """

    stage: Stage = "dense"
    tile: int = 512
    stride: int = 16
    phase: int = 0
    weigh: Callable[[Tensor, Tensor, float], Tensor] = weigh
    targets: dict[int, IndexTarget] = field(default_factory=dict)  # index source -> what it learns from
    pool: Tensor | None = None  # bool [b, s, n]
    keys: dict[int, Tensor] = field(default_factory=dict)  # KV source -> index keys [b, n, d]
    biases: dict[tuple[int | None, int, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.stage not in get_args(Stage):
            raise ValueError(f"stage={self.stage!r}: must be one of {', '.join(get_args(Stage))}")
        if self.tile % self.stride or not 0 <= self.phase < self.stride:
            raise ValueError(
                f"tile={self.tile}, stride={self.stride}, phase={self.phase}: the tile must be a multiple of the "
                "stride, the phase below it"
            )

    @classmethod
    def over(cls, model: DeepseekV41Model, length: int, **options: object) -> TrainingCall:
        """For sequences of `length` tokens of a model."""
        return cls(0, Cache(), lambda far: model.freqs(far, length), **options)  # type: ignore[arg-type]

    @property
    def rows(self) -> slice:
        """Where the indexers are trained."""
        return slice(self.phase, None, self.stride)

    def select(self, layer: Attention, x: Tensor, qr: Tensor, latent: Tensor | None, table: Tensor) -> Tensor | None:
        """bool [b, s, n], what the layer's index source selects; None while everything is attended."""
        source = layer.topology.index_source(layer.layer)
        if source is None:
            return None
        if layer.indexer is not None:
            self.targets[source] = self._index(layer, x.detach(), qr.detach(), latent, table[: x.shape[1]])
        return self.targets[source].allowed

    def _index(self, layer: Attention, x: Tensor, qr: Tensor, latent: Tensor | None, table: Tensor) -> IndexTarget:
        indexer, role, rows = layer.indexer, layer.role, self.rows
        assert indexer is not None
        if role.owner == role.layer:
            assert latent is not None
            self.keys[role.layer] = indexer.keys(latent.detach(), table[:: role.ratio][: latent.shape[1]])
        keys = self.keys[role.owner]
        queries, weights = indexer.queries(qr[:, rows], table[rows]), indexer.head_weights(x[:, rows])
        scores = index_scores(queries, keys, weights, tile_elements=1 << 30)
        selected = None if self.stage == "dense" else self._selected(layer, x, qr, keys, table)
        return IndexTarget(scores, selected, role.ratio)

    @torch.no_grad()
    def _selected(self, layer: Attention, x: Tensor, qr: Tensor, keys: Tensor, table: Tensor) -> Tensor:
        """bool [b, s, n]: the top-k of every row, in the pool where there is one. Ties fall as the device has it."""
        indexer, role, n = layer.indexer, layer.role, keys.shape[1]
        assert indexer is not None
        queries, weights = indexer.queries(qr, table), indexer.head_weights(x)
        selected, pools = [], []
        for first in range(0, x.shape[1], self.tile):
            part = slice(first, first + self.tile)
            at = torch.arange(first, first + queries[:, part].shape[1], device=x.device)
            scores = index_scores(queries[:, part], keys, weights[:, part], tile_elements=1 << 30)
            scores = adjust_scores(scores, at, role.ratio)
            if self.stage == "pool" and role.candidate == "source":
                newest = ((at + 1) // role.ratio - 1) // role.block_size
                blocks = block_scores(scores, role.block_size)
                pinned = torch.arange(blocks.shape[-1], device=x.device) == newest.unsqueeze(-1)
                kept = _best(blocks.masked_fill(pinned, float("inf")), role.topk_blocks)
                pools.append(kept.repeat_interleave(role.block_size, dim=-1)[..., :n])
            if self.stage == "pool" and role.candidate == "consumer":
                assert self.pool is not None
                scores = scores.masked_fill(~self.pool[:, part], NEVER)
            selected.append(_best(scores, role.topk))
        if pools:
            self.pool = torch.cat(pools, dim=1)
        return torch.cat(selected, dim=1)

    def attend(
        self, layer: Attention, q: Tensor, window: Tensor, compressed: Tensor, selected: Tensor | None
    ) -> Tensor:
        """As in inference, up to rounding; adds to the target of the layer's index source. [b, s, h, d]."""
        seqlen, heads, width = q.shape[1:]
        scale, reach = width**-0.5, layer.config.sliding_window
        # one more channel, in which only a key of its own answers, with the sink
        sink = (layer.attn_sink / scale).to(q.dtype).view(1, 1, heads, 1).expand(*q.shape[:3], 1)
        q = torch.cat([q, sink, q.new_zeros(*q.shape[:3], ALIGN - 1)], dim=-1)
        answers = F.pad(q.new_ones(q.shape[0], 1, 1), (width, ALIGN - 1, ALIGN - 1, 0))
        window, compressed = F.pad(window, (0, ALIGN)), F.pad(compressed, (0, ALIGN))
        outs, masses = [], []
        for first in range(0, seqlen, self.tile):
            last = min(first + self.tile, seqlen)
            begin, most = max(0, first - reach), last // layer.ratio if layer.ratio else 0
            keys = torch.cat([window[:, begin:last], compressed[:, :most], answers], dim=1)
            logits = (q[:, first:last].flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, (-1, heads))
            bias = self._bias(layer, begin, first, last, q, selected)
            p = self.weigh(logits, bias, scale)
            outs.append((p.flatten(1, 2) @ keys[..., :width]).unflatten(1, (-1, heads)))
            if most:
                seen = p.detach()[:, self.rows, :, last - begin : last - begin + most].float().sum(2)
                masses.append(F.pad(seen, (0, compressed.shape[1] - most)))
        if masses:
            source = layer.topology.index_source(layer.layer)
            assert source is not None
            self.targets[source].mass = self.targets[source].mass + torch.cat(masses, dim=1)
        return torch.cat(outs, dim=1)

    def _bias(
        self, layer: Attention, begin: int, first: int, last: int, like: Tensor, selected: Tensor | None
    ) -> Tensor:
        """0 where a tile's rows may look, -inf elsewhere: [1 or b, rows, near + far + ALIGN]. Shared between layers."""
        source = layer.topology.index_source(layer.layer)
        key = (None if selected is None else source, layer.ratio, first)
        if key not in self.biases:
            reach, device = layer.config.sliding_window, like.device
            at = torch.arange(first, last, device=device).unsqueeze(-1)
            token = torch.arange(begin, last, device=device)
            seen = [(token <= at) & (token > at - reach)]
            if layer.ratio:
                j = torch.arange(last // layer.ratio, device=device)
                seen.append(j < (at + 1) // layer.ratio)
            seen.append((torch.arange(ALIGN, device=device) == ALIGN - 1).expand(last - first, ALIGN))
            parts = [part.unsqueeze(0) for part in seen]
            if selected is not None:
                parts[1] = selected[:, first:last, : len(j)]
                parts = [part.expand(len(selected), -1, -1) for part in parts]
            allowed = torch.cat(parts, dim=-1)
            self.biases[key] = like.new_zeros(allowed.shape).masked_fill_(~allowed, NEVER)
        return self.biases[key]

    def index_losses(self) -> dict[int, Tensor]:
        """Index source -> KL(p ‖ softmax(I)) in nats, mean over sampled rows: over everything visible in the dense
        stage, over the selection afterwards."""
        losses = {}
        for source, target in self.targets.items():
            n, mass = target.scores.shape[-1], target.mass
            assert isinstance(mass, Tensor)
            allowed = self._visible(target) if target.allowed is None else target.allowed[:, self.rows]
            nothing = torch.zeros(n, dtype=torch.bool, device=mass.device)
            nothing[:1] = True  # a row that sees nothing yet needs a place for its softmax, and adds 0
            allowed = allowed | (nothing & ~allowed.any(-1, keepdim=True))
            losses[source] = kl_to_dense(
                target.scores.flatten(0, 1), mass.flatten(0, 1), allowed.expand_as(mass).flatten(0, 1)
            )
        return losses

    def _visible(self, target: IndexTarget) -> Tensor:
        """bool [1, R, n]."""
        n, count = target.scores.shape[-1], target.scores.shape[1]
        at = torch.arange(count, device=target.scores.device) * self.stride + self.phase
        return (torch.arange(n, device=at.device) < ((at + 1) // target.ratio).unsqueeze(-1)).unsqueeze(0)

    @torch.no_grad()
    def relative_coverage(self, k: int) -> dict[int, Tensor]:
        """Index source -> share of the best k positions' mass that its own best k hold, mean over the sampled rows that
        see more than k; needs the dense stage."""
        found = {}
        for source, target in self.targets.items():
            assert isinstance(target.mass, Tensor)
            visible = self._visible(target)
            rows = (visible.sum(-1) > k).squeeze(0)
            scores = target.scores.detach().masked_fill(~visible, NEVER)[:, rows]
            mass = target.mass[:, rows]
            if not mass.numel():
                continue
            kept = mass.gather(-1, scores.topk(k, dim=-1).indices).sum(-1)
            found[source] = (kept / mass.topk(k, dim=-1).values.sum(-1).clamp_min(1e-20)).mean()
        return found


def _best(scores: Tensor, k: int) -> Tensor:
    """bool [..., n]: the k best of the reachable."""
    chosen = scores.topk(min(k, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True) & (scores > NEVER)
