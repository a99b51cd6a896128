"""The ablation of candidate sources and the reuse between layers, against loops and against the cells of a pass."""

from __future__ import annotations

import random

import naive_ablation
import numpy as np
import pytest
import torch
from fake_model import FakeModel, documents, run, tiles_of

from sparsity_lab.ablation import REUSE_METRICS, SOURCE_METRICS, Ablation, AblationPass
from sparsity_lab.cells import Candidate, Cell
from sparsity_lab.pool_walk import mass_in_pools
from sparsity_lab.scorers import BASELINES

MODEL = FakeModel(num_layers=5)
DOCUMENT = documents(1, 61)[0]
ROWS = torch.arange(61)
GRIDS = {
    "layer": Ablation(1, (2, 5, 8), (12, 24, 36), (2, 3, 4)),
    "kv_head": Ablation(2, (1, 3), (6, 12), (2, 3), share="kv_head"),
}
OPTIONS = Ablation(1, (2, 6), (12, 24), (2, 3), window=7, exclude_window=True, sinks=2)


def frames(grid: Ablation, scorer: str = "quest", tile: int = 61):
    found = AblationPass(grid, BASELINES[scorer](), range(5))
    for part in tiles_of(MODEL, DOCUMENT, ROWS, tile):
        found.tile(part)
    return found.frames()


@pytest.mark.parametrize("share", GRIDS)
@pytest.mark.parametrize("scorer", ["quest", "oracle", "random"])
def test_random_triples_equal_the_loops(share, scorer):
    grid, draw = GRIDS[share], random.Random(share + scorer)
    source, reuse = frames(grid, scorer)
    layers = naive_ablation.whole_layers(MODEL, DOCUMENT, ROWS)
    keys = ["source", "consumer", "block_size", "pool_positions", "topk"]
    source, reuse = source.set_index(keys), reuse.set_index(["source", "consumer", "topk"])
    for _ in range(5):
        s, later = sorted(draw.sample(range(5), 2))
        size, pool, k = draw.choice(grid.block_sizes), draw.choice(grid.pool_positions), draw.choice(grid.topk)
        plain = {"ratio": grid.compress_ratio, "share": share, "topk": k}
        made = BASELINES[scorer]()
        want = naive_ablation.pool_means(layers[s], layers[later], made, pool=pool, block_size=size, **plain)
        got = source.loc[s, later, size, pool, k]
        for name in SOURCE_METRICS:
            assert got[f"{name}_sum"] / got[f"{name}_n"] == pytest.approx(want[name], abs=1e-6), name
        want, got = naive_ablation.reuse_means(layers[s], layers[later], made, **plain), reuse.loc[s, later, k]
        for name in REUSE_METRICS:
            assert got[f"{name}_sum"] / got[f"{name}_n"] == pytest.approx(want[name], abs=1e-6), name


@pytest.mark.parametrize("grid", [*GRIDS.values(), OPTIONS], ids=[*GRIDS, "options"])
def test_sums_are_those_of_cells_with_that_candidate_to_the_last_bit(grid):
    cells = [cell for s in range(4) for cell in grid.cells("quest", s)]
    tally = run(cells, tiles_of(MODEL, DOCUMENT, ROWS, 61))
    table = frames(grid)[0].set_index(["source", "consumer", "block_size", "pool_positions", "topk"])
    columns = tally.columns()
    sums = dict.fromkeys(("pool_recall", "pool_coverage", "coverage", "oracle_coverage"))
    for i, cell in enumerate(cells):
        pool, k = cell.selection.candidate, cell.selection.topk
        for layer in range(pool.source_layer + 1, 5):
            got = table.loc[pool.source_layer, layer, pool.block_size, pool.topk_blocks * pool.block_size, k]
            mine = (columns["cell"] == i) & (columns["layer"] == layer)
            for name in sums:
                assert got[f"{name}_sum"] == columns[f"{name}_sum"][mine].sum(), name
                assert got[f"{name}_n"] == columns[f"{name}_n"][mine].sum(), name


def test_tiles_change_nothing():
    for one, other in zip(frames(GRIDS["layer"]), frames(GRIDS["layer"], tile=13), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_layer_on_its_own_selection():
    reuse = frames(GRIDS["layer"])[1]
    own = reuse[reuse["source"] == reuse["consumer"]]
    np.testing.assert_array_equal(own["overlap_sum"], own["overlap_n"])
    np.testing.assert_array_equal(own["reuse_coverage_sum"], own["reuse_coverage_n"])
    assert len(reuse) == 15 * 3


def test_every_stretch_of_the_walk_gives_the_same():
    generator = torch.Generator().manual_seed(3)
    order = torch.stack([torch.randperm(200, generator=generator) for _ in range(40)])
    gains = torch.randint(1, 1000, (40, 200), generator=generator).double() * 2.0**-48
    ranks = torch.stack([torch.randperm(100, generator=generator) for _ in range(40)]).short()
    pools, ks = torch.tensor([1, 3, 40, 100]), torch.tensor([2, 5])
    found = mass_in_pools(order, gains, order // 2, ranks, pools, ks)
    for p, pool in enumerate(pools):
        for g in range(40):
            inside = [gains[g, i] for i in range(200) if ranks[g, order[g, i] // 2] < pool]
            for k, most in enumerate(ks):
                assert found[p, k, g] == sum(inside[:most])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pool_positions": (8,), "block_sizes": (3,)}, "pool_positions: 8"),
        ({"topk": ()}, "ablation.topk"),
        ({"topk": (9,), "pool_positions": (8,)}, "topk=9"),
        ({"block_sizes": (4, 2)}, "ablation.block_sizes"),
        ({"share": "head"}, "ablation.share='head'"),
        ({"topk": (0,)}, "ablation.topk=0"),
        ({"sinks": 3}, "ablation.sinks=3"),
        ({"joint_pools": ((8, 2), (8, 2))}, "ablation.joint_pools=.*each once"),
        ({"joint_pools": ((8,),)}, "ablation.joint_pools=.*must be pairs"),
        ({"joint_pools": ((8, 3),)}, "ablation.joint_pools: 8"),
        ({"joint_pools": ((4, 4),), "topk": (2,)}, "ablation.joint_pools: 4 positions in blocks of 4"),
    ],
)
def test_what_cannot_be_compared_is_refused(change, named):
    fields = {"compress_ratio": 1, "topk": (2,), "pool_positions": (12,), "block_sizes": (2,)}
    with pytest.raises(ValueError, match=named):
        Ablation(**{**fields, **change})


def test_the_cells_it_stands_for():
    assert GRIDS["kv_head"].cells("quest", 1)[0] == Cell("quest", GRIDS["kv_head"].selection(1, Candidate(1, 3, 2)))
