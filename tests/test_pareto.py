"""What cells cost and keep: against figures computed by hand and slow loops; which of them no other beats."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_results import LAYERS, level, tiny_results

from sparsity_lab import cost
from sparsity_lab.cells import Candidate, Cell, Selection
from sparsity_lab.cost import Device
from sparsity_lab.lightning import IndexerConfig
from sparsity_lab.pareto import RISING, dominated, kept, pareto
from sparsity_lab.pricing import Setting, cell_of, prices
from sparsity_lab.results import Results
from sparsity_lab.shape import ModelShape
from sparsity_lab.topology import Topology

DEVICE = Device("toy", flops_per_second=1e9, bytes_per_second=1e6)  # memory always takes longer
SHAPE = ModelShape(3, LAYERS, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8)
TOKEN = 2 * 2 * 8 * 2  # bytes of a token's keys and values, all key heads, bf16


def shaped(results: Results, shape: ModelShape = SHAPE, **scorers) -> Results:
    manifest = {"model": {"name": "tiny", "shape": shape.describe()}, "scorers": scorers}
    return Results(results.tallies, results.cells, manifest)


def one_price(scorer="quest", ratio=4, topk=16, pool=None, setting=None, shape=SHAPE, **fields):
    results = tiny_results([scorer], [ratio], [topk], [pool], **fields)
    table = prices(shaped(results, shape), setting or Setting(DEVICE, 1000, budget="fixed"))
    return table[table["cell_id"].str.startswith(scorer)].iloc[0]


def test_quest_by_hand():
    row = one_price()
    scan = 250 * 2 * TOKEN // 2  # 1000 // 4 positions, minimum and maximum of the keys alone
    attended = 8 + 16 * 4  # the window, the tokens of the selection
    assert row["read_bytes"] == 3 * (scan + attended * TOKEN)
    assert row["flops"] == 3 * (250 * 2 * 4 * 2 * 8 + attended * 2 * 4 * (8 + 8))
    assert row["dense_read_bytes"] == 3 * 1000 * TOKEN
    assert row["seconds"] == pytest.approx(row["read_bytes"] / 1e6)
    assert row["relative_cost"] == pytest.approx(row["read_bytes"] / row["dense_read_bytes"])
    assert (row["kv_bytes"], row["index_bytes"], row["dense_index_bytes"]) == (3 * TOKEN, 3 * TOKEN / 4, 0)


def test_keys_scored_at_ratio_1_are_those_of_the_cache():
    for scorer in ("quest", "mean_key"):
        row = one_price(scorer, ratio=1)
        assert row["read_bytes"] == 3 * (1000 * TOKEN // 2 + (8 + 16) * TOKEN)
        assert row["index_bytes"] == 0


def test_layers_that_reuse_scan_nothing_and_dense_ones_read_everything():
    row = one_price(index_source_layers="1")
    assert row["read_bytes"] == 1000 * TOKEN + (250 * TOKEN + 72 * TOKEN) + 72 * TOKEN


def test_a_pool_is_scored_in_place_of_everything():
    row = one_price(topk=8, pool=(0, 10, 4))
    assert row["read_bytes"] == 3 * (8 + 32) * TOKEN + 250 * TOKEN + 2 * 40 * TOKEN + 3 * 4 * 10


def test_sliding_layers_are_left_out_and_roles_keep_their_layers():
    sliding = dataclasses.replace(SHAPE, num_layers=6, attention_layers=(1, 3, 5))
    inside = one_price(shape=sliding, index_source_layers="3")
    assert inside["read_bytes"] == one_price(index_source_layers="1")["read_bytes"]
    assert "layer 2 has a window" in one_price(shape=sliding, index_source_layers="2")["unpriced"]


def test_lightning_is_priced_by_its_own_shape():
    config = IndexerConfig(index_n_heads=3, index_head_dim=16)
    results = tiny_results(["quest"], [4], [16])
    for about in results.cells.values():
        if about["scorer"] == "quest":
            about["scorer_options"] = {"name": "lightning"}
    told = {"settings": None, "indexers": {"4": dataclasses.asdict(config)}}
    row = prices(shaped(results, quest=told), Setting(DEVICE, 1000, budget="fixed")).iloc[0]
    model = cost.attached(
        "tiny", Topology.attached(3, 4), config, hidden_size=32, heads=4, kv_heads=2, head_dim=8, topk=16, window=8
    )
    assert row["read_bytes"] == sum(part.bytes for part in cost.decode_costs(model, 1000))
    assert row["index_bytes"] == cost.cache_bytes_per_token(model).index_bytes
    other = prices(shaped(results, quest={"indexers": {"1": {}}}), Setting(DEVICE, 1000)).iloc[0]
    assert "run the same command again" in other["unpriced"]


def test_batch_shares_no_cache_reads():
    assert one_price(setting=Setting(DEVICE, 1000, 8, "fixed"))["read_bytes"] == one_price()["read_bytes"]


def test_what_has_no_price_says_why():
    table = prices(shaped(tiny_results()), Setting(DEVICE, 1000))
    bounds = table[~table["cell_id"].str.startswith("quest")]
    assert bounds["unpriced"].str.contains("is a bound").all()
    untold = prices(tiny_results(), Setting(DEVICE, 1000))
    assert "do not tell the model's shape" in untold[untold["cell_id"].str.startswith("quest")]["unpriced"].iloc[0]
    assert "has presets" in one_price(shape=dataclasses.replace(SHAPE, native=True))["unpriced"]


@given(st.integers(1, 64), st.integers(1, 8), st.integers(0, 8), st.integers(1, 5000), st.integers(1, 64))
def test_scaled_budgets(topk, block, extra, context, length):
    blocks = -(-(topk + block - 1) // block) + extra
    selection = Selection(topk=topk, candidate=Candidate(0, blocks, block))
    found = Setting(DEVICE, context).at_context(selection, length)  # a pool too small would raise
    assert found.topk == math.ceil(topk * context / length)
    assert found.candidate.topk_blocks * length >= blocks * context
    assert Setting(DEVICE, context, budget="fixed").at_context(selection, length) == selection
    assert Setting(DEVICE, length).at_context(selection, length) == selection


@pytest.mark.parametrize(("fields", "told"), [
    ({"context_tokens": 0}, "context=0"), ({"batch": 0}, "batch=0"), ({"budget": "some"}, "budget='some'"),
])  # fmt: skip
def test_settings_are_checked(fields, told):
    with pytest.raises(ValueError, match=told):
        Setting(**{"device": DEVICE, "context_tokens": 10, **fields})


def test_cells_come_back_from_their_descriptions():
    for cell in (
        Cell("quest", Selection()),
        Cell("a", Selection(4, 8, 0, "kv_head", True, 2, Candidate(3, 9, 2), (1, 3, 5))),
    ):
        assert cell_of(cell.fields()) == cell
        frame = pd.DataFrame([cell.fields(), Cell("b", Selection(candidate=Candidate(1, 40, 8))).fields()])
        assert cell_of(frame.iloc[0].to_dict()) == cell


def varied(documents=4, seed=0) -> Results:
    """Results whose layers differ, some of them undefined."""
    results = tiny_results(documents=documents)
    generator = np.random.default_rng(seed)
    tallies = results.tallies.copy()
    tallies["coverage_sum"] = generator.uniform(0, 1, len(tallies)) * tallies["coverage_n"]
    hole = (tallies["layer"] == 1) & (tallies["document"] == "document0")
    tallies.loc[hole, ["coverage_sum", "coverage_n"]] = 0
    return Results(tallies, results.cells, {})


@pytest.mark.parametrize(("share", "least"), [(1 / 3, 1), (0.5, 2), (2 / 3, 2), (0.9, 3), (1.0, 3)])
def test_kept_is_what_so_many_layers_reach(share, least):
    results = varied()
    table = kept(results, layers=share).set_index("cell_id")
    for key in results.cells:
        means = []
        for layer in LAYERS:
            rows = results.tallies[(results.tallies["cell_id"] == key) & (results.tallies["layer"] == layer)]
            means.append((rows["coverage_sum"] / rows["coverage_n"].replace(0, np.nan)).mean())
        value = table.loc[key, "kept"]
        assert sum(mean >= value - 1e-12 for mean in means) >= least
        assert value == pytest.approx(sorted(means)[-least])
        assert table.loc[key, "mean"] == pytest.approx(np.mean(means))


def test_kept_interval_is_a_bootstrap_over_documents():
    results = varied()
    row = kept(results, layers=0.5).iloc[0]
    per = results.per_document()
    values = per[per["cell_id"] == row["cell_id"]].pivot(index="layer", columns="document", values="coverage")
    drawn = []
    generator = np.random.default_rng(0)
    for picks in generator.integers(4, size=(1000, 4)):
        means = values.iloc[:, picks].mean(axis=1).fillna(values.mean(axis=1))
        drawn.append(sorted(means)[-2])
    np.testing.assert_allclose([row["kept_low"], row["kept_high"]], np.percentile(drawn, [2.5, 97.5]))
    assert kept(tiny_results(documents=1))[["kept_low", "kept_high"]].isna().all(axis=None)


def test_dense_layers_keep_everything():
    results = tiny_results(["quest"], [1], [16], index_source_layers="2")
    results.tallies = results.tallies[results.tallies["layer"] >= 2]
    row = kept(shaped(results), layers=2 / 3).set_index("cell_id").filter(like="quest", axis=0).iloc[0]
    assert (row["num_layers"], row["dense_layers"], row["kept"]) == (3, 2, 1.0)
    assert row["mean"] == pytest.approx((2 + 0.7 + 0.0002 * 16 + 0.04 + 0.01) / 3)


@pytest.mark.parametrize("options", [{"metric": "output_error"}, {"metric": "no"}, {"layers": 0}, {"layers": 1.1}])
def test_kept_checks_its_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        kept(tiny_results(), **options)
    assert set(RISING) <= set(tiny_results().frame())


points = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12)


@given(points)
def test_dominated_means_that_one_is_better(found):
    price, value = (np.array(each, dtype=float) for each in zip(*found, strict=True))
    expected = [any((p <= x and v >= y) and (p < x or v > y) for p, v in found) for x, y in found]
    assert dominated(price, value).tolist() == expected


def test_pareto_compares_within_a_model_and_length():
    parts = [shaped(tiny_results(["quest", "mean_key"], length=length)) for length in (64, 128)]
    table = pareto(parts, Setting(DEVICE, 1000))
    assert len(table) == len({**parts[0].cells, **parts[1].cells})
    free = table[table["unpriced"].isna()]
    for _, rows in free.groupby("length"):
        assert rows["dominated"].any()
        assert not rows["dominated"].all()
        for _, row in rows.iterrows():
            better = (rows["seconds"] <= row["seconds"]) & (rows["kept"] >= row["kept"])
            assert row["dominated"] == bool((better & (rows.index != row.name)).any())
    assert table.loc[table["unpriced"].notna(), "dominated"].isna().all()
    assert set(free["label"]) >= {"quest ratio 1 top-16"}


def test_nothing_defined_is_said():
    everything = {(ratio, k): 10 for ratio in (1, 4) for k in (16, 32, 64)}
    with pytest.raises(ValueError, match="every row is saturated"):
        pareto([shaped(tiny_results(saturated=everything))], Setting(DEVICE, 1000))


def test_shape_survives_json():
    import json

    assert ModelShape.from_dict(json.loads(json.dumps(SHAPE.describe()))) == SHAPE
    with pytest.raises(ValueError, match="model shape"):
        ModelShape.from_dict({"num_layers": 3})


def test_level_is_what_the_tables_hold():
    results = tiny_results(["quest"], [1], [16], documents=1)
    row = kept(results, layers=1.0).set_index("cell_id").filter(like="quest", axis=0).iloc[0]
    assert row["kept"] == pytest.approx(level(next(iter(results.cells.values()))))
