"""What a model hands to an observer, once per attention layer, and what a model must offer to be measured."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerActivations:
    """One attention layer's tensors during one forward, valid only while the observer runs.

    Shapes (b batch, h query heads, k key heads, s query rows, t key positions, d head dim); row i stands at absolute
    position t - s + i.
    """

    layer: int
    q: Tensor  # [b, h, s, d] after RoPE
    k: Tensor  # [b, k, t, d] after RoPE
    v: Tensor  # [b, k, t, dv]
    x: Tensor  # [b, s, dim] the attention block's input
    output: Tensor  # [b, s, h, dv] the model's own attention output, before its output projection
    scale: float
    softcap: float | None = None
    sink: Tensor | None = None  # [h] logits, in the softmax denominator only
    window: int | None = None  # sliding window in tokens, the query's own included; None = full causal


Observer = Callable[[LayerActivations], None]


class ObservableModel(Protocol):
    """Anything whose attention can be measured."""

    name: str
    fingerprint: str  # of everything that changes its outputs: weights, config
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    max_length: int | None
    tokenizer: Any

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def windows(self) -> dict[int, int | None]:
        """Layer -> sliding window (None = full causal), only for layers that have softmax attention."""
        ...

    def observe(self, tokens: Tensor, observer: Observer, layers: Collection[int]) -> None:
        """Run tokens int64 [1, t] once; call `observer` in layer order for each of `layers`."""
        ...
