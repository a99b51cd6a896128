"""Triton kernels, each beside its plain reference. Nothing here is imported on a CPU path: ask `usable` first."""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor


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
