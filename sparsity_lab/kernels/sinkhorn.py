"""Sinkhorn normalisation of many small matrices in registers, forward and backward.

Each program holds `BLOCK` matrices [c, c]. The backward pass computes every intermediate state anew from the input
instead of storing them: with 4 x 4 matrices that is cheaper than reading 40 states from memory.
The plain reference is `models.deepseek_v41.hyper.sinkhorn`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32


@triton.jit
def _rows(x, eps):
    return tl.sum(x, axis=2, keep_dims=True) + eps


@triton.jit
def _columns(x, eps):
    return tl.sum(x, axis=1, keep_dims=True) + eps


@triton.jit
def _softmax(x):
    e = tl.exp(x - tl.max(x, axis=2, keep_dims=True))
    return e / tl.sum(e, axis=2, keep_dims=True)


@triton.jit
def _places(count, C: tl.constexpr, BLOCK: tl.constexpr):
    which = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, C)[None, :, None]
    place = which[:, None, None] * (C * C) + row * C + tl.arange(0, C)[None, None, :]
    return place, place < count * C * C


@triton.jit
def _forward(logits, out, count, iters, eps, C: tl.constexpr, BLOCK: tl.constexpr):
    place, there = _places(count, C, BLOCK)
    x = _softmax(tl.load(logits + place, mask=there, other=0.0)) + eps
    x = x / _columns(x, eps)
    for _ in range(iters - 1):
        x = x / _rows(x, eps)
        x = x / _columns(x, eps)
    tl.store(out + place, x, mask=there)


@triton.jit
def _backward(logits, grad, out, count, iters, eps, C: tl.constexpr, BLOCK: tl.constexpr):
    place, there = _places(count, C, BLOCK)
    p = _softmax(tl.load(logits + place, mask=there, other=0.0))
    g = tl.load(grad + place, mask=there, other=0.0)
    size = _columns(p + eps, eps)
    first = (p + eps) / size
    for back in range(iters - 1):
        x = first
        for _ in range(iters - 2 - back):
            x = x / _rows(x, eps)
            x = x / _columns(x, eps)
        row_size = _rows(x, eps)
        r = x / row_size
        column_size = _columns(r, eps)
        c = r / column_size
        g = (g - tl.sum(g * c, axis=1, keep_dims=True)) / column_size
        g = (g - tl.sum(g * r, axis=2, keep_dims=True)) / row_size
    g = (g - tl.sum(g * first, axis=1, keep_dims=True)) / size
    g = p * (g - tl.sum(g * p, axis=2, keep_dims=True))
    tl.store(out + place, g, mask=there)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, iters: int, eps: float) -> Tensor:
        logits = logits.contiguous()
        ctx.save_for_backward(logits)
        ctx.iters, ctx.eps = iters, eps
        return _launch(_forward, logits, None, iters, eps)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (logits,) = ctx.saved_tensors
        return _launch(_backward, logits, grads[0].contiguous(), ctx.iters, ctx.eps), None, None


def _launch(kernel, logits: Tensor, grad: Tensor | None, iters: int, eps: float) -> Tensor:
    out, copies = torch.empty_like(logits), logits.shape[-1]
    count = logits.numel() // copies**2
    inputs = (logits,) if grad is None else (logits, grad)
    kernel[(triton.cdiv(count, BLOCK),)](*inputs, out, count, iters, eps, C=copies, BLOCK=BLOCK, num_warps=4)
    return out


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """As the plain function of this name, differentiable; float32 [..., c, c], c a power of two."""
    return _Sinkhorn.apply(logits, iters, eps)
