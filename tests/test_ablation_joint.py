"""Selections inside a pool on the layers that reuse them, against loops and against the cells of a pass."""

from __future__ import annotations

import random
from itertools import combinations

import naive_ablation
import numpy as np
import pytest
import torch
from fake_model import FakeModel, documents, run, tiles_of

from sparsity_lab.ablation import Ablation, AblationPass, kept_bytes
from sparsity_lab.ablation_joint import JOINT_KEYS, JointPass
from sparsity_lab.cells import Candidate, Cell, Selection
from sparsity_lab.pool_walk import picks_in_pool
from sparsity_lab.scorers import BASELINES

MODEL = FakeModel(num_layers=5)
DOCUMENT = documents(1, 61)[0]
ROWS = torch.arange(61)
POOLS = ((12, 3), (16, 2))
GRIDS = {
    "layer": Ablation(1, (2, 5, 8), (12,), (2,), joint_pools=POOLS),
    "kv_head": Ablation(2, (1, 3), (6,), (2,), share="kv_head", joint_pools=((6, 2),)),
    "options": Ablation(1, (2, 6), (12,), (2,), window=7, exclude_window=True, sinks=2, joint_pools=POOLS),
}


def frame(grid, scorer="quest", tile=61):
    found = JointPass(grid, BASELINES[scorer](), range(5))
    for part in tiles_of(MODEL, DOCUMENT, ROWS, tile):
        found.tile(part)
    return found.frame().set_index(list(JOINT_KEYS))


@pytest.mark.parametrize("share", ["layer", "kv_head"])
@pytest.mark.parametrize("scorer", ["quest", "oracle", "random"])
def test_random_triples_equal_the_loops(share, scorer):
    grid, draw = GRIDS[share], random.Random(share + scorer)
    table, layers = frame(grid, scorer), naive_ablation.whole_layers(MODEL, DOCUMENT, ROWS)
    for _ in range(5):
        c, a = sorted(draw.sample(range(5), 2))
        consumer, (pool, size), k = draw.choice(range(a, 5)), draw.choice(grid.joint_pools), draw.choice(grid.topk)
        plain = {"ratio": grid.compress_ratio, "share": share, "topk": k, "pool": pool, "block_size": size}
        want = naive_ablation.joint_mean(layers[c], layers[a], layers[consumer], BASELINES[scorer](), **plain)
        got = table.loc[c, a, consumer, pool, size, k]
        assert got["coverage_sum"] / got["coverage_n"] == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("name", GRIDS)
def test_sums_are_those_of_cells_with_these_sources_to_the_last_bit(name):
    grid, table = GRIDS[name], frame(GRIDS[name])
    fields = {"window": grid.window, "share": grid.share, "exclude_window": grid.exclude_window, "sinks": grid.sinks}
    places = [(c, a, pool, k) for c, a in combinations(range(5), 2) for pool in grid.joint_pools for k in grid.topk]
    cells = [
        Cell("quest", Selection(grid.compress_ratio, k, candidate=Candidate(c, pool // size, size),
                                index_source_layers=(c, a), **fields))
        for c, a, (pool, size), k in places
    ]  # fmt: skip
    columns = run(cells, tiles_of(MODEL, DOCUMENT, ROWS, 61)).columns()
    for i, (c, a, pool, k) in enumerate(places):
        for consumer in range(a, 5):
            mine = (columns["cell"] == i) & (columns["layer"] == consumer)
            got = table.loc[c, a, consumer, pool[0], pool[1], k]
            assert got["coverage_sum"] == columns["coverage_sum"][mine].sum()
            assert got["coverage_n"] == columns["coverage_n"][mine].sum()
    assert len(table) == 20 * len(grid.joint_pools) * len(grid.topk)


def test_tiles_change_nothing():
    one, other = (frame(GRIDS["layer"], tile=tile).sort_index() for tile in (61, 13))
    np.testing.assert_array_equal(one, other)


def test_picks_are_the_first_of_the_order_in_the_pool():
    generator = torch.Generator().manual_seed(4)
    order = torch.stack([torch.randperm(200, generator=generator) for _ in range(40)])
    order[:20, 150:] = -1
    ranks = torch.stack([torch.randperm(100, generator=generator) for _ in range(40)]).short()
    for blocks in (1, 3, 40, 100):
        found = picks_in_pool(order, order.clamp(min=0) // 2, ranks, blocks, 5)
        assert found.dtype == torch.int16
        for g in range(40):
            want = [int(j) for j in order[g] if j >= 0 and ranks[g, j // 2] < blocks][:5]
            assert found[g].tolist() == want + [-1] * (5 - len(want))


def test_kept_bytes_is_what_both_passes_keep():
    grid = Ablation(1, (2, 5), (12, 24), (2, 3), joint_pools=((12, 3), (16, 4)))
    pairs, triples = AblationPass(grid, BASELINES["quest"](), range(5)), JointPass(grid, BASELINES["quest"](), range(5))
    for part in tiles_of(MODEL, DOCUMENT, ROWS, 13):
        pairs.tile(part)
        triples.tile(part)
    kept = [part for one in (pairs.ranks, pairs.first, triples.ranks, triples.picks) for part in one.values()]
    once = {x.data_ptr(): x.numel() * x.element_size() for tensors in kept for x in tensors}
    assert sum(once.values()) == kept_bytes(grid, 5, 61, 61)
