"""The compressor: `ratio` neighbouring tokens become one latent.

Shapes: b batch, s tokens of this call, m groups completed by it, r ratio, d latent width.
Source: the compressed sparse attention of DeepSeek V4.1's published inference code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from sparsity_lab.norm import RMSNorm

PLAIN = partial(nn.Linear, bias=False)


@dataclass
class CompressorState:
    """What one compressor carries between calls: the tokens of the group that is still filling.

    Use one a layer and a sequence batch, starting empty; the compressor updates it.
    """

    values: Tensor | None = None  # [b, p, d] with p < ratio
    gates: Tensor | None = None  # [b, p, d]

    @property
    def pending(self) -> int:
        """Tokens waiting for their group to complete."""
        return 0 if self.values is None else self.values.shape[1]


class Compressor(nn.Module):
    """latent = norm(Σ softmax over the group (wgate x) · wkv x), per channel; with ratio 1 norm(wkv x), without a gate.

    Pooling is in float32. The latent carries no position: whoever uses it applies RoPE at the group's first token.
    All sequences of a batch advance together, token 0 first: there is no padding, since a padded token would be pooled
    into a real group. Ragged batches must be run one by one.

    Args:
        dim: width of x.
        head_dim: width of the latent.
        ratio: tokens a group.
        norm_eps: epsilon of the norm.
        linear: makes a projection of (dim, head_dim).
    Raises:
        ValueError: ratio below 1.
    """

    def __init__(
        self,
        dim: int,
        head_dim: int,
        ratio: int,
        norm_eps: float,
        linear: Callable[[int, int], nn.Module] = PLAIN,
    ) -> None:
        super().__init__()
        if ratio < 1:
            raise ValueError(f"compress_ratio={ratio}: a compressor needs at least 1 token a group")
        self.ratio = ratio
        self.wkv = linear(dim, head_dim)
        self.wgate = linear(dim, head_dim) if ratio > 1 else None
        self.norm = RMSNorm(head_dim, norm_eps)

    def forward(self, x: Tensor, state: CompressorState | None = None) -> Tensor | None:
        """Compress the tokens of this call together with those left over from the last one.

        Args:
            x: [b, s, dim], the tokens right after those of the last call with this state.
            state: carries the incomplete group; None for a single call, whose incomplete tail is dropped.
        Returns:
            [b, m, head_dim], or None when no group completes.
        Raises:
            ValueError: the batch is not the one the state belongs to.
        """
        if self.wgate is None:
            return self.norm(self.wkv(x)) if x.shape[1] else None
        values, gates = self.wkv(x), self.wgate(x)
        if state is not None and state.values is not None and state.gates is not None:
            if state.values.shape[0] != x.shape[0]:
                raise ValueError(f"batch={x.shape[0]}: the compressor state holds {state.values.shape[0]} sequences")
            values, gates = torch.cat([state.values, values], dim=1), torch.cat([state.gates, gates], dim=1)
        complete = values.shape[1] // self.ratio * self.ratio
        if state is not None:
            # copies: a view would keep the whole call's projections alive
            state.values, state.gates = values[:, complete:].clone(), gates[:, complete:].clone()
        if not complete:
            return None
        return self.norm(self._pool(values[:, :complete], gates[:, :complete])).to(values.dtype)

    def _pool(self, values: Tensor, gates: Tensor) -> Tensor:
        """[b, m·r, d] twice -> float32 [b, m, d]."""
        values = values.float().unflatten(1, (-1, self.ratio))
        weights = gates.float().unflatten(1, (-1, self.ratio)).softmax(dim=2)
        return (weights * values).sum(dim=2)
