"""Dense attention mass of some query rows of one layer, streamed over row tiles.

Memory is O(tile x t): only the probabilities of one tile of rows exist at a time.

Shapes: h query heads, k key heads, g selection groups (1 with share=layer, k with share=kv_head), R rows of the tile,
t tokens, n = t // ratio compressed positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsity_lab.activations import LayerActivations, LeftOut

SHARES = ("layer", "kv_head")
# Masses are multiples of 2**-48 held in float64. A row's mass is at most 1, so every sum of them is exact: the same to
# the last bit in any order, on any device, with one cell or with hundreds.
MASS_UNIT = 2.0**-48


def attention_probabilities(acts: LayerActivations, rows: Tensor) -> Tensor:
    """The layer's own softmax for some rows of a one-document batch, float32 [h, R, t].

    softmax(softcap(q k^T scale) + causal and window mask), in float32 whatever the layer's dtype; a sink adds to the
    denominator only, so rows then sum to less than 1. `rows` int64 [R] are indices along the s axis, or positions where
    the layer holds some rows only.

    Raises:
        ValueError: more than one document, query heads that are no multiple of the key heads, or rows not held.
    """
    logits = _logits(acts, rows)
    probabilities = logits.softmax(dim=-1)
    if acts.sink is not None:
        probabilities *= torch.sigmoid(logits.logsumexp(dim=-1, keepdim=True) - acts.sink.float().view(-1, 1, 1))
    return probabilities


def sink_share(acts: LayerActivations, rows: Tensor) -> Tensor | None:
    """What the sink takes of each row, float32 [h, R, 1]; None without a sink. Not 1 - Σp: that difference is known to
    1e-7 only, far off for a selection that attends to little more than the sink."""
    if acts.sink is None:
        return None
    return torch.sigmoid(acts.sink.float().view(-1, 1, 1) - _logits(acts, rows).logsumexp(dim=-1, keepdim=True))


def _logits(acts: LayerActivations, rows: Tensor) -> Tensor:
    """Scaled, soft-capped, masked logits, float32 [h, R, t]."""
    if acts.q.shape[0] != 1:
        raise ValueError(f"layer {acts.layer}: a batch of {acts.q.shape[0]}, must be one document")
    q, k = acts.query_rows(rows).float(), acts.k[0].float()
    heads, (kv_heads, t, _) = q.shape[0], k.shape
    # query heads i*r .. i*r+r-1 read key head i, as in every published GQA model
    grouped = per_group(q, "kv_head", kv_heads).flatten(1, 2) * acts.scale
    logits = torch.matmul(grouped, k.transpose(1, 2)).view(heads, rows.numel(), t)
    if acts.softcap is not None:
        logits = logits.div_(acts.softcap).tanh_().mul_(acts.softcap)
    query = acts.positions(rows).unsqueeze(-1)
    token = torch.arange(t, device=q.device)
    hidden = token > query
    if acts.window is not None:
        hidden |= token <= query - acts.window
    return logits.masked_fill_(hidden, float("-inf"))


def group_sum(mass: Tensor, ratio: int) -> Tensor:
    """Sum over the tokens of every complete group: [..., t] -> [..., t // ratio]."""
    if ratio == 1:
        return mass
    n = mass.shape[-1] // ratio
    return mass[..., : n * ratio].unflatten(-1, (n, ratio)).sum(dim=-1)


def exact(mass: Tensor) -> Tensor:
    """Round a mass to multiples of MASS_UNIT, float64."""
    return (mass.double() / MASS_UNIT).round_().mul_(MASS_UNIT)


def per_group(per_head: Tensor, share: str, kv_heads: int) -> Tensor:
    """View [h, ...] as [g, heads of the group, ...].

    Raises:
        ValueError: an unknown share, or heads that do not divide among the key heads.
    """
    if share not in SHARES:
        raise ValueError(f"share={share!r}: must be one of {', '.join(SHARES)}")
    heads, groups = per_head.shape[0], 1 if share == "layer" else kv_heads
    if heads % groups:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} key heads")
    return per_head.view(groups, heads // groups, *per_head.shape[1:])


@dataclass
class RowTile:
    """Some rows of one layer with their dense probabilities; everything else about them is derived once and kept."""

    acts: LayerActivations
    rows: Tensor  # int64 [R], indices along s, which are absolute positions for a whole document
    document: str  # the document's id
    seed: int
    probabilities: Tensor  # float32 [h, R, t]
    layer_cache: dict[Any, Any] = field(default_factory=dict)  # shared by the tiles of a layer
    _cache: dict[Any, Any] = field(default_factory=dict)

    @property
    def kv_heads(self) -> int:
        return self.acts.k.shape[1]

    @property
    def length(self) -> int:
        return self.acts.k.shape[2]

    def groups(self, share: str) -> int:
        return 1 if share == "layer" else self.kv_heads

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """Compute once a tile."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def keep_for_layer(self, key: Any, make: Callable[[], Any]) -> Any:
        """Compute once a layer (for what does not depend on the rows, such as compressed keys)."""
        if key not in self.layer_cache:
            self.layer_cache[key] = make()
        return self.layer_cache[key]

    def mean_mass(self, share: str) -> Tensor:
        """Mean over each group's heads, after the softmax, float32 [g, R, t]."""
        return self.keep(("mean", share), lambda: per_group(self.probabilities, share, self.kv_heads).mean(dim=1))

    def token_mass(self, share: str) -> Tensor:
        """M per token, exact multiples of MASS_UNIT in float64, [g, R, t]."""
        return self.keep(("token_mass", share), lambda: exact(self.mean_mass(share)))

    def mass(self, share: str, ratio: int) -> Tensor:
        """D per compressed position, exact float64 [g, R, n]. Positions beyond the visible length are not zeroed."""
        return self.keep(("mass", share, ratio), lambda: group_sum(self.token_mass(share), ratio))

    def ranked_mass(self, share: str, ratio: int) -> Tensor:
        """D in float32, which is what ranks positions: below MASS_UNIT it still tells larger from smaller."""

        def make() -> Tensor:
            mean = self.mean_mass(share)
            return mean if ratio == 1 else group_sum(mean.double(), ratio).float()

        return self.keep(("ranked_mass", share, ratio), make)


def row_tiles(acts: LayerActivations, rows: Tensor, tile: int, document: str, seed: int) -> Iterator[RowTile]:
    """Deal `rows` [n] out to tiles of at most `tile` rows and compute the dense probabilities of each.

    Every tile spreads over all of `rows` and the first holds the last row, so a check of the first tile has seen the
    whole document: a chunked mask, say, shows only beyond the first chunk.

    Raises:
        ValueError: tile below 1.
    """
    if tile < 1:
        raise ValueError(f"measure.row_tile={tile}: must be at least 1")
    acts = acts.contiguous()
    layer_cache: dict[Any, Any] = {}
    tiles = -(-rows.numel() // tile)
    for part in (rows[i::tiles] for i in reversed(range(tiles))):
        yield RowTile(acts, part, document, seed, attention_probabilities(acts, part), layer_cache)


def default_tile(heads: int, length: int, budget: int = 2**26) -> int:
    """Rows a tile so that its probabilities hold at most `budget` numbers (256 MiB in float32)."""
    return max(1, budget // (heads * length))


def reconstruction_error(tile: RowTile) -> float:
    """Relative difference between p @ v and the model's own output on a tile's rows.

    A wrong mask, scale, soft-cap, sink, window or head grouping shows here, whatever the model family. 0 for a
    recording without values: `record` compared them while it had them.
    """
    if isinstance(tile.acts.v, LeftOut):
        return 0.0
    v = tile.acts.v[0].float()
    p = tile.probabilities.unflatten(0, (v.shape[0], -1)).flatten(1, 2)
    ours = torch.matmul(p, v).view(tile.probabilities.shape[0], -1, v.shape[-1]).transpose(0, 1)
    theirs = tile.acts.output_rows(tile.rows).float()
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))
