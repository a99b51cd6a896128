"""Dense attention mass of some query rows of one layer, streamed over row tiles.

Memory is O(tile x t): only the probabilities of one tile of rows exist at a time.

Shapes: h query heads, k key heads, g selection groups (1 with share=layer, k with share=kv_head), R rows of the tile,
t tokens, n = t // ratio compressed positions, e entries of a softmax: the t tokens and, in a layer that attends to
compressed keys, the n positions behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsity_lab import kernels
from sparsity_lab.activations import LayerActivations, LeftOut
from sparsity_lab.doubts import Doubts
from sparsity_lab.selection import as_mask, hidden_positions, visible_lengths

T = TypeVar("T")
SHARES = ("layer", "kv_head")
# Masses are multiples of 2**-48 held in float64. A row's mass is at most 1, so every sum of them is exact: the same to
# the last bit in any order, on any device, with one cell or with hundreds.
MASS_UNIT = 2.0**-48


def attention_probabilities(acts: LayerActivations, rows: Tensor, attended: Tensor | None = None) -> Tensor:
    """The layer's own softmax for some rows of a one-document batch, float32 [h, R, e].

    softmax(softcap(q k^T scale) + causal and window mask), in float32 whatever the layer's dtype; a sink adds to the
    denominator only, so rows then sum to less than 1. A layer with sparse attention is taken as dense: everything
    visible counts, but for what `attended` bool [R, e] or [h, R, e] leaves out. `rows` int64 [R] are indices along the
    s axis, or positions where the layer holds some rows only.

    Raises:
        ValueError: more than one document, query heads that are no multiple of the key heads, or rows not held.
    """
    logits = _logits(acts, rows)
    if attended is not None:
        logits.masked_fill_(~attended, float("-inf"))
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
    """Scaled, soft-capped, masked logits, float32 [h, R, e]."""
    if acts.q.shape[0] != 1:
        raise ValueError(f"layer {acts.layer}: a batch of {acts.q.shape[0]}, must be one document")
    q, k = acts.query_rows(rows).float(), acts.keys().float()
    heads, (kv_heads, entries, _) = q.shape[0], k.shape
    # query heads i*r .. i*r+r-1 read key head i, as in every published GQA model
    grouped = per_group(q, "kv_head", kv_heads).flatten(1, 2) * acts.scale
    logits = torch.matmul(grouped, k.transpose(1, 2)).view(heads, rows.numel(), entries)
    if acts.softcap is not None:
        logits = logits.div_(acts.softcap).tanh_().mul_(acts.softcap)
    return logits.masked_fill_(_hidden(acts, acts.positions(rows).unsqueeze(-1)), float("-inf"))


def _hidden(acts: LayerActivations, query: Tensor) -> Tensor:
    """Entries that the queries at positions [R, 1] may not see, bool [R, e]."""
    token = torch.arange(acts.k.shape[2], device=query.device)
    hidden = token > query
    if acts.window is not None:
        hidden |= token <= query - acts.window
    if acts.compressed is None:
        return hidden
    position = torch.arange(acts.compressed.k.shape[2], device=query.device)
    return torch.cat([hidden, position >= visible_lengths(query, acts.compressed.ratio)], dim=-1)


def _attended(acts: LayerActivations, rows: Tensor) -> Tensor | None:
    """Entries that the model's own output attends to, as far as they are visible, bool [R, e] or [h, R, e]; None =
    all."""
    if acts.attended is not None:
        per_selection = acts.attended(acts.positions(rows))
        return per_selection.repeat_interleave(acts.q.shape[1] // len(per_selection), dim=0)
    picks = acts.selected_rows(rows)
    if picks is None:
        return None
    tokens = acts.k.shape[2]
    places = tokens if acts.compressed is None else acts.compressed.k.shape[2]
    chosen = as_mask(picks, places)
    return chosen if acts.compressed is None else torch.cat([chosen.new_ones(len(rows), tokens), chosen], dim=-1)


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


def _kernel_mass(acts: LayerActivations, rows: Tensor, share: str) -> Tensor:
    """Mean of `attention_probabilities` over each group's heads, by a kernel: float32 [g, R, t]."""
    from sparsity_lab.kernels.dense_mass import dense_mass

    return dense_mass(
        acts.query_rows(rows), acts.keys(), acts.positions(rows), acts.scale, share=share, softcap=acts.softcap,
        sink=acts.sink, window=acts.window,
    )  # fmt: skip


@dataclass
class RowTile:
    """Some rows of one layer; everything about them, from the dense probabilities on, is computed once and kept.

    On a GPU with Triton the mean masses come from a kernel, and probabilities of single heads exist only for the few
    rows that are asked for.
    """

    acts: LayerActivations
    rows: Tensor  # int64 [R], indices along s, which are absolute positions for a whole document
    document: str  # the document's id
    seed: int
    given: Tensor | None = None  # probabilities, where they are known; else they are the layer's own
    layer_cache: dict[Any, Any] = field(default_factory=dict)  # shared by the tiles of a layer
    number: int | None = None  # which of the layer's tiles this is; None = told by its first row
    doubts: Doubts | None = None  # take up what is checked of the tile; None = checks look at once
    _cache: dict[Any, Any] = field(default_factory=dict)

    @property
    def kv_heads(self) -> int:
        return self.acts.k.shape[1]

    @property
    def length(self) -> int:
        return self.acts.k.shape[2]

    def groups(self, share: str) -> int:
        return 1 if share == "layer" else self.kv_heads

    @property
    def probabilities(self) -> Tensor:
        """The layer's dense softmax, float32 [h, R, e]: see `attention_probabilities`."""
        return self.keep("probabilities", self._probabilities)

    def _probabilities(self) -> Tensor:
        return attention_probabilities(self.acts, self.rows) if self.given is None else self.given

    def probabilities_at(self, places: Tensor) -> Tensor:
        """Probabilities of some of the rows, int64 [E], float32 [h, E, e]."""
        if self.has_kernels and "probabilities" not in self._cache:
            return attention_probabilities(self.acts, self.rows[places])
        return self.probabilities[:, places]

    def spread(self, count: int) -> Tensor:
        """Up to `count` places among the rows, evenly spread, the last one with them: int64 [E]."""
        rows, few = self.rows.numel(), min(count, self.rows.numel())
        return (torch.arange(few, device=self.rows.device) + 1) * rows // max(few, 1) - 1

    @property
    def has_kernels(self) -> bool:
        """Whether kernels compute the mean masses."""
        return self.given is None and self.acts.compressed is None and kernels.multiplies(self.acts.q)

    @property
    def place(self) -> int:
        """What tells the tile from the layer's others, the same in every layer of a document."""
        return int(self.rows[0]) if self.number is None else self.number

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

    @property
    def values(self) -> Tensor:
        """float32 [k, e, dv]."""
        return self.keep_for_layer("values", lambda: self.acts.values().float())

    def visible(self, ratio: int) -> Tensor:
        """Visible lengths of the rows, int64 [R]."""
        return self.keep(("visible", ratio), lambda: visible_lengths(self.rows, ratio))

    def hidden(self, ratio: int) -> Tensor:
        """Compressed positions that the rows may not see, bool [R, n]."""
        return self.keep(("hidden", ratio), lambda: hidden_positions(self.rows, ratio, self.length // ratio))

    def mean_mass(self, share: str) -> Tensor:
        """Mean over each group's heads, after the softmax, float32 [g, R, e]."""

        def make() -> Tensor:
            if self.has_kernels:
                return _kernel_mass(self.acts, self.rows, share)
            return per_group(self.probabilities, share, self.kv_heads).mean(dim=1)

        return self.keep(("mean", share), make)

    def entry_mass(self, share: str) -> Tensor:
        """Mean mass of every entry in exact multiples of MASS_UNIT, float64 [g, R, e]."""
        return self.keep(("entry_mass", share), lambda: exact(self.mean_mass(share)))

    def token_mass(self, share: str) -> Tensor:
        """M per token, exact float64 [g, R, t]."""
        return self.entry_mass(share)[..., : self.length]

    def by_position(self, mass: Tensor, ratio: int) -> Tensor:
        """Mass of the compressed positions: the sum over each one's tokens or, where the layer attends to compressed
        keys, what these get themselves. [..., e] -> [..., n].

        Raises:
            ValueError: the layer's compressed keys have another ratio.
        """
        own = self.acts.compressed
        if own is None:
            return group_sum(mass, ratio)
        if own.ratio != ratio:
            raise ValueError(
                f"selection.compress_ratio={ratio}: layer {self.acts.layer} attends to keys compressed by {own.ratio}"
            )
        return mass[..., self.length :]

    def mass(self, share: str, ratio: int) -> Tensor:
        """D per compressed position, exact float64 [g, R, n]. Positions beyond the visible length are not zeroed."""
        return self.keep(("mass", share, ratio), lambda: self.by_position(self.entry_mass(share), ratio))

    def ranked_mass(self, share: str, ratio: int) -> Tensor:
        """D in float32, which is what ranks positions: below MASS_UNIT it still tells larger from smaller."""

        def make() -> Tensor:
            mean = self.mean_mass(share)
            if ratio == 1 and self.acts.compressed is None:
                return mean
            return self.by_position(mean.double(), ratio).float()

        return self.keep(("ranked_mass", share, ratio), make)


def row_tiles(
    acts: LayerActivations, rows: Tensor, tile: int, document: str, seed: int, doubts: Doubts | None = None
) -> Iterator[RowTile]:
    """Deal `rows` [n] out to tiles of at most `tile` rows.

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
    for number, first in enumerate(reversed(range(tiles))):
        part = rows[first::tiles].contiguous()
        yield RowTile(acts, part, document, seed, layer_cache=layer_cache, number=number, doubts=doubts)


def default_tile(heads: int, length: int, device: torch.device | None = None, budget: int = 2**26) -> int:
    """Rows a tile so that its probabilities hold at most `budget` numbers (256 MiB in float32). Where kernels serve the
    `device` there are none, but some ten arrays of mean masses, of half as many numbers each."""
    if device is not None and kernels.usable(device):
        return max(1, budget // (2 * length))
    return max(1, budget // (heads * length))


def with_less_memory(work: Callable[[int], T], tile: int, say: Callable[[str], None]) -> tuple[T, int]:
    """`work(tile)` for a row tile, again with half of it whenever the device runs out of memory; and the tile that it
    was done with."""
    while True:
        try:
            return work(tile), tile
        except torch.cuda.OutOfMemoryError:
            if tile == 1:
                raise
        # behind the handler: the error's traceback holds what filled the memory
        tile //= 2
        torch.cuda.empty_cache()
        say(f"out of device memory: going on with measure.row_tile={tile}")


CHECKED_ROWS = 16  # of a tile whose mean masses come from a kernel


def reconstruction_error(tile: RowTile) -> Tensor:
    """Relative difference between p @ v, over what the layer really attended to, and its own output on a tile's rows,
    float32 [].

    A wrong mask, scale, soft-cap, sink, window or head grouping shows here, whatever the model family. 0 for a
    recording without values: `record` compared them while it had them.
    """
    if isinstance(tile.acts.v, LeftOut):
        return torch.zeros((), device=tile.rows.device)
    if tile.has_kernels:
        tile = _some_rows(tile)
    v, attended = tile.values, _attended(tile.acts, tile.rows)
    # a selection is a softmax of its own: dense probabilities may have underflowed where it looks
    p = tile.probabilities if attended is None else attention_probabilities(tile.acts, tile.rows, attended)
    p = p.unflatten(0, (v.shape[0], -1)).flatten(1, 2)
    ours = _in_stretches(p, v).view(tile.probabilities.shape[0], -1, v.shape[-1]).transpose(0, 1)
    theirs = tile.acts.output_rows(tile.rows).float()
    return (ours - theirs).norm() / theirs.norm().clamp_min(1e-30)


def _in_stretches(p: Tensor, v: Tensor, length: int = 2048) -> Tensor:
    """p [k, rows, e] times v [k, e, dv]: the long sum cut in stretches, which a GPU adds up side by side."""
    if not p.is_cuda:
        return p @ v
    whole = p.shape[-1] // length * length
    parts = torch.matmul(
        p[..., :whole].unflatten(-1, (-1, length)).transpose(1, 2), v[:, :whole].unflatten(1, (-1, length))
    )
    return parts.sum(1) + p[..., whole:] @ v[:, whole:]


def kernel_error(tile: RowTile) -> Tensor:
    """Largest difference between the kernel's mean masses and those of the probabilities, on some of a tile's rows,
    float32 []."""
    ours = tile.mean_mass("layer")[:, tile.spread(CHECKED_ROWS)]
    return (ours - _some_rows(tile).mean_mass("layer")).abs().amax()


def _some_rows(tile: RowTile) -> RowTile:
    """Up to CHECKED_ROWS of a tile's rows, the last among them, as a tile whose probabilities are all there."""

    def make() -> RowTile:
        rows = tile.rows[tile.spread(CHECKED_ROWS)]
        given = attention_probabilities(tile.acts, rows)
        return RowTile(tile.acts, rows, tile.document, tile.seed, given, tile.layer_cache, tile.number)

    return tile.keep("some rows", make)
