"""The search over an ablation: its numbers against cells measured for real, and its files in the experiments."""

from __future__ import annotations

import json

import cli
import naive_ablation
import numpy as np
import pandas as pd
import pytest
import tiny_ablation
from fake_model import FakeModel, documents
from hydra import compose, initialize_config_dir

from sparsity_lab import schemas, source_search
from sparsity_lab.ablation_run import load
from sparsity_lab.cells import Candidate, Selection
from sparsity_lab.config import read_job
from sparsity_lab.cost import attached, decode_costs
from sparsity_lab.evaluation.job import read_job as evaluation_job
from sparsity_lab.lightning import IndexerConfig
from sparsity_lab.measurement import measure
from sparsity_lab.scorers import BASELINES
from sparsity_lab.source_verify import following
from sparsity_lab.topology import Topology

SCRIPT = cli.ROOT / "experiments" / "search_sources.py"
NUMBERS = [1, 3, 6]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tiny_ablation.make(tmp_path_factory.mktemp("ablation"))


@pytest.fixture(scope="module")
def table(results):
    return source_search.search(results, NUMBERS, topk=[2, 4], pool=(8, 2))


def test_a_row_for_everything(table):
    assert len(table) == 2 * 4 * (3 + 2)  # a single source has no pool
    assert table["name"].is_unique


def test_predicted_is_measured_on_the_same_documents(results, table):
    cells = source_search.cells_of(table, results, "quest")
    found = measure(FakeModel(num_layers=6), documents(3, 47), cells, envelope=False, detail_rows=0)
    joined = source_search.with_measured(table, found)
    np.testing.assert_allclose(joined["error"].astype(float), 0, atol=1e-9)
    assert joined["measured"].notna().all()
    assert joined["measured_low"].le(joined["measured"]).all()


def test_matrices_are_the_loops(results):
    coverage, inside = source_search.coverage_matrix(results, 4), source_search.pooled_coverage(results, 4, (8, 2))
    model, scorer, items = FakeModel(num_layers=6), BASELINES["quest"](), documents(3, 47)
    from sparsity_lab.measurement import sample_rows

    layers = [naive_ablation.whole_layers(model, d, sample_rows(47, 128, 0, d.id)) for d in items]
    plain = {"ratio": 1, "share": "layer", "topk": 4}
    want = [naive_ablation.reuse_means(one[1], one[4], scorer, **plain)["coverage"] for one in layers]
    assert coverage[1, 4] == pytest.approx(np.mean(want), abs=1e-6)
    pool = {"pool": 8, "block_size": 2, **plain}
    want = [naive_ablation.joint_mean(one[1], one[2], one[4], scorer, **pool) for one in layers]
    assert inside[1, 2, 4] == pytest.approx(np.mean(want), abs=1e-6)
    places = np.indices(inside.shape)
    np.testing.assert_array_equal(~np.isnan(inside), (places[0] < places[1]) & (places[1] <= places[2]))


def test_costs_are_those_of_the_cost_model():
    selection = Selection(1, 4, 8, candidate=Candidate(1, 4, 2), index_source_layers=(0, 1, 3))
    shape = {"hidden_size": 24, "heads": 4, "kv_heads": 2, "head_dim": 16}
    found = source_search.index_costs([selection], IndexerConfig(), 1000, num_layers=6, **shape)
    parts = decode_costs(
        attached("x", Topology.attached(6, 1, (0, 1, 3), 1), IndexerConfig(), **shape, topk=4, window=8, topk_blocks=4,
                 block_size=2), 1000)  # fmt: skip
    index = [part for part in parts if part.part != "attention"]
    assert found["index_flops"].item() == sum(part.flops for part in index)
    assert found["index_bytes"].item() == sum(part.bytes for part in index)


def test_topologies_read_back_and_experiments_take_the_files(results, table, tmp_path):
    source_search.write(tmp_path, table, results)
    told = json.loads((tmp_path / "topologies.json").read_text())
    for row in table.itertuples():
        selection = source_search.selection_of(row, results)
        topology = Topology.from_dict(told[row.name]["topology"])
        assert topology.index_source_layers == selection.index_source_layers
        assert topology.candidate_source_layer == (selection.candidate and selection.candidate.source_layer)
    schemas.register()
    for row in table.iloc[[0, 9, -1]].itertuples():
        with initialize_config_dir(str(cli.ROOT / "conf"), version_base="1.3"):
            where = [f"hydra.searchpath=[file://{tmp_path}]", f"experiment={row.name}", "scorer=quest"]
            job = read_job(compose("recall", overrides=where))
            evaluation = evaluation_job(compose("evaluate", overrides=where))
            distill = compose("distill", overrides=[where[0], f"experiment=distill/{row.name}"])
        for cells in (job.cells, evaluation.cells):
            assert [cell.selection for cell in cells] == [source_search.selection_of(row, results)]
        assert job.folder != evaluation.folder
        assert distill.recipe.index_source_layers == [int(i) for i in row.index_source_layers.split(",")]
        assert distill.recipe.topk == [row.topk]
        assert (distill.recipe.window, distill.recipe.exclude_window) == (0, False)


def test_what_was_not_measured_is_refused(results, tmp_path):
    with pytest.raises(ValueError, match="topk=3"):
        source_search.search(results, [2], topk=[3], pool=None)
    with pytest.raises(ValueError, match=r"search.pool_positions=16.*joint_pools=\[\[8, 2\]\]"):
        source_search.search(results, [2], topk=[2], pool=(16, 2))
    with pytest.raises(ValueError, match="num_sources=7"):
        source_search.search(results, [7], topk=[2], pool=None)
    some = tiny_ablation.make(tmp_path, layers=[1, 2, 3], candidate=None, index_source_layers=None)
    with pytest.raises(ValueError, match=r"\[1, 2, 3\]"):
        source_search.search(some, [2], topk=[2], pool=None)


def test_verification_takes_the_following_documents():
    data = {"name": "pydoc", "skip": 2, "num_documents": 3}
    assert following(data, skip=None, num_documents=None) == {**data, "skip": 5}
    assert following(data, skip=0, num_documents=1) == {**data, "skip": 0, "num_documents": 1}
    with pytest.raises(ValueError, match="verify"):
        following({"name": "recorded"}, skip=None, num_documents=None)


def test_the_table_speaks_of_late_candidates_only_where_there_may_be_some(results, table):
    assert "search.latest_candidate" in source_search.shown(table, None)
    assert "search.latest_candidate" not in source_search.shown(table, 2)
    assert "search.latest_candidate" not in source_search.shown(table[table["candidate_source_layer"].isna()], None)
    for row in table.itertuples():
        sources = [int(layer) for layer in row.index_source_layers.split(",")]
        own = pd.isna(row.candidate_source_layer)
        assert row.pooled_sources == (0 if own else sum(layer > row.candidate_source_layer for layer in sources))


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ([], "ValueError: results: mandatory, but no value given"),
        (["results=nowhere"], "ValueError: nowhere: no ablation (made by experiments/ablate_source.py)"),
    ],
)
def test_no_results_no_search(tmp_path, option, said):
    done = cli.run(tmp_path, *option, script=SCRIPT)
    assert (done.code, done.last) == (1, said)


def test_the_command_from_ablation_to_measured_topology(tmp_path):
    small = [o for o in cli.tiny(tmp_path) if not o.startswith(("selection", "measure.detail"))]
    grid = ["ablation.topk=[4]", "ablation.pool_positions=[16,32]", "ablation.block_sizes=[4]", "scorer=quest",
            "ablation.joint_pools=[[16,4]]"]  # fmt: skip
    where = f"results_dir={tmp_path}/results"
    done = cli.run(tmp_path, *small, *grid, where, script=cli.ROOT / "experiments" / "ablate_source.py")
    assert done.code == 0, done.err
    ablation = tmp_path / "results" / "ablate_source" / "llama-pydoc-128-quest-ratio1"
    options = ["search.num_sources=[2]", "search.pool_positions=16", "search.block_size=4", "verify.num_documents=1"]
    done = cli.run(tmp_path, f"results={ablation}", *options, where, script=SCRIPT)
    assert done.code == 0, done.err
    folder = tmp_path / "results" / "search_sources" / ablation.name
    table = pd.read_csv(folder / "placements.csv")
    assert table[["predicted", "measured", "index_flops", "index_bytes"]].notna().all(axis=None)
    for shown in ("index_flops", "index_bytes", "pooled_sources", "search.latest_candidate=LAYER"):
        assert shown in done.out
    assert done.forwards == 1
    assert load(ablation).source["document"].nunique() == 2
    model = [o for o in small if not o.startswith("data.num")]
    flags = ["--config-dir", str(folder)]
    done = cli.run(tmp_path, "experiment=dynamic-programming-n2-k4-pool", "scorer=quest", "data.num_documents=1",
                   *model, where, flags=flags)  # fmt: skip
    assert done.code == 0, done.err
