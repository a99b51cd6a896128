"""What must hold of every selection, checked while measuring (DESIGN §2's invariants, in their cheap form)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparsity_lab.cells import Candidate, Cell
from sparsity_lab.dense import RowTile
from sparsity_lab.metrics import METRICS, Truth

# float32: a softmax row sums to 1 only within about 1e-6, and positions it ranks equal may differ in exact mass
SLACK = 1e-5
DENSE_SLACK = 1e-4  # relative output error of float32 sums in another order
POOL_ROWS = 8  # rows of a tile on which every pick is looked up in its pool


class CheckError(RuntimeError):
    """An invariant does not hold: a bug, or a model that is not what it says."""


def check_selections(
    tile: RowTile,
    pools: Mapping[Candidate | None, Cell],
    ranks: Sequence[Tensor | None],
    order: Tensor,
    true: Truth,
    values: Tensor,
    budgets: Sequence[int],
    own: bool,
) -> None:
    """Check P selections of a tile.

    Args:
        pools: a cell for every pool, in the order of P; ranks: its block ranks [g, R, nb].
        own: whether the layer selected itself, by its own mass, rather than reuse another's selection.
        order: int64 [P, g, R, L]; values: float64 [metric, K, P, g, R], NaN where undefined.
    Raises:
        CheckError: with the layer, row, group, k and cell.
    """
    found = dict(zip(METRICS, values, strict=True))
    cells = list(pools.values())
    free = [
        p is None and not c.selection.exclude_window and not c.selection.sinks
        for p, c in zip(pools, cells, strict=True)
    ]
    best = [own and f and c.scorer == "oracle" for f, c in zip(free, cells, strict=True)]
    ks = torch.tensor(budgets, device=order.device).view(-1, 1, 1, 1)
    everything = (true.visible <= ks) & _flags(free, order)
    full = everything | _flags(best, order)
    one_entry = tile.acts.compressed is not None or tile.length == true.mass.shape[-1] - 1  # a position, or ratio 1
    dense = everything & one_entry
    shares = values[: METRICS.index("output_error")]
    smaller = torch.cat([found["coverage"][:1], found["coverage"][:-1]])
    broken = {
        "a future position is selected": (order >= true.visible.unsqueeze(-1)).any(-1),
        "a position outside the pool is selected": _outside(order, pools, ranks),
        "coverage is above the oracle's": found["coverage"] > found["oracle_coverage"] + SLACK,
        "recall is below 1 though it must be full": full & (found["recall"] < 1),
        "coverage falls with k": found["coverage"] < smaller,
        "everything is attended and yet the output differs": dense & (found["output_error"] > DENSE_SLACK),
        "a share lies outside 0..1": ((shares < 0) | (shares > 1 + SLACK)).any(0),
    }
    flags = torch.stack([bad.expand(values.shape[1:]) for bad in broken.values()])
    if not flags.any():  # one look at the device, not one a check
        return
    what, bad = next((what, bad) for what, bad in zip(broken, flags, strict=True) if bad.any())
    k, pool, group, row = (int(x) for x in bad.nonzero()[0])
    raise CheckError(
        f"{what}: layer {tile.acts.layer}, row {int(tile.rows[row])}, group {group}, k {budgets[k]}, "
        f"cell {cells[pool].label()}"
    )


def _outside(order: Tensor, pools: Mapping[Candidate | None, Cell], ranks: Sequence[Tensor | None]) -> Tensor:
    """Whether a selection holds positions outside its pool, bool [P, g, R]; looked up on POOL_ROWS rows of the tile."""
    out = torch.zeros(order.shape[:-1], dtype=torch.bool, device=order.device)
    step = max(1, order.shape[2] // POOL_ROWS)
    for i, (pool, rank) in enumerate(zip(pools, ranks, strict=True)):
        if pool is not None and rank is not None:
            some = order[i, :, ::step]
            kept = rank[:, ::step].gather(-1, some.clamp(min=0) // pool.block_size) < pool.topk_blocks
            out[i, :, ::step] = (~kept & (some >= 0)).any(-1)
    return out


def _flags(values: Sequence[bool], like: Tensor) -> Tensor:
    """One flag a pool, [1, P, 1, 1]."""
    return torch.tensor(values, device=like.device).view(1, -1, 1, 1)
