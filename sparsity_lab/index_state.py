"""What index layers share, in one explicit object that the caller passes from layer to layer and from call to call.

Shapes: b batch, s query rows of one call, n compressed positions, d index head dim, k top-k.

Whatever is read here is checked to belong to the call that reads it: keys are looked up at their owner every time (the
published code keeps only the keys published last, so that with several owners a decode step scores another layer's
keys), and a pool or selection left over from an earlier call is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import Tensor

from sparsity_lab.selection import as_mask

CandidateRole = Literal["none", "source", "consumer"]


@dataclass(frozen=True)
class IndexRole:
    """One index layer's place in the topology.

    Args:
        layer: its number.
        owner: the layer whose index keys it scores against; itself when it makes its own.
        ratio: tokens a compressed position.
        topk: selection budget k.
        candidate: "source" publishes the candidate pool (and does not restrict itself), "consumer" selects inside it.
        topk_blocks, block_size: the pool a source publishes.
    Raises:
        ValueError: a value outside its range.
    """

    layer: int
    owner: int
    ratio: int
    topk: int
    candidate: CandidateRole = "none"
    topk_blocks: int = 0
    block_size: int = 0

    def __post_init__(self) -> None:
        if self.ratio < 1:
            raise ValueError(f"compress_ratio={self.ratio}: an index layer needs at least 1")
        if self.topk < 1:
            raise ValueError(f"index_topk={self.topk}: must be at least 1")
        if self.owner > self.layer or self.owner < 0:
            raise ValueError(f"owner={self.owner}: keys come from layer {self.layer} itself or an earlier one")
        if self.candidate not in get_args(CandidateRole):
            raise ValueError(f"candidate={self.candidate!r}: must be one of {get_args(CandidateRole)}")
        if self.candidate == "source" and (self.topk_blocks < 1 or self.block_size < 1):
            raise ValueError(
                f"candidate_topk_blocks={self.topk_blocks}, candidate_block_size={self.block_size}: "
                "must be at least 1 at the candidate source layer"
            )


class KeyCache:
    """The index keys of one owner layer, growing along the position axis; appending is amortised O(new)."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self.length = 0

    def append(self, keys: Tensor) -> None:
        """Add [b, m, d] keys behind those there are.

        Raises:
            ValueError: batch, width or dtype differ from the keys there are.
        """
        end = self.length + keys.shape[1]
        buffer = self._buffer
        if buffer is None:
            self._buffer = keys  # the usual single prefill needs no copy
        else:
            if (buffer.shape[0], buffer.shape[2], buffer.dtype) != (keys.shape[0], keys.shape[2], keys.dtype):
                raise ValueError(
                    f"keys are {keys.dtype} {tuple(keys.shape)}: the cache holds {buffer.dtype} {tuple(buffer.shape)}"
                )
            if end > buffer.shape[1]:
                grown = buffer.new_empty(buffer.shape[0], max(end, 2 * self.length), buffer.shape[2])
                grown[:, : self.length] = buffer[:, : self.length]
                self._buffer = buffer = grown
            buffer[:, self.length : end] = keys
        self.length = end

    def view(self) -> Tensor | None:
        """[b, n, d], the filled part only; None before the first key."""
        return None if self._buffer is None else self._buffer[:, : self.length]


@dataclass(frozen=True)
class CandidatePool:
    """The pool one candidate source published in one call.

    Kept as block numbers: a boolean mask over positions would need s × n bytes (15 GiB at 16K × 1M).
    """

    blocks: Tensor  # int32 [b, s, ≤ topk_blocks], ascending, -1 at the end
    width: int  # n, compressed positions when it was published
    block_size: int
    start_pos: int
    owner: int
    ratio: int

    def mask(self, rows: slice = slice(None)) -> Tensor:
        """bool [b, rows, n]: true inside the kept blocks, which are kept whole: causality still has to be applied."""
        kept = as_mask(self.blocks[:, rows], -(-self.width // self.block_size))
        return kept.repeat_interleave(self.block_size, dim=-1)[..., : self.width]


@dataclass
class SharedIndexState:
    """Keys per owner layer, the candidate pool and the latest top-k of one batch of sequences.

    Start with an empty one, pass it to every index layer in layer order, and keep it for the next call.
    """

    keys: dict[int, KeyCache] = field(default_factory=dict)
    pool: CandidatePool | None = None
    topk: Tensor | None = None  # int32 [b, s, ≤ k], of the latest index source
    topk_start: int = -1  # absolute position of its first row

    def pool_for(self, role: IndexRole, start_pos: int, rows: int) -> CandidatePool:
        """The pool published in this call, for a consumer.

        Raises:
            ValueError: there is none, or it belongs to other rows, keys or another ratio.
        """
        pool = self.pool
        if pool is None:
            raise ValueError(f"layer {role.layer} is a candidate consumer, but no candidate pool has been published")
        if (pool.start_pos, pool.blocks.shape[1]) != (start_pos, rows):
            raise ValueError(
                f"layer {role.layer}: the candidate pool covers {pool.blocks.shape[1]} rows from {pool.start_pos}, "
                f"this call has {rows} from {start_pos}: run the candidate source first in every call"
            )
        if (pool.owner, pool.ratio) != (role.owner, role.ratio):
            raise ValueError(
                f"layer {role.layer} reads the keys of layer {role.owner} at ratio {role.ratio}, but the pool is made "
                f"of positions of layer {pool.owner} at ratio {pool.ratio}: both must be the same"
            )
        return pool

    def latest_topk(self, start_pos: int, rows: int) -> Tensor:
        """The selection of the latest index source in this call, for a reuse layer: int32 [b, s, ≤ k].

        Raises:
            ValueError: no index source has run in this call.
        """
        if self.topk is None or (self.topk_start, self.topk.shape[1]) != (start_pos, rows):
            raise ValueError(f"no index source has selected for the {rows} rows from position {start_pos}")
        return self.topk
