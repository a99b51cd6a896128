"""The ablation of SmolLM2 with its learned indexers against loops, on five random (source, consumer, cell) triples and
five (candidate source, index source, consumer)."""

from __future__ import annotations

import random

import naive_ablation
import pytest

from sparsity_lab.ablation import REUSE_METRICS, SOURCE_METRICS, Ablation
from sparsity_lab.ablation_joint import JOINT_KEYS
from sparsity_lab.ablation_run import AblationRun
from sparsity_lab.dense import row_tiles
from sparsity_lab.lightning import Lightning
from sparsity_lab.measurement import sample_rows

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]

GRID = Ablation(1, (16, 32, 64), (128, 256, 512, 1024), (4, 8, 16), joint_pools=((512, 8),))


def test_five_random_triples_equal_the_loops():
    from sparsity_lab import load_model
    from sparsity_lab.assets import AssetError
    from sparsity_lab.data import pydoc

    try:
        model = load_model("smollm2", device="cpu")
    except AssetError as problem:
        pytest.skip(f"the SmolLM2 weights cannot be fetched here: {problem}")
    documents = pydoc(model.tokenizer, num_documents=1, length=2048)
    scorer = Lightning(model, weights="shipped")
    tables = AblationRun(model, documents, GRID, scorer, "learned", rows=32).document(documents[0])
    rows = sample_rows(2048, 32, 0, documents[0].id)
    draw, tiles = random.Random(6), {}

    def keep(acts):
        (tiles[acts.layer],) = row_tiles(acts, rows, 32, documents[0].id, 0)

    model.observe(documents[0].tokens.unsqueeze(0), keep, range(30))
    source = tables["source"].set_index(["source", "consumer", "block_size", "pool_positions", "topk"])
    reuse = tables["reuse"].set_index(["source", "consumer", "topk"])
    joint = tables["joint"].set_index(list(JOINT_KEYS))
    for _ in range(5):
        s, later = sorted(draw.sample(range(30), 2))
        size, pool, k = draw.choice(GRID.block_sizes), draw.choice(GRID.pool_positions), draw.choice(GRID.topk)
        plain = {"ratio": 1, "share": "layer", "topk": k}
        wants = (
            naive_ablation.pool_means(tiles[s], tiles[later], scorer, pool=pool, block_size=size, **plain),
            naive_ablation.reuse_means(tiles[s], tiles[later], scorer, **plain),
        )
        gots = (source.loc[s, later, size, pool, k], reuse.loc[s, later, k])
        for want, got, names in zip(wants, gots, (SOURCE_METRICS, REUSE_METRICS), strict=True):
            for name in names:
                assert got[f"{name}_sum"] / got[f"{name}_n"] == pytest.approx(want[name], abs=1e-6), name
        last = draw.choice(range(later, 30))
        layers = (tiles[s], tiles[later], tiles[last])
        want = naive_ablation.joint_mean(*layers, scorer, pool=512, block_size=8, **plain)
        got = joint.loc[s, later, last, 512, 8, k]
        assert got["coverage_sum"] / got["coverage_n"] == pytest.approx(want, abs=1e-6)
