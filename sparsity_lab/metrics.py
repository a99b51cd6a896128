"""The metrics of all budgets at once, read off the order in which a selection takes its positions.

A top-k selection at k is the first k entries of one order, so one walk along the order gives every k. Each function
takes the order and returns one value a (k, group, row); what is undefined is NaN.

A layer that attends to compressed keys holds window and positions as separate entries of one softmax; what they have
in common are the tokens, which `density` counts once.

Shapes: g groups, R rows, L places of the order (-1 = nothing), n compressed positions, t tokens, e entries of the
softmax (see `dense`), K budgets (ascending).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsity_lab import kernels
from sparsity_lab.dense import RowTile, exact, per_group, sink_share
from sparsity_lab.selection import DROPPED, NEG_INF, in_blocks, on_device, order_positions, visible_lengths

METRICS = (
    "recall",
    "coverage",
    "oracle_coverage",
    "relative_coverage",
    "total_coverage",
    "top1_hit",
    "worst_head_coverage",
    "density",
    "pool_recall",
    "pool_coverage",
    "in_pool_recall",
    "output_error",
)
NAN = float("nan")
STRETCH = 32  # places of an order whose outputs are summed at once


@dataclass(frozen=True)
class Truth:
    """What the dense attention says of a tile at one ratio, grouping and window.

    Arrays over positions have one entry more than n, which is zero: the order's -1 look it up.
    """

    visible: Tensor  # int64 [R]
    order: Tensor  # int64 [g, R, min(kmax, n)], the oracle's order
    mass: Tensor  # float64 [g, R, n + 1]: D, zero beyond the visible length
    total: Tensor  # float64 [g, R]: visible mass
    best: Tensor  # float64 [g, R, L]: mass of the first entries of the oracle's order
    raw_start: Tensor  # int64 [R]: first token attended raw
    raw_mass: Tensor  # float64 [g, R]: mass of the window and the tail
    edge: Tensor | None  # float64 [g, R]: mass of the position that holds raw_start, before it; None = D is never raw
    places: Tensor | None  # int64 [g, R, n + 1], for kernels: see `kernels.order_sums.packed`
    _kept: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    @cached_property
    def rank(self) -> Tensor:
        """Place of every position in the oracle's order, int32 [g, R, n + 1], DROPPED beyond kmax."""
        return ranks_of(self.order, self.mass.shape[-1])

    def block_mass(self, block_size: int) -> Tensor:
        """D of whole blocks, float64 [g, R, nb]; made once a size."""
        return self._keep(("mass", block_size), lambda: in_blocks(self.mass[..., :-1], block_size, 0.0).sum(-1))

    def order_blocks(self, block_size: int) -> Tensor:
        """Block of every place of the oracle's order, int64 [g, R, L], 0 where there is nothing; made once a size."""
        return self._keep(("order", block_size), lambda: self.order.clamp(min=0) // block_size)

    def _keep(self, key: tuple[str, int], make: Callable[[], Tensor]) -> Tensor:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def raw_start(rows: Tensor, ratio: int, window: int) -> Tensor:
    """First token attended raw: the window's or the incomplete tail group's, whichever comes first. [R] -> [R]."""
    tail = visible_lengths(rows, ratio) * ratio
    return torch.minimum((rows - window + 1).clamp(min=0), tail)


def truth(tile: RowTile, share: str, ratio: int, window: int, kmax: int) -> Truth:
    """Rank the dense mass once a tile; every O_k is a prefix of the order. Kept for all scorers and cells.

    Raises:
        ValueError: a layer with compressed keys attends to another ratio or raw window.
    """
    compressed = tile.acts.compressed is not None
    if compressed and tile.acts.window != window:
        raise ValueError(f"selection.window={window}: layer {tile.acts.layer} has a raw window of {tile.acts.window}")

    def make() -> Truth:
        visible = tile.visible(ratio)
        start = raw_start(tile.rows, 1 if compressed else ratio, window)  # such a layer has no tail but its window
        # the window plays no part in O_k
        order = oracle_order(tile, share, ratio, kmax)
        found = _masses(tile, share, ratio, order, start)
        n = found["mass"].shape[-1] - 1
        best = found["mass"].gather(-1, order.masked_fill(order < 0, n)).cumsum(-1)
        return Truth(visible=visible, order=order, best=best, raw_start=start, **found)

    return tile.keep(("truth", share, ratio, window, kmax), make)


def _masses(tile: RowTile, share: str, ratio: int, order: Tensor, start: Tensor) -> dict[str, Any]:
    """`mass`, `total`, `edge`, `raw_mass` and `places` of a `Truth`."""
    if tile.has_kernels:
        from sparsity_lab.kernels.truth_masses import truth_masses

        positions = tile.acts.positions(tile.rows)
        return truth_masses(tile.mean_mass(share), positions, tile.visible(ratio), start, order, ratio)._asdict()
    mass = F.pad(tile.mass(share, ratio).masked_fill(tile.hidden(ratio), 0.0), (0, 1))
    tokens = tile.token_mass(share)
    raw = torch.arange(tile.length, device=start.device) >= start.unsqueeze(-1)
    found = {"mass": mass, "total": mass.sum(-1), "raw_mass": tokens.masked_fill(~raw, 0.0).sum(-1)}
    edge = None
    if tile.acts.compressed is None:
        at = (start // ratio * ratio).unsqueeze(-1) + torch.arange(ratio, device=start.device)
        members = tokens.gather(-1, at.clamp(max=tile.length - 1).expand(len(tokens), -1, -1))
        edge = members.masked_fill(at >= start.unsqueeze(-1), 0.0).sum(-1)
    places = None
    if kernels.usable(mass):
        from sparsity_lab.kernels.order_sums import packed

        places = packed(mass, order)
    return {**found, "edge": edge, "places": places}


def oracle_order(tile: RowTile, share: str, ratio: int, limit: int | None = None) -> Tensor:
    """The first `limit` (None = all) visible positions by falling dense mass, int64 [g, R, min(limit, n)]."""

    def make() -> Tensor:
        ranked = tile.ranked_mass(share, ratio)
        return order_positions(ranked.masked_fill(tile.hidden(ratio), NEG_INF), limit, tile.doubts)

    return tile.keep(("oracle's order", share, ratio, limit), make)


def ranks_of(order: Tensor, n: int) -> Tensor:
    """Invert an order: place of every position, DROPPED for those not in it. [..., L] -> int32 [..., n]."""
    places = torch.arange(order.shape[-1], dtype=torch.int32, device=order.device).expand_as(order)
    ranks = torch.full((*order.shape[:-1], n + 1), DROPPED, dtype=torch.int32, device=order.device)
    return ranks.scatter_(-1, order.masked_fill(order < 0, n), places)[..., :n]


def within(budgets: Sequence[int], entries: int, device: torch.device) -> Tensor:
    """1.0 where entry i < k, float64 [L, K]. A product with it sums the first k entries for every k; only exact values
    are summed so, which makes the result independent of how a device orders the sum."""
    at = torch.arange(entries, device=device).unsqueeze(-1)
    return (at < on_device(budgets, device)).double()


def first_of(sums: Tensor, budgets: Sequence[int]) -> Tensor:
    """What running sums [..., L] have come to at every k (k beyond L: the last), [K, ...]."""
    places = sums.shape[-1]
    return sums.index_select(-1, on_device([min(k, places) - 1 for k in budgets], sums.device)).movedim(-1, 0)


def ratio_or_nan(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Division that is NaN, not infinite, where the denominator is 0."""
    return torch.where(denominator > 0, numerator / denominator, NAN)


def quotients(**parts: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """`ratio_or_nan` of every pair, all in one shape."""
    above, below = (torch.stack(torch.broadcast_tensors(*side)) for side in zip(*parts.values(), strict=True))
    return dict(zip(parts, ratio_or_nan(above, below).unbind(), strict=True))


def possible_hits(true: Truth, budgets: Sequence[int]) -> Tensor:
    """min(k, v), float64 [K, 1, 1, R]."""
    ks = on_device(budgets, true.visible.device).unsqueeze(-1)
    return torch.minimum(true.visible, ks).double()[:, None, None]


def look_up(values: Tensor, at: Tensor) -> Tensor:
    """values [g, R, n + 1] at the positions at [P, g, R, L] -> [P, g, R, L]."""
    return values.expand(at.shape[0], -1, -1, -1).gather(-1, at)


def selection_metrics(
    order: Tensor, ratio: int, rows: Tensor, true: Truth, budgets: Sequence[int]
) -> dict[str, Tensor]:
    """The metrics of P selections that need the group's mass alone, and `hits` = |S ∩ O_k|.

    order: whole numbers [P, g, R, L]. Each value is float64 [K, P, g, R].
    """
    hits, kept, outside, raw_tokens, top1 = _sums_of(order, ratio, true, budgets)
    best = first_of(true.best, budgets).unsqueeze(1).expand_as(kept)
    return {
        "hits": hits,
        "top1_hit": top1,
        "total_coverage": true.raw_mass + outside,
        "density": (raw_tokens + (rows + 1 - true.raw_start)) / (rows + 1),
        **quotients(
            recall=(hits, possible_hits(true, budgets)),
            coverage=(kept, true.total),
            oracle_coverage=(best, true.total),
            relative_coverage=(kept, best),
        ),
    }


def _sums_of(order: Tensor, ratio: int, true: Truth, budgets: Sequence[int]) -> Sequence[Tensor]:
    """Of the first k entries: |S ∩ O_k|, mass, mass and tokens outside the raw window, whether they hold the best."""
    if true.places is not None:
        from sparsity_lab.kernels.order_sums import order_sums

        return order_sums(order, true.places, true.edge, true.raw_start, ratio, budgets).unbind()
    at = order.long().masked_fill(order < 0, true.mass.shape[-1] - 1)
    rank, mass = look_up(true.rank, at), look_up(true.mass, at)
    tokens = (true.raw_start.unsqueeze(-1) - at * ratio).clamp_(0, ratio).masked_fill_(order < 0, 0)
    outside = mass
    if true.edge is not None:
        outside = mass.masked_fill(tokens == 0, 0.0)
        outside = torch.where((tokens > 0) & (tokens < ratio), true.edge.unsqueeze(-1), outside)
    parts = (mass, outside, tokens.double(), (rank == 0).double())
    chosen = within(budgets, order.shape[-1], order.device)
    # entry i of the order is in S and in O_k iff i < k and its place in the oracle's order is < k
    both = torch.maximum(rank, torch.arange(order.shape[-1], dtype=torch.int32, device=order.device))
    hits = torch.stack([(both < k).sum(-1) for k in budgets]).double()
    return hits, *((part @ chosen).movedim(-1, 0) for part in parts)


@dataclass(frozen=True)
class Pools:
    """What the metrics need of P candidate pools: how many of the first entries of the oracle's order each holds at
    every budget, float64 [K, P, g, R], and its mass, float64 [P, g, R]."""

    oracle_hits: Tensor
    mass: Tensor


def pools_of(ranks: Tensor, topk_blocks: Sequence[int], block_size: int, true: Truth, budgets: Sequence[int]) -> Pools:
    """The pools of one source: the best `topk_blocks` blocks each, by int32 ranks [g, R, nb]."""
    mass = true.block_mass(block_size)
    if kernels.usable(ranks):
        from sparsity_lab.kernels.pools import pools_of as look

        return Pools(*look(ranks, topk_blocks, true.order, block_size, mass, budgets))
    sizes = on_device(topk_blocks, ranks.device, torch.int32).view(-1, 1, 1, 1)
    held = (ranks.gather(-1, true.order_blocks(block_size)) < sizes) & (true.order >= 0)
    return Pools(first_of(held.cumsum(-1, dtype=torch.int32), budgets).double(), (mass * (ranks < sizes)).sum(-1))


def pool_metrics(pools: Pools, hits: Tensor, true: Truth, budgets: Sequence[int]) -> dict[str, Tensor]:
    """pool_recall, pool_coverage, in_pool_recall, [K, P, g, R]; NaN where those of `pools` are, for want of a pool.

    hits: |S ∩ O_k| of the selections in these pools, float64 [K, P, g, R].
    """
    held = pools.oracle_hits
    return quotients(
        pool_recall=(held, possible_hits(true, budgets)),
        pool_coverage=(pools.mass, true.total),
        in_pool_recall=(hits, held),
    )


@dataclass(frozen=True)
class Detail:
    """What the per-head metrics need of the few rows they are measured on (E of the tile's R)."""

    at: Tensor  # int64 [E], places in the tile
    mass: Tensor  # float64 [g, heads, E, n + 1]: visible mass per head
    total: Tensor  # float64 [g, heads, E]
    probabilities: Tensor  # float32 [g, heads, E, e]
    left: Tensor | float  # the sink's share, [g, heads, E, 1]
    output: Tensor  # float32 [g, heads, E, dv]: dense attention output


def detail(tile: RowTile, share: str, ratio: int, chosen: Tensor) -> Detail | None:
    """Per-head truth for the tile's rows among `chosen`, None when it has none."""

    def make() -> Detail | None:
        at = tile.keep("detail rows", lambda: torch.isin(tile.rows, chosen).nonzero().squeeze(-1))
        if at.numel() == 0:
            return None
        p = tile.probabilities_at(at)
        mass = tile.by_position(p, ratio).double()
        visible = visible_lengths(tile.rows[at], ratio).unsqueeze(-1)
        hidden = torch.arange(mass.shape[-1], device=p.device) >= visible
        mass = exact(F.pad(mass.masked_fill(hidden, 0.0), (0, 1)))
        grouped = per_group(p, share, tile.kv_heads)
        taken = sink_share(tile.acts, tile.rows[at])
        return Detail(
            at=at,
            mass=per_group(mass, share, tile.kv_heads),
            total=per_group(mass.sum(-1), share, tile.kv_heads),
            probabilities=grouped,
            left=0.0 if taken is None else per_group(taken, share, tile.kv_heads),
            output=_weighted(grouped, tile.values),
        )

    return tile.keep(("detail", share, ratio), make)


def head_metrics(
    tile: RowTile, order: Tensor, ratio: int, true: Truth, few: Detail, budgets: Sequence[int]
) -> dict[str, Tensor]:
    """worst_head_coverage and output_error of P selections, [K, P, g, R], NaN but for the detail rows.

    worst_head_coverage: smallest share of a head's own visible mass; heads without any do not count. output_error:
    ‖o_S − o‖ / ‖o‖, softmax renormalised over the attended entries, mean over the group's heads.
    """
    order = order[:, :, few.at].long()
    worst = torch.stack([_worst_head(one, few, budgets) for one in order], dim=1)
    raw = _raw_output(tile, true, few)
    error = torch.stack([_output_error(tile, one, ratio, true, few, raw, budgets) for one in order], dim=1)
    out = worst.new_full((2, *worst.shape[:-1], tile.rows.numel()), NAN)
    out[..., few.at] = torch.stack([worst, error])
    return {"worst_head_coverage": out[0], "output_error": out[1]}


def _worst_head(order: Tensor, few: Detail, budgets: Sequence[int]) -> Tensor:
    """float64 [K, g, E]; order [g, E, L] of the detail rows."""
    n = few.mass.shape[-1] - 1
    index = order.masked_fill(order < 0, n).unsqueeze(1).expand(-1, few.mass.shape[1], -1, -1)
    kept = (few.mass.gather(-1, index) @ within(budgets, order.shape[-1], order.device)).movedim(-1, 0)
    none = few.total == 0
    return (kept / few.total).masked_fill(none, float("inf")).amin(2).masked_fill(none.all(1), NAN)


def _raw_output(tile: RowTile, true: Truth, few: Detail) -> tuple[Tensor, Tensor]:
    """What window and tail contribute: Σ p v [g, heads, E, dv]; Σ p and the sink share [g, heads, E, 1]."""
    entry = torch.arange(few.probabilities.shape[-1], device=tile.rows.device)
    raw = few.probabilities * ((entry >= true.raw_start[few.at].unsqueeze(-1)) & (entry < tile.length))
    return _weighted(raw, tile.values), raw.sum(-1, keepdim=True) + few.left


def _output_error(
    tile: RowTile,
    order: Tensor,
    ratio: int,
    true: Truth,
    few: Detail,
    raw: tuple[Tensor, Tensor],
    budgets: Sequence[int],
) -> Tensor:
    """float64 [K, g, E]; order [g, E, L] of the detail rows. Only the selected entries' values are looked up.

    Sums go over whole stretches of the order and then what is left of k, so a value depends on its own k alone, not on
    the other budgets that are measured with it.
    """
    order = F.pad(order, (0, -order.shape[-1] % STRETCH), value=-1)
    width = 1 if tile.acts.compressed is not None else ratio  # entries of a position
    p, values = _selected_values(tile, order, width, true, few)
    p, values = p.unflatten(-1, (-1, STRETCH * width)), values.unflatten(2, (-1, STRETCH * width))
    out = _per_key_head(p, values).cumsum(3)  # [g, heads, E, stretches, dv]
    attended = p.sum(-1).cumsum(-1)
    errors = []
    for k in budgets:
        whole, rest = divmod(min(k, order.shape[-1]), STRETCH)
        kept, mass = raw
        if whole:
            kept, mass = kept + out[..., whole - 1, :], mass + attended[..., whole - 1 : whole]
        if rest:
            begun = p[..., whole : whole + 1, : rest * width]
            kept = kept + _per_key_head(begun, values[:, :, whole : whole + 1, : rest * width])[..., 0, :]
            mass = mass + begun.sum(-1)
        difference = kept / mass.clamp_min(1e-30) - few.output
        errors.append((difference.norm(dim=-1) / few.output.norm(dim=-1).clamp_min(1e-30)).mean(1).double())
    return torch.stack(errors)


def _selected_values(tile: RowTile, order: Tensor, width: int, true: Truth, few: Detail) -> tuple[Tensor, Tensor]:
    """Probabilities [g, heads, E, L * width], zero for what is attended raw anyway, and values [k, E, L * width, dv] of
    the entries of an order [g, E, L]: each position's tokens, or its compressed one."""
    groups, heads, _, end = few.probabilities.shape
    entries = (order.unsqueeze(-1) * width + torch.arange(width, device=order.device)).flatten(2)
    counted = entries >= 0
    entries = entries.clamp(min=0)
    if tile.acts.compressed is None:
        counted &= entries < true.raw_start[few.at].unsqueeze(-1)
    else:
        entries += tile.length
    p = few.probabilities.gather(-1, entries.unsqueeze(1).expand(-1, heads, -1, -1)) * counted.unsqueeze(1)
    v = tile.values
    lines = entries.repeat_interleave(v.shape[0] // groups, dim=0)
    lines = lines + torch.arange(v.shape[0], device=order.device).view(-1, 1, 1) * end
    return p, F.embedding(lines, v.flatten(0, 1))


def _per_key_head(p: Tensor, values: Tensor) -> Tensor:
    """p [g, heads, E, C, T] and values [k, E, C, T, dv] -> [g, heads, E, C, dv]."""
    per_kv = p.flatten(0, 1).unflatten(0, (values.shape[0], -1)).movedim(1, 3)
    return (per_kv @ values).movedim(3, 1).flatten(0, 1).unflatten(0, p.shape[:2])


def _weighted(p: Tensor, v: Tensor) -> Tensor:
    """p [g, heads, R, t] and v [k, t, d] -> [g, heads, R, d], each query head with its own key head's values."""
    per_kv = p.flatten(0, 1).unflatten(0, (v.shape[0], -1))
    out = torch.matmul(per_kv.flatten(1, 2), v)
    return out.view(*p.shape[:-1], v.shape[-1])
