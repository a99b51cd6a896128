"""The dense-mass kernel for Hopper (H100, H200), in Gluon: the tensor cores multiply the next head's queries and keys
while this head's exponentials are taken.

Both halves of the work take about as long there, and blocks that share a multiprocessor drift into step, so that the
plain kernel does first the one and then the other. 16-bit inputs, no soft-cap, no sliding window; `dense_mass` decides.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

M, N, STAGES, BAND = 64, 128, 3, 16  # rows, tokens, queries in flight, row tiles a band: found by measuring
CHAIN = 8  # products that follow each other without a pause
LOG2E = 1.4426950408889634
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _fetch(desc, line, barrier, place, wanted):
    """Start copying one tile; `barrier` tells when it is there."""
    mbarrier.expect(barrier, desc.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(desc, [line, 0], barrier, place, pred=wanted)


@gluon.jit
def _mass_kernel(
    q, k, lse, positions, out, rows, columns, groups_out, scale, m_tiles, n_tiles,
    KEYS: gl.constexpr, HEADS: gl.constexpr, SAME_KEY: gl.constexpr, RATIO: gl.constexpr, RPAD: gl.constexpr,
    AT_ONCE: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """One tile of rows and positions of one group; arguments as in `dense_mass._mass_kernel`, scale in units of log 2.

    AT_ONCE: key heads whose products form one chain; it divides KEYS.
    """
    M: gl.constexpr = q.block_type.shape[0]
    N: gl.constexpr = k.block_type.shape[0]
    H: gl.constexpr = KEYS * HEADS
    width: gl.constexpr = N // RPAD
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    index = gl.program_id(0)
    group = gl.program_id(1)
    band = index // (BAND * n_tiles)
    height = gl.minimum(m_tiles - band * BAND, BAND)
    inside = index % (BAND * n_tiles)
    m = band * BAND + inside % height
    n = inside // height
    r = m * M + gl.arange(0, M, layout=gl.SliceLayout(1, mma))
    there = r < rows
    row = gl.load(positions + r, mask=there, other=-1)
    first = n * width * RATIO
    acc = gl.zeros([M, N], gl.float32, layout=mma)
    if first <= gl.max(row, 0):
        queries = gl.allocate_shared_memory(q.dtype, [STAGES, M, q.block_type.shape[1]], q.layout)
        keys = gl.allocate_shared_memory(k.dtype, [2, N, k.block_type.shape[1]], k.layout)
        query_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        key_there = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(query_there.index(stage), count=1)
        for stage in gl.static_range(2):
            mbarrier.init(key_there.index(stage), count=1)
        at_q = group * H * rows + m * M
        at_k = n * N
        for stage in gl.static_range(2):
            line = (group * KEYS + stage) // SAME_KEY * columns + at_k
            _fetch(k, line, key_there.index(stage), keys.index(stage), stage < KEYS)
        for stage in gl.static_range(STAGES):
            _fetch(q, at_q + stage * rows, query_there.index(stage), queries.index(stage), stage < H)
        nothing = gl.zeros([M, N], gl.float32, layout=mma)
        for i in range(0, KEYS, AT_ONCE):
            mbarrier.wait(key_there.index(i % 2), (i // 2) & 1)
            key = keys.index(i % 2).permute((1, 0))
            h0 = i * HEADS
            mbarrier.wait(query_there.index(h0 % STAGES), (h0 // STAGES) & 1)
            now = warpgroup_mma(queries.index(h0 % STAGES), key, nothing, use_acc=False, is_async=True)
            for j in gl.static_range(HEADS * AT_ONCE):
                h = h0 + j
                row_lse = gl.load(lse + (group * H + h) * rows + r, mask=there, other=0.0)
                if j < HEADS * AT_ONCE - 1:
                    nxt = h + 1
                    if (j + 1) % HEADS == 0:
                        i_next = i + (j + 1) // HEADS
                        mbarrier.wait(key_there.index(i_next % 2), (i_next // 2) & 1)
                        key = keys.index(i_next % 2).permute((1, 0))
                    mbarrier.wait(query_there.index(nxt % STAGES), (nxt // STAGES) & 1)
                    later = warpgroup_mma(queries.index(nxt % STAGES), key, nothing, use_acc=False, is_async=True)
                    s = warpgroup_mma_wait(num_outstanding=1, deps=[now])
                    now = later
                else:
                    s = warpgroup_mma_wait(num_outstanding=0, deps=[now])
                # this product is done, so its queries' place is free, and after a key's last so is the key's
                line = at_q + (h + STAGES) * rows
                _fetch(q, line, query_there.index(h % STAGES), queries.index(h % STAGES), h + STAGES < H)
                if (j + 1) % HEADS == 0:
                    i_done = i + j // HEADS
                    line_k = (group * KEYS + i_done + 2) // SAME_KEY * columns + at_k
                    _fetch(k, line_k, key_there.index(i_done % 2), keys.index(i_done % 2), i_done + 2 < KEYS)
                acc += gl.exp2(s * scale - row_lse[:, None])
        for stage in gl.static_range(STAGES):
            mbarrier.invalidate(query_there.index(stage))
        for stage in gl.static_range(2):
            mbarrier.invalidate(key_there.index(stage))
        column = gl.arange(0, N, layout=gl.SliceLayout(0, mma))
        member = column % RPAD
        token = first + column // RPAD * RATIO + member
        acc = gl.where((token[None, :] > row[:, None]) | (member >= RATIO)[None, :], 0.0, acc) / H
    if RPAD > 1:
        summed = gl.sum(gl.reshape(acc, [M, width, RPAD]), 2)
        final: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        acc = gl.convert_layout(summed, final)
        _store(acc, out, m, n, group, rows, groups_out, M, width, final)
    else:
        _store(acc, out, m, n, group, rows, groups_out, M, width, mma)


@gluon.jit
def _store(
    acc, out, m, n, group, rows, groups_out, M: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    r = m * M + gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))
    position = n * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    place = (group.to(gl.int64) * rows + r[:, None]) * groups_out + position[None, :]
    gl.store(out + place, acc, mask=(r < rows)[:, None] & (position < groups_out)[None, :])


def serves(q: Tensor, k: Tensor) -> bool:
    """Whether this kernel can take these inputs: on Hopper, 16 bits, 64 or 128 channels, at most 2 * CHAIN query heads
    a key head."""
    fits = q.dtype in DTYPES and q.shape[-1] in (64, 128) and q.shape[0] <= 2 * CHAIN * k.shape[0]
    return fits and q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9


def launch(
    q: Tensor, k: Tensor, lse: Tensor, positions: Tensor, scale: float, out: Tensor, keys: int, heads: int,
    same_key: int, ratio: int, member: int,
) -> None:  # fmt: skip
    """Fill `out` float32 [g, R, n]; k [k, n * member, d] as `dense_mass` lays it out."""
    groups, rows, n = out.shape
    d, dtype = q.shape[-1], DTYPES[q.dtype]
    lines = [
        TensorDescriptor.from_tensor(
            x.contiguous().flatten(0, 1), [height, d], gl.NVMMASharedLayout.get_default_for([height, d], dtype)
        )
        for x, height in ((q, M), (k, N))
    ]
    m_tiles, n_tiles = triton.cdiv(rows, M), triton.cdiv(n * member, N)
    _mass_kernel[(m_tiles * n_tiles, groups)](
        *lines, lse, positions, out, rows, k.shape[1], n, scale * LOG2E, m_tiles, n_tiles,
        KEYS=keys, HEADS=heads, SAME_KEY=same_key, RATIO=ratio, RPAD=member,
        AT_ONCE=math.gcd(keys, max(1, CHAIN // heads)), STAGES=STAGES, BAND=BAND, num_warps=4,
    )  # fmt: skip
