"""What a DeepSeek V4.1 model keeps between calls: window KV, unfinished groups, compressed KV, index keys.

Shapes: b batch, d head dim, n compressed positions. Sequences of a batch advance together, token 0 first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsity_lab.compressor import CompressorState
from sparsity_lab.index_state import KeyCache, SharedIndexState


@dataclass
class WindowCache:
    """The last `window - 1` tokens' KV of one layer: what the next query sees besides itself."""

    window: int
    kv: Tensor | None = None  # [b, ≤ window - 1, d]

    def extend(self, kv: Tensor) -> Tensor:
        """Put the tokens of a call [b, s, d] behind those kept: [b, kept + s, d]."""
        whole = kv if self.kv is None else torch.cat([self.kv, kv], dim=1)
        # a copy: a view would keep the whole call's KV alive
        self.kv = whole[:, max(0, whole.shape[1] - (self.window - 1)) :].clone()
        return whole


@dataclass
class Cache:
    """One batch of sequences. Start with an empty one and pass it to every call of `DeepseekV41Model`."""

    length: int = 0  # tokens seen
    batch: int = 0
    windows: dict[int, WindowCache] = field(default_factory=dict)  # layer -> its window
    groups: dict[int, CompressorState] = field(default_factory=dict)  # KV source -> unfinished group
    compressed: dict[int, KeyCache] = field(default_factory=dict)  # KV source -> compressed KV
    index: SharedIndexState = field(default_factory=SharedIndexState)
    tokens: Tensor | None = None  # the last ids, for n-gram hashing
    broken: bool = False  # a call has failed half way

    def begin(self, batch: int) -> int:
        """Start a call; the position of its first token.

        Raises:
            ValueError: another batch size, or an earlier call failed and left the parts at different lengths.
        """
        if self.broken:
            raise ValueError("the cache is of no use any more: an earlier call with it failed half way; start anew")
        if self.length and batch != self.batch:
            raise ValueError(f"batch={batch}: the cache holds {self.batch} sequences")
        self.broken, self.batch = True, batch
        return self.length

    def end(self, tokens: int) -> None:
        """A call of `tokens` tokens is complete."""
        self.length += tokens
        self.broken = False
