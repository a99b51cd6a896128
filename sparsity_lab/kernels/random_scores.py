"""The random baseline's scores in one pass over memory; the plain reference is `scorers.Random`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _random_kernel(row_hash, out, n, STEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * STEP + tl.arange(0, STEP)
    x = tl.load(row_hash + row) + at.to(tl.int64)
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    tl.store(out + row * n + at, (x & 0xFFFFFF).to(tl.float32), mask=at < n)


def random_scores(row_hash: Tensor, n: int) -> Tensor:
    """int64 [R], a hash of everything but the position -> float32 [R, n], whole numbers below 2**24."""
    out = torch.empty(len(row_hash), n, dtype=torch.float32, device=row_hash.device)
    if out.numel():
        _random_kernel[(len(row_hash), triton.cdiv(n, 1024))](row_hash.contiguous(), out, n, STEP=1024)
    return out
