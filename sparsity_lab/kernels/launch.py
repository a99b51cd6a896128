"""What the kernels' launches share."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparsity_lab.selection import padded


class Config(NamedTuple):
    """Tile of a launch: m rows, n tokens or positions, warps, stages of the software pipeline, row tiles a band."""

    m: int = 64
    n: int = 128
    warps: int = 4
    stages: int = 2
    band: int = 16


PRECISION = {"torch.float32": "tf32x3"}  # three tf32 products keep float32's digits; 16-bit inputs multiply exactly


def precision(tensor: Tensor) -> str:
    """How `tl.dot` multiplies tensors of this dtype."""
    return PRECISION.get(str(tensor.dtype), "tf32")


def lines(tensor: Tensor, height: int) -> TensorDescriptor:
    """A tensor [..., d] as lines of d channels, of which a kernel fetches `height` at once, channels padded with zeros
    to a power of two. Lines past an axis' end are the next ones in memory, past the last one zeros."""
    width = tensor.shape[-1]
    tensor = padded(tensor, width + -width % (16 // tensor.element_size()))  # the copy engine moves 16 bytes at a time
    flat = tensor.reshape(-1, tensor.shape[-1]).contiguous()
    return TensorDescriptor.from_tensor(flat, [height, max(16, triton.next_power_of_2(width))])


@triton.jit
def tile_order(index, m_tiles, n_tiles, BAND: tl.constexpr):
    """Tile (m, n) of a flat index: bands of BAND row tiles, column by column, so neighbours share keys in the cache."""
    band = index // (BAND * n_tiles)
    height = tl.minimum(m_tiles - band * BAND, BAND)
    inside = index % (BAND * n_tiles)
    return band * BAND + inside % height, inside // height
