"""Index scores on a GPU: Σ_h w_h · relu(q_h · k_j), heads summed in registers, tiles nobody can see skipped.

The plain reference is `indexer.index_scores`.

Shapes: s query rows, h index heads, d index head dim, n compressed positions, nb blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsity_lab.kernels.launch import Config, lines, precision, tile_order


@triton.jit
def _score_kernel(
    q, k, w, visible, out, blocks, rows, positions, n_blocks,
    m_tiles, n_tiles,
    HEADS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BAND: tl.constexpr,
    RELU: tl.constexpr, SCORES: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of rows and positions. BLOCK: positions a block whose maximum is written too; 0 = none."""
    m, n = tile_order(tl.program_id(0), m_tiles, n_tiles, BAND)
    r = m * M + tl.arange(0, M)
    j = n * N + tl.arange(0, N)
    there = r < rows
    length = tl.load(visible + r, mask=there, other=0)
    score = tl.full([M, N], float("-inf"), tl.float32)
    if n * N < tl.max(length, 0):
        key = k.load([n * N, 0]).T
        acc = tl.zeros([M, N], tl.float32)
        for head in range(HEADS):
            s = tl.dot(q.load([head * rows + m * M, 0]), key, input_precision=PRECISION)
            if RELU:
                s = tl.maximum(s, 0.0)
            acc += s * tl.load(w + head * rows + r, mask=there, other=0.0)[:, None]
        score = tl.where(j[None, :] < length[:, None], acc, float("-inf"))
    if SCORES:
        place = r[:, None].to(tl.int64) * positions + j[None, :]
        tl.store(out + place, score, mask=there[:, None] & (j < positions)[None, :])
    if BLOCK:
        best = tl.max(tl.reshape(score, [M, N // BLOCK, BLOCK]), 2)
        b = n * (N // BLOCK) + tl.arange(0, N // BLOCK)
        tl.store(
            blocks + r[:, None].to(tl.int64) * n_blocks + b[None, :],
            best,
            mask=there[:, None] & (b < n_blocks)[None, :],
        )


BEST = Config()
IN_FLOAT32 = Config(m=64, n=64)  # twice the bytes a number: larger tiles do not fit


class IndexScores(NamedTuple):
    """Scores float32 [s, n] and best score of every block float32 [s, nb], each None where it was not asked for."""

    scores: Tensor | None
    blocks: Tensor | None


def index_scores(
    q: Tensor, k: Tensor, w: Tensor, visible: Tensor, *, relu: bool = True, block_size: int | None = None,
    scores: bool = True, config: Config | None = None,
) -> IndexScores:  # fmt: skip
    """Index scores of some rows and, in the same pass, the best score of every block.

    Args:
        q: [h, s, d]; k: [n, d]; w: float [h, s]. 16-bit inputs (quantised ones are exact there) use the tensor cores at
            full speed, float32 inputs three tf32 products; sums are float32.
        visible: int64 [s], positions each row may see; the others score -inf.
        block_size: a power of two up to the tile's width; None = no block maxima. scores: False = block maxima alone,
            so that a candidate source never writes its score matrix.
    Raises:
        ValueError: a block size that does not divide the tile's width.
    """
    config = config or (BEST if q.element_size() == 2 else IN_FLOAT32)
    heads, rows, _ = q.shape
    n = k.shape[0]
    if block_size is not None and (block_size < 1 or config.n % block_size):
        raise ValueError(f"block_size={block_size}: must divide the tile's width {config.n}")
    out = torch.empty(rows, n, dtype=torch.float32, device=q.device) if scores else None
    n_blocks = 0 if block_size is None else triton.cdiv(n, block_size)
    blocks = None if block_size is None else torch.empty(rows, n_blocks, dtype=torch.float32, device=q.device)
    if rows and n:
        m_tiles, n_tiles = triton.cdiv(rows, config.m), triton.cdiv(n, config.n)
        w = w.float().contiguous()
        _score_kernel[(m_tiles * n_tiles,)](
            lines(q, config.m), lines(k, config.n), w, visible.contiguous(), w if out is None else out,
            w if blocks is None else blocks, rows, n, n_blocks, m_tiles, n_tiles, HEADS=heads, M=config.m, N=config.n,
            BAND=config.band, RELU=relu, SCORES=scores, BLOCK=block_size or 0, PRECISION=precision(q),
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
    return IndexScores(out, blocks)
