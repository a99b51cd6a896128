"""Which optimiser moves which parameter: Muon the matrices inside the layers, AdamW everything else.

Sources: Muon (Jordan et al., 2024) with the update size of arXiv 2502.16982, where one learning rate serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparsity_lab.pretrain_shard import joined, local, part, whole

BETAS = (0.9, 0.95)
MOMENTUM = 0.95
# coefficients of the quintic that drives singular values towards 1
_A, _B, _C = 3.4445, -4.7750, 2.0315
_INDEXER = ".indexer."


def orthogonalised(matrices: Tensor, steps: int = 5) -> Tensor:
    """Each of [n, rows, columns] with its singular values near 1, by Newton-Schulz; in bfloat16 on a GPU."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.transpose(-1, -2) if tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(steps):
        square = x @ x.transpose(-1, -2)
        x = _A * x + (_B * square + _C * square @ square) @ x
    return (x.transpose(-1, -2) if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised; for matrices [rows, columns] and stacks of them [n, rows, columns].

    Matrices of one shape are handled together. Sharded ones have a sharded momentum; it is gathered for the update, of
    which every process applies its part.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = MOMENTUM, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(tuple(p.shape[-2:]), []).append(p)
            for shape, params in shapes.items():
                self._move(group, shape, params)

    def _move(self, group: dict[str, Any], shape: tuple[int, ...], params: list[Tensor]) -> None:
        grads = [local(p.grad).float() for p in params if p.grad is not None]
        kept = []
        for p in params:
            state = self.state[p]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
            kept.append(local(state["momentum"]))
        torch._foreach_lerp_(kept, grads, 1 - group["momentum"])
        ahead = torch._foreach_lerp(grads, kept, group["momentum"])
        gathered = [whole(joined(u, p)) for u, p in zip(ahead, params, strict=True)]
        stacked = torch.cat([u.reshape(-1, *shape) for u in gathered])
        size = 0.2 * max(shape) ** 0.5  # the root mean square of AdamW's updates
        updates = orthogonalised(stacked).split([p.numel() // (shape[0] * shape[1]) for p in params])
        own = [local(p) for p in params]
        torch._foreach_mul_(own, 1 - group["lr"] * group["weight_decay"])
        moves = [part(u.reshape(p.shape), p).to(p.dtype) for u, p in zip(updates, params, strict=True)]
        torch._foreach_add_(own, moves, alpha=-group["lr"] * size)


def is_indexer(name: str) -> bool:
    """Whether a parameter learns from the index loss."""
    return _INDEXER in name


def kind_of(name: str, parameter: Tensor) -> str:
    """matrices (inside a layer, mapping channels to channels), embed, indexer, mixing (what steers streams and experts,
    where small moves change a lot), or the rest."""
    if is_indexer(name):
        return "indexer"
    if "hc_" in name or ".gate." in name:
        return "mixing"
    if ".layers." in name and parameter.dim() >= 2:
        return "matrices"
    return "embed" if "embed." in name else "rest"


def make(
    model: nn.Module,
    *,
    optimiser: str,
    lr: float,
    index_lr: float,
    embed_lr: float,
    mixing_lr: float,
    weight_decay: float,
) -> list[torch.optim.Optimizer]:
    """One or two optimisers; every group has `peak`, the learning rate that a schedule scales."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    rates = {"matrices": lr, "embed": embed_lr, "indexer": index_lr, "mixing": mixing_lr, "rest": lr}
    decays = {"matrices": weight_decay}
    # sharded and whole parameters cannot be moved together
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {(kind, cut): [] for kind in rates for cut in (False, True)}
    for name, p in named:
        groups[kind_of(name, p), isinstance(p, DTensor)].append(p)
    made = {
        (kind, cut): {"params": params, "lr": rates[kind], "peak": rates[kind], "weight_decay": decays.get(kind, 0.0)}
        for (kind, cut), params in groups.items()
        if params
    }
    fused = named[0][1].is_cuda
    matrices = [made.pop(key) for key in list(made) if optimiser == "muon" and key[0] == "matrices"]
    if matrices:
        muon = Muon(matrices, lr=lr)
        return [muon, torch.optim.AdamW(list(made.values()), lr=lr, betas=BETAS, fused=fused)]
    return [torch.optim.AdamW(list(made.values()), lr=lr, betas=BETAS, fused=fused)]
