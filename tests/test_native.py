"""The model's own indexer as a scorer and its own selection as cells, from the models to the command line."""

from __future__ import annotations

import cli
import pandas as pd
import pytest
import tiny_models
import torch
from fake_model import FakeModel, documents, tiles_of
from sparse_model import MIXED, SparseModel
from test_config import composed

from sparsity_lab import job, models
from sparsity_lab.cells import Candidate, Cell, Selection, expand
from sparsity_lab.config import read_job
from sparsity_lab.documents import Document, Documents
from sparsity_lab.estimate import describe, model_size
from sparsity_lab.lightning import Lightning
from sparsity_lab.measurement import measure
from sparsity_lab.models import deepseek_v41, loading
from sparsity_lab.native import Native, native_cells
from sparsity_lab.record import record
from sparsity_lab.topology import NativeSelection, Topology

LENGTH = 27
V41 = ["model=deepseek_v41", "model.device=cpu", "data.length=128", "measure.rows=24", "measure.detail_rows=4"]


# --- scorer -----------------------------------------------------------------------------------------------------------


def test_scores_are_the_indexers_formula_for_the_source_that_served_the_layer():
    model, document, rows = SparseModel(), documents(1, LENGTH)[0], torch.tensor([3, 9, 26])
    tiles = tiles_of(model, document, rows, len(rows))
    for layer, source in ((1, 1), (2, 1), (3, 3), (4, 4), (5, 4)):
        found = Native(model).scores(tiles[layer], model.topology.compress_ratios[layer], "layer")
        wanted = torch.from_numpy(model.index_scores(document.tokens[None], source))[rows]
        torch.testing.assert_close(found[0].double(), wanted, atol=1e-5, rtol=1e-5)


def test_what_the_scorer_says_of_itself():
    scorer = Native(SparseModel())
    assert scorer.describe() == {"name": "native"}
    assert scorer.index_source_layers == (1, 3, 4)


def test_no_scores():
    with pytest.raises(
        ValueError, match="scorer=native: fake has no indexer of its own; scorer=lightning attaches one"
    ):
        Native(FakeModel())
    model = SparseModel()
    tiles, scorer = tiles_of(model, documents(1, LENGTH)[0], torch.tensor([9]), 1), Native(model)
    with pytest.raises(ValueError, match=r"layer 0 has none, needed at selection.compress_ratio=2"):
        scorer.scores(tiles[0], 2, "layer")
    with pytest.raises(ValueError, match=r"layer 1 has scores at 2, needed at selection.compress_ratio=1"):
        scorer.scores(tiles[1], 1, "layer")
    with pytest.raises(ValueError, match=r"selection.share=kv_head: scorer=native has one selection a layer"):
        scorer.scores(tiles[1], 2, "kv_head")


def test_a_job_refuses_cells_that_the_indexers_cannot_serve():
    model = SparseModel()

    def check(scorer, **fields):
        cell = Cell("any", Selection(**{"compress_ratio": 1, "topk": 4, "window": 5} | fields))
        job._check(cell, scorer, model, LENGTH, range(1, 6))

    check(Native(model))
    with pytest.raises(ValueError, match=r"compress_ratio=4: the model's indexer scores at \[1, 2\]"):
        check(Native(model), compress_ratio=4)
    with pytest.raises(ValueError, match=r"selection.share=kv_head: scorer=native"):
        check(Native(model), share="kv_head")
    with pytest.raises(ValueError, match=r"selection.window=7: the model attends to a raw window of 5"):
        check(Native(model), window=7)


def test_attached_indexers_are_needed_only_where_a_layer_selects(monkeypatch):
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(Lightning, "module", lambda self, layer, ratio: asked.append((layer, ratio)))
    for model, layers, sources, wanted in (
        (FakeModel(), range(4), (0, 2), [0, 2]),
        (FakeModel(), range(4), None, [0, 1, 2, 3]),
        (FakeModel(), [2, 3], (0, 2), [2]),
        (SparseModel(), range(1, 6), None, [3, 4, 5]),
        (SparseModel(), range(1, 6), (1, 3), [3]),
    ):
        asked.clear()
        cell = Cell("lightning", Selection(1, 4, 5, index_source_layers=sources))
        job._check(cell, Lightning(model), model, LENGTH, layers)
        assert asked == [(layer, 1) for layer in wanted]


def test_build_scorer():
    assert isinstance(job.build_scorer({"name": "native"}, SparseModel()), Native)
    with pytest.raises(ValueError, match="scorer=native: fake has no indexer"):
        job.build_scorer({"name": "native"}, FakeModel())


# --- cells ------------------------------------------------------------------------------------------------------------


def test_cells_of_a_model():
    pool = {"source_layer": 3, "topk_blocks": 3, "block_size": 2}
    wanted = [{"compress_ratio": 1, "candidate": None}, {"compress_ratio": 2, "candidate": None}]
    assert native_cells(SparseModel().native) == [*wanted, {"compress_ratio": 1, "candidate": pool}]
    tokens = NativeSelection(Topology((1, 1, 1), (0, 1, 2), (0, 1, 2)), 2048, 0, False)
    assert native_cells(tokens) == wanted[:1]


OWN = NativeSelection(MIXED, 4, 5, True, 3, 2)


def selections(*overrides: str) -> list[tuple]:
    cells = read_job(composed(*overrides)).cells
    assert {c.scorer for c in cells} == {"native"}
    return [(s.compress_ratio, s.topk, s.window, s.candidate) for s in (c.selection for c in cells)]


def test_the_scorer_brings_the_models_selection(monkeypatch):
    asked = []
    monkeypatch.setattr(models, "native_selection", lambda settings: asked.append(settings["name"]) or OWN)
    pool = Candidate(3, 3, 2)
    assert selections("scorer=native") == [(1, 4, 5, None), (2, 4, 5, None), (1, 4, 5, pool)]
    assert set(asked) == {"smollm2"}
    assert selections("scorer=native", "selection.topk=[2,3]", "selection.zipped=null") == [
        (1, 2, 5, None),
        (1, 3, 5, None),
    ]
    wide = [(r, k, 5, p) for r, p in ((1, None), (2, None), (1, pool)) for k in (2, 3)]
    assert selections("scorer=native", "selection.topk=[2,3]") == wide


def test_a_selection_that_is_asked_for_wins(monkeypatch):
    monkeypatch.setattr(models, "native_selection", lambda settings: OWN)
    for overrides in (("scorer=native", "selection=two_level"), ("selection=two_level", "scorer=native")):
        found = selections(*overrides)
        assert len(found) == 20
        assert {window for _, _, window, _ in found} == {128}
    other = read_job(composed("selection=native", "scorer=mean_key")).cells
    assert [(c.scorer, c.selection.compress_ratio) for c in other] == [("mean_key", r) for r in (1, 2, 1)]


def test_index_source_layers_on_the_command_line():
    def found(value: str) -> list:
        cells = read_job(
            composed("selection.topk=4", "selection.compress_ratio=1", f"selection.index_source_layers={value}")
        )
        return [c.selection.index_source_layers for c in cells.cells]

    assert found("null") == [None]
    assert found("[0,8,16]") == [(0, 8, 16)]
    assert found("[null,[0,8],[0,4]]") == [None, (0, 8), (0, 4)]


def test_a_model_without_one_is_named():
    with pytest.raises(ValueError, match="selection=native: model smollm2 has no sparse attention of its own"):
        read_job(composed("scorer=native"))


# --- the other tools --------------------------------------------------------------------------------------------------


def test_a_recording_would_lack_what_such_a_model_needs(tmp_path):
    with pytest.raises(ValueError, match="model=fake: has sparse attention of its own"):
        record(SparseModel(), documents(1, LENGTH), tmp_path / "recording")
    assert not list(tmp_path.iterdir())


def test_an_estimate_does_not_guess():
    found = describe([read_job(composed(*V41, "scorer=native"))])
    assert (
        "deepseek_v41 on pydoc, 2 documents x 128 tokens; 3 cells, 9 with their envelope; time and memory unknown"
        in found
    )


@pytest.mark.parametrize("family", tiny_models.NATIVE_FAMILIES)
def test_families_of_transformers(family, tmp_path):
    """All checks on: the outputs are rebuilt from the selections, and nothing beats the oracle."""
    folder = tiny_models.make(family, tmp_path / family)
    settings = read_job(composed("model=hf", f"model.path={folder}", "model.device=cpu", "data.length=61")).model
    assert model_size(settings) is None
    model = loading.load(**settings)
    cells, _ = expand("native", topk=model.native.topk, window=model.native.window, zipped=native_cells(model.native))
    items = tuple(Document(i, tiny_models.tokens(61, seed=i)[0], f"random {i}") for i in range(2))
    docs = Documents(items, {"name": "random", "length": 61, "seed": 0})
    frame = measure(model, docs, cells, rows=20, scorers={"native": Native(model)}).frame()
    applies = [layer for layer in sorted(model.windows()) if model.native.topology.compress_ratios[layer]]
    first = model.native.topology.index_source_layers[0]
    assert set(frame[frame.scorer == "native"].layer) == {layer for layer in applies if layer >= first}
    recall = frame.groupby("scorer").recall.mean()
    assert recall["oracle"] == 1
    assert 0 < recall["native"] < 1


# --- DeepSeek V4.1 ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_v41():
    return deepseek_v41.load("tiny", device="cpu")


def test_v41_selects_what_the_scorer_says(tiny_v41):
    """At every layer, inside the pool where the topology has one: the tokens attended to are as many as the cell's."""
    native, docs, picks = tiny_v41.native, documents(1, 150), {}
    cells, _ = expand("native", topk=native.topk, window=native.window, zipped=native_cells(native))
    cells = [c for c in cells if c.selection.compress_ratio == 2 or c.selection.candidate]
    tiny_v41.observe(docs[0].tokens[None], lambda acts: picks.update({acts.layer: acts.selected[0]}), range(2, 8))
    results = measure(tiny_v41, docs, cells, rows=None, scorers={"native": Native(tiny_v41)}, envelope=False)
    found = {row.layer: row.density for row in results.frame().itertuples()}
    assert set(found) == set(picks) == {2, 3, 4, 5, 6, 7}
    for layer, selected in picks.items():
        ratio, densities = native.topology.compress_ratios[layer], []
        for row in range(native.topk * ratio + ratio - 1, 150):  # those that see more than k
            tokens = {u for j in selected[row].tolist() for u in range(j * ratio, (j + 1) * ratio)}
            densities.append(len(tokens | set(range(row - native.window + 1, row + 1))) / (row + 1))
        assert found[layer] == pytest.approx(sum(densities) / len(densities), abs=1e-9)


def test_v41_on_the_command_line(tmp_path):
    done = cli.run(tmp_path, *V41, "model.size=tiny", "scorer=native", f"results_dir={tmp_path}/results")
    assert done.code == 0, done.err
    assert "8x4 of layer 4" in done.out
    summary = pd.read_csv(tmp_path / "results/recall/deepseek_v41-pydoc-128/summary.csv")
    own = summary[summary.scorer == "native"]
    assert {
        key: sorted(part.layer) for key, part in own.fillna(-1).groupby(["compress_ratio", "candidate_source_layer"])
    } == {(1, -1): [4, 5, 6, 7], (1, 4): [4, 5, 6, 7], (2, -1): [2, 3]}
    assert own[(own.candidate_source_layer == 4)].pool_recall.notna().tolist() == [False, False, True, True]
    assert own.window.unique().tolist() == [16]


def test_v41_seen_by_later_layers_as_dense_is_another_cell(tiny_v41):
    dense = deepseek_v41.load("tiny", device="cpu", attention="dense")
    cells, _ = expand("oracle", topk=16, window=16)
    docs = documents(1, 64)
    found = [measure(model, docs, cells, rows=16, envelope=False) for model in (tiny_v41, dense)]
    assert not set(found[0].cells) & set(found[1].cells)
