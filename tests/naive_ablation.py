"""What an ablation measures, by loops over rows: one source, one consumer, one cell at a time."""

from __future__ import annotations

import naive
import numpy as np
import torch
from fake_model import FakeModel, tiles_of

from sparsity_lab.dense import RowTile
from sparsity_lab.documents import Document
from sparsity_lab.scorers import Scorer


def whole_layers(model: FakeModel, document: Document, rows: torch.Tensor) -> list[RowTile]:
    """All rows of a layer in one tile."""
    return tiles_of(model, document, rows, len(rows))


def _row(tile: RowTile, scorer: Scorer, ratio: int, share: str, group: int, at: int) -> tuple[list[float], list[float]]:
    """Scores and mass of the visible positions."""
    visible = (int(tile.rows[at]) + 1) // ratio
    whole = tile.keep(("plain", scorer.name, ratio, share), lambda: scorer.scores(tile, ratio, share))
    scores = whole.expand(tile.groups(share), -1, -1)[group, at]
    mass = tile.mean_mass(share)[group, at].double().tolist()
    return scores[:visible].tolist(), naive.position_mass(mass, ratio, visible)


def pool_means(
    source: RowTile, consumer: RowTile, scorer: Scorer, *, ratio: int, share: str, topk: int, pool: int, block_size: int
) -> dict[str, float]:
    """Means over the rows that are not saturated."""
    found = []
    for group in range(consumer.groups(share)):
        for at in range(len(consumer.rows)):
            scores, mass = _row(consumer, scorer, ratio, share, group, at)
            visible = range(len(scores))
            if len(visible) <= topk:
                continue
            blocks = naive.candidate_pool(
                _row(source, scorer, ratio, share, group, at)[0], pool // block_size, block_size
            )
            wanted, total = naive.best(mass, visible, topk), sum(mass)
            chosen = {
                "pool_coverage": blocks,
                "coverage": naive.best(scores, blocks, topk),
                "pool_oracle_coverage": naive.best(mass, blocks, topk),
                "single_coverage": naive.best(scores, visible, topk),
                "oracle_coverage": wanted,
            }
            one = {name: naive.total(mass, places) / total for name, places in chosen.items()}
            found.append({**one, "pool_recall": len(set(wanted) & set(blocks)) / topk})
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def reuse_means(source: RowTile, consumer: RowTile, scorer: Scorer, *, ratio: int, share: str, topk: int) -> dict:
    """Means over the rows that are not saturated."""
    found = []
    for group in range(consumer.groups(share)):
        for at in range(len(consumer.rows)):
            scores, mass = _row(consumer, scorer, ratio, share, group, at)
            if len(scores) <= topk:
                continue
            own = naive.best(scores, range(len(scores)), topk)
            theirs = naive.best(_row(source, scorer, ratio, share, group, at)[0], range(len(scores)), topk)
            found.append(
                {
                    "overlap": len(set(own) & set(theirs)) / topk,
                    "reuse_coverage": naive.total(mass, theirs) / naive.total(mass, own),
                    "coverage": naive.total(mass, theirs) / sum(mass),
                }
            )
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def joint_mean(
    candidate: RowTile, source: RowTile, consumer: RowTile, scorer: Scorer, *, ratio: int, share: str, topk: int,
    pool: int, block_size: int,
) -> float:  # fmt: skip
    """Mean over the rows that are not saturated: coverage of the consumer with what the source selects inside the
    candidate's pool."""
    found = []
    for group in range(consumer.groups(share)):
        for at in range(len(consumer.rows)):
            mass = _row(consumer, scorer, ratio, share, group, at)[1]
            if len(mass) <= topk:
                continue
            first = _row(candidate, scorer, ratio, share, group, at)[0]
            inside = naive.candidate_pool(first, pool // block_size, block_size)
            chosen = naive.best(_row(source, scorer, ratio, share, group, at)[0], inside, topk)
            found.append(naive.total(mass, chosen) / sum(mass))
    return float(np.mean(found))
