"""What a model hands to an observer, once per attention layer, and what a model must offer to be measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsity_lab.topology import NativeSelection


@dataclass(frozen=True)
class CompressedKeys:
    """What a layer with compressed attention attends to beside its raw window (n = t // ratio positions)."""

    k: Tensor  # [b, k, n, d] after RoPE
    v: Tensor  # [b, k, n, dv]
    ratio: int


@dataclass(frozen=True)
class IndexActivations:
    """The model's own indexer as it served a layer: the layer's, or that of the index source whose top-k it reuses."""

    layer: int  # the index source
    q: Tensor  # [b, s, h, d]
    w: Tensor  # float32 [b, s, h], all scales included
    k: Tensor  # [b, n, d]
    ratio: int
    relu: bool = True


@dataclass(frozen=True)
class LayerActivations:
    """One attention layer's tensors during one forward, valid only while the observer runs.

    Shapes (b batch, h query heads, k key heads, s query rows, t key positions, d head dim); row i stands at absolute
    position t - s + i. A recording holds some rows only: q and output then have those at the absolute positions `rows`,
    while x still has every token. A sequence that is being decoded holds those of the call, in q and in x.

    A model with sparse attention of its own fills the last three fields. `compressed` then stands beside the raw keys k
    in one softmax, k masked by `window`; q, k and v are as the layer uses them, and `output` is what they give when
    only `selected` is attended to.
    """

    layer: int
    q: Tensor  # [b, h, s, d] after RoPE; s = len(rows) where rows are given
    k: Tensor  # [b, k, t, d] after RoPE
    v: Tensor  # [b, k, t, dv]
    x: Tensor  # [b, s, dim] the attention block's input, of every token or of the rows of q
    output: Tensor  # [b, s, h, dv] the model's own attention output, before its output projection; s as of q
    scale: float
    softcap: float | None = None
    sink: Tensor | None = None  # [h] logits, in the softmax denominator only
    window: int | None = None  # sliding window in tokens, the query's own included; None = full causal
    rows: Tensor | None = None  # ascending int64 [s]: the only rows that q and output hold; None = all
    compressed: CompressedKeys | None = None
    selected: Tensor | None = None  # int32 [b, s, k], -1 = nothing: what `output` attends to; None = all visible
    index: IndexActivations | None = None
    # where a selection is applied to a dense layer (`models.sparse`): positions [R] -> bool [g, R, t], what `output`
    # attends to
    attended: Callable[[Tensor], Tensor] | None = None

    def positions(self, rows: Tensor) -> Tensor:
        """Absolute positions of `rows` [R]: indices along s, or positions already where only some rows are held."""
        return rows if self.rows is not None else rows + (self.k.shape[2] - self.q.shape[2])

    def query_rows(self, rows: Tensor) -> Tensor:
        """Queries of some rows of a one-document batch: rows int64 [R] -> contiguous [h, R, d].

        Raises:
            ValueError: rows that are not held.
        """
        return self.q[0][:, self._places(rows)].contiguous()

    def input_rows(self, rows: Tensor) -> Tensor:
        """The attention block's input at some rows: rows int64 [R] -> [b, R, dim].

        Raises:
            ValueError: rows that are not held.
        """
        return self.x[:, rows if self.x.shape[1] == self.k.shape[2] else self._places(rows)]

    def output_rows(self, rows: Tensor) -> Tensor:
        """The model's attention output of some rows of a one-document batch: rows int64 [R] -> contiguous [R, h, dv].

        Raises:
            ValueError: rows that are not held.
        """
        return self.output[0][self._places(rows)].contiguous()

    def selected_rows(self, rows: Tensor) -> Tensor | None:
        """What the output of some rows of a one-document batch attends to: rows int64 [R] -> int32 [R, k], or None."""
        return None if self.selected is None else self.selected[0][self._places(rows)]

    def keys(self) -> Tensor:
        """All that the queries of a one-document batch look at: the tokens' keys, then the compressed, [k, e, d]."""
        return self.k[0] if self.compressed is None else torch.cat([self.k[0], self.compressed.k[0]], dim=1)

    def values(self) -> Tensor:
        """The values that go with `keys`, [k, e, dv]."""
        return self.v[0] if self.compressed is None else torch.cat([self.v[0], self.compressed.v[0]], dim=1)

    def _places(self, rows: Tensor) -> Tensor:
        """Where `rows` are along s."""
        if self.rows is None:
            return rows
        places = torch.searchsorted(self.rows, rows.contiguous()).clamp(max=len(self.rows) - 1)
        lacking = rows[self.rows[places] != rows].tolist()
        if lacking:
            named = ", ".join(str(row) for row in lacking[:5]) + (" ..." if len(lacking) > 5 else "")
            raise ValueError(f"layer {self.layer}: rows {named} are not there; only {len(self.rows)} rows were kept")
        return places

    def contiguous(self) -> LayerActivations:
        """The same values with k, v and x in one memory layout.

        Models leave them in various ones, sums may depend on it in the last bit, and a recording keeps none: this is
        what lets a replay give the bits of the live run.
        """
        k, v, x = self.k.contiguous(), self.v.contiguous(), self.x.contiguous()
        return dataclasses.replace(self, k=k, v=v, x=x)


class LeftOut:
    """Stands where a recording has no tensor, because it was made without; using it raises ValueError with `reason`."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def contiguous(self) -> LeftOut:
        return self

    def __getattr__(self, name: str) -> Any:
        raise ValueError(self.reason)

    def __getitem__(self, key: Any) -> Any:
        raise ValueError(self.reason)


Observer = Callable[[LayerActivations], None]


class ObservableModel(Protocol):
    """Anything whose attention can be measured."""

    name: str
    fingerprint: str  # of everything that changes its outputs: weights, config
    attention: str  # how it computes attention (sdpa, eager ...): the last bits differ
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    max_length: int | None
    tokenizer: Any
    native: NativeSelection | None  # the model's own sparse attention; None = it is dense

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def windows(self) -> dict[int, int | None]:
        """Layer -> sliding window (None = full causal), only for layers that have softmax attention.

        A layer with compressed keys behind its window counts as full causal.
        """
        ...

    def observe(self, tokens: Tensor, observer: Observer, layers: Collection[int]) -> None:
        """Run tokens int64 [1, t] once; call `observer` in layer order for each of `layers`."""
        ...
