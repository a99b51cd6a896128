"""Scorers: index scores I for some rows of a layer. Baselines here; the learned indexer is in `lightning.py`.

A scorer has a `name`, a `describe()` that lists everything that changes its scores, and
`scores(tile, ratio, share) -> float32 [g, R, n]` (g may be 1 when all groups share the scores). Scores at positions
that are not visible yet are ignored by whoever selects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsity_lab import kernels
from sparsity_lab.dense import RowTile, per_group

REDUCTIONS = ("softmax", "logit")


class Scorer(Protocol):
    """What the cells of a pass need of a scorer."""

    name: str

    def describe(self) -> dict[str, Any]:
        """Everything that changes the scores; part of the cell id."""
        ...

    def scores(self, tile: RowTile, ratio: int, share: str) -> Tensor:
        """float32 [g or 1, R, n]."""
        ...


@runtime_checkable
class GroupKeys(Protocol):
    """A scorer that scores queries against something it keeps of every complete group, whatever the rows."""

    def group_keys(self, layer: int, x: Tensor, k: Tensor, ratio: int, first: int) -> tuple[Tensor, ...]:
        """Of the complete groups among some tokens: x [1, m, dim] and k [1, k, m, d] of the tokens from position
        first * ratio on -> tensors with m // ratio groups along axis 1. Each group depends on its own tokens alone, so
        a sequence may be read piece by piece."""
        ...


def group_keys(scorer: GroupKeys, tile: RowTile, ratio: int) -> tuple[Tensor, ...]:
    """Those of the tile's layer, made once unless they are there from earlier calls (see `models.sparse`)."""
    acts, name = tile.acts, keys_name(scorer, ratio)
    return tile.keep_for_layer(name, lambda: scorer.group_keys(acts.layer, acts.x, acts.k, ratio, 0))


def keys_name(scorer: GroupKeys, ratio: int) -> tuple[str, GroupKeys, int]:
    """Where a layer keeps a scorer's group keys. The scorer itself is in it: an id may come back for another one."""
    return "group keys", scorer, ratio


class Oracle:
    """The dense mass D itself: the best any selection can do."""

    name = "oracle"

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def scores(self, tile: RowTile, ratio: int, share: str) -> Tensor:
        return tile.ranked_mass(share, ratio)


class Recency:
    """The newest positions first: what a plain sliding window of k positions keeps."""

    name = "recency"

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def scores(self, tile: RowTile, ratio: int, share: str) -> Tensor:
        n = tile.length // ratio
        return torch.arange(n, dtype=torch.float32, device=tile.rows.device).expand(1, tile.rows.numel(), n)


class Random:
    """A seeded random order, the same for a (seed, document, layer, row, position) on every device and shard."""

    name = "random"

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def scores(self, tile: RowTile, ratio: int, share: str) -> Tensor:
        n = tile.length // ratio
        salt = int(tile.document[:12], 16) ^ (tile.seed * 1_000_003) ^ (tile.acts.layer << 40) ^ (ratio << 52)
        row_hash = _mix(tile.rows + (salt & (2**62 - 1)))
        if kernels.usable(row_hash):
            from sparsity_lab.kernels.random_scores import random_scores

            return random_scores(row_hash, n).unsqueeze(0)
        positions = torch.arange(n, device=row_hash.device)
        return (_mix(row_hash.unsqueeze(-1) + positions) & 0xFFFFFF).float().unsqueeze(0)


def _mix(x: Tensor) -> Tensor:
    """A 64-bit finaliser in the style of splitmix64; int64 arithmetic wraps, so it is the same everywhere."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


class _Keys:
    """Shared by the baselines that score query heads against summaries of each group's keys."""

    name = ""

    def __init__(self, head_reduction: str = "softmax") -> None:
        if head_reduction not in REDUCTIONS:
            raise ValueError(f"scorer.head_reduction={head_reduction!r}: must be one of {', '.join(REDUCTIONS)}")
        self.head_reduction = head_reduction

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "head_reduction": self.head_reduction}

    def scores(self, tile: RowTile, ratio: int, share: str) -> Tensor:
        """Per-head logits against the summaries, then one score a group: mean over its heads, after the softmax over
        visible positions (`softmax`) or of the logits themselves (`logit`)."""
        n = tile.length // ratio
        keys = group_keys(self, tile, ratio)
        queries = tile.acts.query_rows(tile.rows).float() * tile.acts.scale
        grouped = queries.unflatten(0, (tile.kv_heads, -1)).flatten(1, 2)
        logits = self.logits(grouped, keys).view(len(queries), tile.rows.numel(), n)
        if self.head_reduction == "softmax" and n:
            visible = tile.visible(ratio).unsqueeze(-1)
            hidden = torch.arange(n, device=logits.device) >= visible
            # a finite fill keeps rows that see nothing yet free of NaN; such rows select nothing anyway
            logits = logits.masked_fill_(hidden, -1e30).softmax(dim=-1)
        return per_group(logits, share, tile.kv_heads).mean(dim=1)

    def group_keys(self, layer: int, x: Tensor, k: Tensor, ratio: int, first: int) -> tuple[Tensor, ...]:
        """See `GroupKeys`."""
        n = k.shape[2] // ratio
        return self.summaries(k[0, :, : n * ratio].float().unflatten(1, (n, ratio)))

    def summaries(self, keys: Tensor) -> tuple[Tensor, ...]:
        """keys float32 [k, n, r, d] -> what `logits` needs, each [k, n, d]."""
        raise TypeError(f"{type(self).__name__} must define summaries")

    def logits(self, queries: Tensor, summaries: tuple[Tensor, ...]) -> Tensor:
        """queries float32 [k, heads a group * R, d] -> [k, heads a group * R, n]."""
        raise TypeError(f"{type(self).__name__} must define logits")


class MeanKey(_Keys):
    """Queries against the mean key of each group (after RoPE, as the layer uses it)."""

    name = "mean_key"

    def summaries(self, keys: Tensor) -> tuple[Tensor, ...]:
        return (keys.mean(dim=2),)

    def logits(self, queries: Tensor, summaries: tuple[Tensor, ...]) -> Tensor:
        return queries @ summaries[0].transpose(1, 2)


class Quest(_Keys):
    """Upper bound of q.k over each group from its channel-wise minimum and maximum key (Quest, arXiv 2406.10774)."""

    name = "quest"

    def summaries(self, keys: Tensor) -> tuple[Tensor, ...]:
        return keys.amin(dim=2), keys.amax(dim=2)

    def logits(self, queries: Tensor, summaries: tuple[Tensor, ...]) -> Tensor:
        low, high = summaries
        return queries.clamp(min=0) @ high.transpose(1, 2) + queries.clamp(max=0) @ low.transpose(1, 2)


BASELINES: dict[str, Callable[..., Scorer]] = {
    "oracle": Oracle,
    "recency": Recency,
    "random": Random,
    "mean_key": MeanKey,
    "quest": Quest,
}
