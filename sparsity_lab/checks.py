"""What must hold of every selection, checked while measuring (DESIGN §2's invariants, in their cheap form)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from sparsity_lab.cells import Candidate, Cell
from sparsity_lab.dense import RowTile
from sparsity_lab.doubts import refuse
from sparsity_lab.metrics import METRICS, Truth
from sparsity_lab.selection import on_device, stacked

# float32: a softmax row sums to 1 only within about 1e-6, and positions it ranks equal may differ in exact mass
SLACK = 1e-5
DENSE_SLACK = 1e-4  # relative output error of float32 sums in another order
POOL_ROWS = 8  # rows of a tile on which every pick is looked up in its pool


class CheckError(RuntimeError):
    """An invariant does not hold: a bug, or a model that is not what it says."""


class Choice(Protocol):
    """What is checked of a selection: see `passes.Choice`."""

    @property
    def pool(self) -> Candidate | None: ...
    @property
    def ranks(self) -> Tensor | None: ...
    @property
    def example(self) -> Cell: ...
    @property
    def own(self) -> bool: ...
    @property
    def limit(self) -> int: ...


def check_selections(
    tile: RowTile, choices: Sequence[Choice], order: Tensor, true: Truth, values: Tensor, budgets: Sequence[int]
) -> None:
    """Check P selections of a tile.

    Args:
        order: whole numbers [P, g, R, L]; values: float64 [metric, K, P, g, R], NaN where undefined.
    Raises:
        CheckError: with the layer, row, group, k and cell.
    """
    found = dict(zip(METRICS, values, strict=True))
    selections = [choice.example.selection for choice in choices]
    free = [
        choice.pool is None and not s.exclude_window and not s.sinks
        for choice, s in zip(choices, selections, strict=True)
    ]
    best = [c.own and f and c.example.scorer == "oracle" for f, c in zip(free, choices, strict=True)]
    ks = on_device(budgets, order.device).view(-1, 1, 1, 1)
    everything = (true.visible <= ks) & _flags(free, order)
    full = everything | _flags(best, order)
    one_entry = tile.acts.compressed is not None or tile.length == true.mass.shape[-1] - 1  # a position, or ratio 1
    dense = everything & one_entry
    shares = values[: METRICS.index("output_error")]
    smaller = torch.cat([found["coverage"][:1], found["coverage"][:-1]])
    broken = {
        "a future position is selected": (order >= true.visible.unsqueeze(-1)).any(-1),
        "a position outside the pool is selected": _outside(order, choices),
        "coverage is above the oracle's": found["coverage"] > found["oracle_coverage"] + SLACK,
        "recall is below 1 though it must be full": full & (found["recall"] < 1),
        "coverage falls with k": found["coverage"] < smaller,
        "everything is attended and yet the output differs": dense & (found["output_error"] > DENSE_SLACK),
        "a share lies outside 0..1": ((shares < 0) | (shares > 1 + SLACK)).any(0),
    }
    answered = ks <= on_device([choice.limit for choice in choices], order.device).view(1, -1, 1, 1)
    flags = torch.stack([bad.expand(values.shape[1:]) & answered for bad in broken.values()])
    examples = [choice.example for choice in choices]
    error = partial(_error, list(broken), flags, tile.acts.layer, tile.rows, budgets, examples)
    refuse(flags.any(), error, tile.doubts)


def _error(
    names: Sequence[str], flags: Tensor, layer: int, rows: Tensor, budgets: Sequence[int], examples: Sequence[Cell]
) -> CheckError:
    """The first of the flags [check, K, P, g, R] that is raised, in words."""
    what, k, choice, group, row = flags.nonzero()[0].tolist()
    return CheckError(
        f"{names[what]}: layer {layer}, row {int(rows[row])}, group {group}, k {budgets[k]}, "
        f"cell {examples[choice].label()}"
    )


def _outside(order: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Whether a selection holds positions outside its pool, bool [P, g, R]; looked up on POOL_ROWS rows of the tile."""
    out = torch.zeros(order.shape[:-1], dtype=torch.bool, device=order.device)
    step = max(1, order.shape[2] // POOL_ROWS)
    pools = [(i, c.pool, c.ranks[:, ::step]) for i, c in enumerate(choices) if c.pool and c.ranks is not None]
    if pools:
        at = on_device([i for i, _, _ in pools], order.device)
        sizes = on_device([pool.block_size for _, pool, _ in pools], order.device).view(-1, 1, 1, 1)
        kept = on_device([pool.topk_blocks for _, pool, _ in pools], order.device).view(-1, 1, 1, 1)
        some = order[:, :, ::step].index_select(0, at)
        rank = stacked([ranks for _, _, ranks in pools]).gather(-1, some.clamp(min=0) // sizes)
        out[at, :, ::step] = ((rank >= kept) & (some >= 0)).any(-1)
    return out


def _flags(values: Sequence[bool], like: Tensor) -> Tensor:
    """One flag a selection, [1, P, 1, 1]."""
    return on_device([int(value) for value in values], like.device).bool().view(1, -1, 1, 1)
