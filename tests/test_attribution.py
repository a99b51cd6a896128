"""The loss waterfall against loops, and against what `recall` says of the same cell."""

from __future__ import annotations

import naive
import numpy as np
import pytest
import torch
from fake_model import FakeModel, documents, run, tiles_of
from naive_ablation import _row, whole_layers

from sparsity_lab.ablation import Ablation
from sparsity_lab.attribution import LOSSES, STEPS, AttributionPass, waterfall
from sparsity_lab.cells import Candidate, Cell, Selection
from sparsity_lab.scorers import BASELINES

MODEL = FakeModel(num_layers=5)
DOCUMENT = documents(1, 61)[0]
ROWS = torch.arange(61)
GRIDS = [Ablation(1, (3, 6), (12,), (2,)), Ablation(2, (2, 5), (12,), (3,), share="kv_head")]
CASES = [
    (None, None),
    (Candidate(1, 4, 3), None),
    (None, (0, 2, 3)),
    (Candidate(2, 4, 3), (0, 2, 3)),
]


def measured(grid, candidate, sources, tile=61):
    found = AttributionPass(grid, BASELINES["quest"](), range(5), 5, candidate=candidate, index_source_layers=sources)
    for part in tiles_of(MODEL, DOCUMENT, ROWS, tile):
        found.tile(part)
    return found.frame().assign(document="one")


def by_loops(grid, candidate, sources, layer, k):
    """The steps of one layer: means over rows that are not saturated."""
    layers, scorer, ratio = whole_layers(MODEL, DOCUMENT, ROWS), BASELINES["quest"](), grid.compress_ratio
    source = layer if sources is None else naive.index_source(layer, sources)
    rows = []
    for group in range(layers[layer].groups(grid.share)):
        for at, row in enumerate(ROWS.tolist()):
            scores, mass = _row(layers[layer], scorer, ratio, grid.share, group, at)
            theirs = _row(layers[source], scorer, ratio, grid.share, group, at)[0]
            visible = (row + 1) // ratio
            if visible <= k:
                continue
            pool = list(range(visible))
            if candidate is not None and source > candidate.source_layer:
                first = _row(layers[candidate.source_layer], scorer, ratio, grid.share, group, at)[0]
                pool = naive.candidate_pool(first, candidate.topk_blocks, candidate.block_size)
            tokens = layers[layer].mean_mass(grid.share)[group, at, : visible * ratio].double().tolist()
            steps = [
                sum(sorted(tokens)[-k * ratio :]),
                naive.total(mass, naive.best(mass, range(visible), k)),
                naive.total(mass, naive.best(mass, pool, k)),
                naive.total(mass, naive.best(scores, pool, k)),
                naive.total(mass, naive.best(theirs, pool, k)),
            ]
            rows.append([x / sum(mass) for x in steps])
    return np.mean(rows, axis=0)


@pytest.mark.parametrize("grid", GRIDS, ids=["ratio 1", "ratio 2"])
@pytest.mark.parametrize(("candidate", "sources"), CASES)
def test_every_step_equals_the_loops(grid, candidate, sources):
    table = measured(grid, candidate, sources).set_index(["layer", "topk"])
    for layer in range(5):
        for k in grid.topk:
            got = table.loc[layer, k]
            want = by_loops(grid, candidate, sources, layer, k)
            np.testing.assert_allclose([got[f"{s}_sum"] / got["n"] for s in STEPS], want, atol=1e-6)


@pytest.mark.parametrize(("candidate", "sources"), CASES)
def test_the_end_is_the_coverage_of_the_cell(candidate, sources):
    grid = GRIDS[1]
    table = measured(grid, candidate, sources).set_index(["layer", "topk"])
    cells = [
        Cell("quest", Selection(2, k, 0, "kv_head", candidate=candidate, index_source_layers=sources))
        for k in grid.topk
    ]
    columns = run(cells, tiles_of(MODEL, DOCUMENT, ROWS, 61)).columns()
    for i, k in enumerate(grid.topk):
        for layer in range(5):
            mine = (columns["cell"] == i) & (columns["layer"] == layer)
            for step, metric in (("used", "coverage"), ("oracle", "oracle_coverage")):
                assert table.loc[layer, k][f"{step}_sum"] == columns[f"{metric}_sum"][mine].sum()


@pytest.mark.parametrize("overall", [False, True])
def test_losses_add_up(overall):
    table = waterfall(measured(GRIDS[1], *CASES[3]), overall=overall)
    np.testing.assert_allclose(table[list(LOSSES)].sum(axis=1), table["token_oracle"] - table["used"], atol=1e-9)
    assert (table["compression_loss"] > 0).all()
    assert (table[["pool_loss", "scorer_loss"]] >= -1e-9).all(axis=None)


def test_no_pool_and_no_reuse_lose_nothing_there():
    table = waterfall(measured(GRIDS[0], None, None))
    assert (table[["compression_loss", "pool_loss", "reuse_loss"]] == 0).all(axis=None)


def test_tiles_change_nothing():
    one, other = (measured(GRIDS[1], *CASES[3], tile=tile) for tile in (61, 13))
    np.testing.assert_array_equal(one.drop(columns="document"), other.drop(columns="document"))


def test_a_candidate_source_must_select():
    with pytest.raises(ValueError, match=r"layers \[1\]"):
        measured(GRIDS[0], Candidate(1, 4, 3), (0, 2))
