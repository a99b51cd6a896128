"""Averages, rankings and smallest pools of an ablation."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import tiny_ablation

from sparsity_lab.ablation_table import (
    choose,
    compared_sources,
    layers_of,
    matrix,
    over_consumers,
    ranking,
    reuse_means,
    smallest_pools,
    source_means,
)

CELL = {"topk": 4, "block_size": 2, "pool_positions": 8}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tiny_ablation.make(tmp_path_factory.mktemp("ablation"))


def plain_kept(results, source, consumers, cell):
    """A document at a time, a consumer at a time."""
    kept = []
    for _, rows in results.source.groupby("document"):
        coverage, single = [], []
        for consumer in consumers:
            query = f"source == {source} and consumer == {consumer}"
            row = rows.query(f"{query} and " + " and ".join(f"{k} == {v}" for k, v in cell.items())).iloc[0]
            coverage.append(row["coverage_sum"] / row["coverage_n"])
            single.append(row["single_coverage_sum"] / row["single_coverage_n"])
        kept.append(np.mean(coverage) / np.mean(single))
    return float(np.mean(kept))


def test_ranking_is_over_common_consumers_unless_asked(results):
    common = ranking(results, [0, 1, 3], **CELL)
    own = ranking(results, [0, 1, 3], common=False, **CELL)
    assert set(common["consumers"]) == {2}
    assert own.set_index("source")["consumers"].to_dict() == {0: 5, 1: 4, 3: 2}
    for table, first in ((common, {0: 4, 1: 4, 3: 4}), (own, {0: 1, 1: 2, 3: 4})):
        for row in table.itertuples():
            assert row.kept == pytest.approx(plain_kept(results, row.source, range(first[row.source], 6), CELL))
            assert row.kept_low <= row.kept <= row.kept_high
        assert table["kept"].is_monotonic_decreasing


def test_one_document_has_no_interval(tmp_path):
    table = ranking(tiny_ablation.make(tmp_path, count=1), [0, 1], **CELL)
    assert table[["kept_low", "kept_high"]].isna().all(axis=None)
    assert table["kept"].notna().all()


@pytest.mark.parametrize("keep", [0.5, 0.9, 1.0])
def test_the_smallest_pool_is_the_first_that_keeps_enough(results, keep):
    kept = over_consumers(results, [0, 1]).groupby(["source", "block_size", "topk", "pool_positions"])["kept"].mean()
    for row in smallest_pools(results, [0, 1], keep=keep).itertuples():
        sizes = [p for p in (8, 16, 32) if kept[row.source, row.block_size, row.topk, p] >= keep]
        assert (pd.isna(row.pool_positions) and not sizes) or row.pool_positions == sizes[0]


def test_a_loss_is_what_the_pool_takes(results):
    table = source_means(results)
    np.testing.assert_array_equal(table["loss"], table["single_coverage"] - table["coverage"])
    assert (table["coverage"] <= table["pool_coverage"] + 1e-9).all()
    assert matrix(choose(table, **CELL), "loss").shape == (5, 5)


def test_reuse_means_have_ones_on_the_diagonal(results):
    square = matrix(choose(reuse_means(results), topk=2), "reuse_coverage").to_numpy()
    np.testing.assert_array_equal(np.diag(square), 1)
    assert np.isnan(square[np.tril_indices(6, -1)]).all()


def test_which_sources_are_compared(results):
    assert compared_sources(layers_of(results)) == [0, 1, 2, 3]
    assert compared_sources([0, 1]) == [0]
    for wrong in ([5], [7], []):
        with pytest.raises(ValueError, match="sources="):
            compared_sources(layers_of(results), wrong)


def test_refusals(results):
    with pytest.raises(ValueError, match="block_size=3"):
        choose(source_means(results), block_size=3)
    with pytest.raises(ValueError, match="keep=0"):
        smallest_pools(results, [0], keep=0)
