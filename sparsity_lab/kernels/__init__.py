"""Triton kernels, each beside its plain reference. Nothing here is imported on a CPU path: ask `usable` first."""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

WIDEST = 256  # channels of which a tile of queries and two of keys fit into a multiprocessor's shared memory
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def usable(where: Tensor | torch.device) -> bool:
    """Whether kernels serve a tensor or a device: a GPU, with Triton installed."""
    device = where.device if isinstance(where, Tensor) else where
    return device.type == "cuda" and _triton() and os.environ.get("SPARSITY_LAB_KERNELS", "1") != "0"


def multiplies(vectors: Tensor) -> bool:
    """Whether kernels take vectors [..., d] of this kind to multiply."""
    return usable(vectors) and vectors.dtype in DTYPES and vectors.shape[-1] <= WIDEST
