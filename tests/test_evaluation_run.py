"""An evaluation over documents and tasks: what is stored, going on, shards, failures, averages."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from stub_sparse import StubSparse
from tiny_evaluation import CELLS, OPTIONS, Dictated, documents, run

from sparsity_lab.cells import Cell, Selection
from sparsity_lab.evaluation import show, summary
from sparsity_lab.evaluation.run import Options
from sparsity_lab.evaluation.tables import KEYS, SCHEMAS, EvaluationStore
from sparsity_lab.results import ResultsError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


def assert_same(one, other):
    for name, keys in KEYS.items():
        tables = [found.tables[name].sort_values(keys, ignore_index=True) for found in (one, other)]
        pd.testing.assert_frame_equal(*tables, check_exact=True)


def test_losses_are_the_models(whole):
    model, document = Dictated(), documents()[1]
    with torch.inference_mode():
        dense = model.model(document.tokens.unsqueeze(0)).logits[0].log_softmax(-1)
        hooks = [
            layer.self_attn.o_proj.register_forward_hook(lambda m, a, out: out * 0.5)
            for layer in model.model.model.layers
        ]
        sparse = model.model(document.tokens.unsqueeze(0)).logits[0].log_softmax(-1)
        for hook in hooks:
            hook.remove()
    rows, targets = torch.arange(699), document.tokens[1:]
    table = whole.per_document().set_index(["cell_id", "document"])
    (cell,) = [key for key, about in whole.cells.items() if about["topk"] == 4]
    found = table.loc[(cell, document.id)]
    assert found["dense_loss"] == pytest.approx(-float(dense[rows, targets].mean()), rel=1e-5)
    assert found["loss"] == pytest.approx(-float(sparse[rows, targets].mean()), rel=1e-5)
    assert found["loss_difference"] == pytest.approx(found["loss"] - found["dense_loss"])
    kl = (dense.exp() * (dense - sparse)).sum(-1)[:-1]
    assert found["kl"] == pytest.approx(float(kl.mean()), rel=1e-4)
    assert found["kl_selective"] == pytest.approx(float(kl[8:].mean()), rel=1e-4)  # k = 4, window = 8
    agree = (dense.argmax(-1) == sparse.argmax(-1)).float()[:-1]
    assert found["top1_agreement"] == pytest.approx(float(agree.mean()))
    assert (found["rows"], found["rows_selective"]) == (699, 691)


def test_perplexities_and_their_difference(whole):
    frame, table = whole.frame(), whole.per_document()
    for row in frame.itertuples():
        mine = table[table["cell_id"] == row.cell_id]
        assert row.dense_perplexity == pytest.approx(np.exp(mine["dense_loss"].mean()))
        assert row.perplexity_difference == pytest.approx(np.exp(mine["loss"].mean()) - row.dense_perplexity)
        assert row.perplexity_difference_low <= row.perplexity_difference <= row.perplexity_difference_high
        assert row.documents == 2
    assert list(frame["topk"]) == [4, 16, 64]
    assert frame["kl"].is_monotonic_decreasing
    assert frame["output_error"].is_monotonic_decreasing


def test_the_difference_is_paired():
    """Where sparse loses the same in every document the interval is a point, however the documents differ."""
    table = whole_with_losses(dense=[1.0, 2.0, 5.0], sparse=[1.5, 2.5, 5.5])
    row = table.frame().iloc[0]
    assert row["loss_difference_low"] == pytest.approx(0.5)
    assert row["loss_difference_high"] == pytest.approx(0.5)
    assert row["perplexity_difference"] == pytest.approx(np.exp(8 / 3 + 0.5) - np.exp(8 / 3))
    drawn = np.random.default_rng(0).integers(3, size=(1000, 3))
    means = np.array([1.0, 2.0, 5.0])[drawn].mean(1)
    low, high = np.percentile(np.exp(means + 0.5) - np.exp(means), [2.5, 97.5])
    assert row["perplexity_difference_low"] == pytest.approx(low)
    assert row["perplexity_difference_high"] == pytest.approx(high)


def whole_with_losses(dense, sparse):
    rows = [
        {"cell_id": "c", "document": str(i), "document_index": i, "bucket": 1, "selective": True, "rows": 10,
         "dense_loss_sum": 10 * a, "loss_sum": 10 * b, "kl_sum": 1.0, "agreement_sum": 9.0}
        for i, (a, b) in enumerate(zip(dense, sparse, strict=True))
    ]  # fmt: skip
    empty = {name: schema.empty_table().to_pandas() for name, schema in SCHEMAS.items()}
    cell = Cell("quest", Selection(topk=4)).fields()
    return summary.EvaluationResults({**empty, "likelihood": pd.DataFrame(rows)}, {"c": cell}, {})


def test_retrieval_is_scored_and_misses_are_traced(whole):
    table = whole.by_task().set_index(["topk", "kind"])
    assert set(table.index) == {(k, kind) for k in (4, 16, 64) for kind in ("single", "multi_value")}
    for k in (4, 16):
        assert table.loc[(k, "single"), ["score", "dense_score", "lost_to_scorer", "found"]].tolist() == [0, 1, 2, 0]
        assert table.loc[(k, "single"), ["in_selection", "attended", "kept_mass"]].tolist() == [0, 0, 0]
    assert table.loc[(64, "single"), ["score", "lost_to_scorer", "found", "kept_mass"]].tolist() == [1, 0, 2, 1]


def test_what_dense_fails_is_uninformative(whole):
    table = whole.by_task().set_index(["topk", "kind"])
    assert table["informative"].to_dict() == {key: key[1] == "single" for key in table.index}
    frame = whole.frame().set_index("topk")
    assert frame["retrieval"].tolist() == [0, 0, 1]  # of the informative kind alone
    assert frame["retrieval_difference"].tolist() == [-1, -1, 0]
    assert frame["dense_retrieval"].tolist() == [1, 1, 1]
    assert frame["tasks"].tolist() == [2, 2, 2]


def test_nothing_is_computed_twice(tmp_path, whole):
    run(tmp_path, documents(1), cells=CELLS[:2])
    model = Dictated()
    grown = run(tmp_path, documents(), model=model)
    # check_head; the first document dense and under 1 cell, the second under 3; the tasks' dense mass
    assert model.forwards == 1 + (2 + 4) + 4
    assert_same(grown, whole)
    again = Dictated()
    assert_same(run(tmp_path, model=again), whole)
    assert again.forwards == 1
    assert run(tmp_path).manifest["said"] == ["6 of 6 documents and tasks are in the results already"]


def test_shards_are_the_whole(tmp_path, whole):
    parts = [run(tmp_path / str(i), documents(i + 1, first=i)) for i in range(2)]
    assert_same(summary.merge(parts), whole)
    for i in range(2):
        run(tmp_path / "one", documents(i + 1, first=i))
    assert_same(summary.load(tmp_path / "one"), whole)
    pd.testing.assert_frame_equal(summary.merge(parts).frame(), whole.frame())


def test_a_stopped_run_keeps_what_it_has(tmp_path, whole):
    class Stops(Dictated):
        def observe(self, *args):
            if self.forwards == 7:
                raise KeyboardInterrupt
            super().observe(*args)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, model=Stops())
    assert len(summary.load(tmp_path).tables["likelihood"].groupby(["cell_id", "document"])) == 4
    assert_same(run(tmp_path), whole)


def test_means_are_over_tasks_that_every_cell_has_answered(tmp_path, whole):
    """Three cells of two documents: the second document's `single` task was answered by the first cell alone."""
    cells = {about["topk"]: key for key, about in whole.cells.items()}
    answers = whole.tables["retrieval"]
    second = (answers["document"] == documents()[1].id) & (answers["kind"] == "single")
    kept = answers[~second | (answers["cell_id"] == cells[64])].copy()
    kept.loc[second & (kept["cell_id"] == cells[64]), "score"] = 0.25
    stopped = summary.EvaluationResults({**whole.tables, "retrieval": kept}, whole.cells, {})
    tasks = stopped.tasks()
    assert tasks.loc[~tasks["finished"], "cell_id"].tolist() == [cells[64]]
    frame = stopped.frame().set_index("topk")
    assert frame["retrieval"].tolist() == [0, 0, 1]
    assert frame["tasks"].tolist() == [1, 1, 1]
    by_task = stopped.by_task().set_index(["topk", "kind"])
    assert by_task.loc[(64, "single"), ["score", "tasks", "found"]].tolist() == [1, 1, 1]
    assert by_task.loc[(64, "multi_value"), "tasks"] == 2
    assert "retrieval: 1 of 4 tasks left out, not answered by every cell yet" in show.notes(stopped, stopped.frame())
    assert not any("left out, not" in line for line in show.notes(whole, whole.frame()))


def test_a_failed_cell_is_not_waited_for(whole):
    cells = {about["topk"]: key for key, about in whole.cells.items()}
    answers = whole.tables["retrieval"]
    kept = answers[(answers["cell_id"] != cells[4]) | (answers["kind"] == "multi_value")]
    tables, failed = {**whole.tables, "retrieval": kept}, {**CELLS[0].fields(), "reason": "out of memory"}
    tasks = summary.EvaluationResults(tables, whole.cells, {"failed_cells": [failed]}).tasks()
    assert tasks["finished"].all()
    tasks = summary.EvaluationResults(tables, whole.cells, {}).tasks()
    assert set(tasks.loc[~tasks["finished"], "kind"]) == {"single"}


def test_cells_of_other_data_are_not_waited_for(whole):
    other = {key + "b": {**about, "data": "b"} for key, about in list(whole.cells.items())[:1]}
    answers = whole.tables["retrieval"]
    theirs = answers[answers["cell_id"].isin([key[:-1] for key in other])].head(1)
    both = pd.concat([answers, theirs.assign(cell_id=theirs["cell_id"] + "b")], ignore_index=True)
    found = summary.EvaluationResults({**whole.tables, "retrieval": both}, {**whole.cells, **other}, {})
    assert found.tasks()["finished"].all()


def test_cells_of_different_documents_are_told(tmp_path):
    run(tmp_path, documents(1), cells=CELLS[:2])
    found = run(tmp_path, cells=CELLS[1:])
    (told,) = [line for line in show.notes(found, found.frame()) if "differ" in line]
    assert told == "llama, lines x 700: cells ran on 1 or 2 documents, so they differ by these, too"


def test_a_damaged_part_is_set_aside(tmp_path, whole):
    run(tmp_path)
    (tmp_path / "likelihood.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(ResultsError, match=r"likelihood\.parquet"):
        summary.load(tmp_path)
    again = run(tmp_path)
    assert "likelihood.parquet" in again.manifest["said"][0]
    assert_same(again, whole)


def test_a_cell_that_fails_fails_alone(tmp_path, whole):
    def sparse(model, selection, scorer, layers):
        if selection.topk == 16:
            raise ValueError("selection.topk=16: no")
        return StubSparse(model, layers, {0: 0.5}, answers=lambda prompt: [5])

    found = run(tmp_path, make_sparse=sparse)
    assert {about["topk"] for about in found.cells.values()} == {4, 64}
    assert [cell["reason"] for cell in found.manifest["failed_cells"]] == ["selection.topk=16: no"]
    assert "top-16: selection.topk=16: no" in found.manifest["said"][0]

    def none(model, selection, scorer, layers):
        raise ValueError("nothing works")

    with pytest.raises(ValueError, match="nothing works"):
        run(tmp_path / "none", make_sparse=none)


def test_infinite_losses_are_refused(tmp_path):
    def sparse(model, selection, scorer, layers):
        return StubSparse(model, layers, {0: float("nan")})

    with pytest.raises(ValueError, match="NaN or infinite"):
        run(tmp_path, make_sparse=sparse, options=Options(rows=16))


def test_another_kind_of_folder_is_refused(tmp_path):
    from sparsity_lab import results

    results.Store(tmp_path, {}).register({})
    with pytest.raises(ResultsError, match=r"holds measurements of experiments/recall\.py, not an evaluation"):
        EvaluationStore(tmp_path, {}).register({})
    with pytest.raises(ResultsError, match="not an evaluation"):
        summary.load(tmp_path)
    EvaluationStore(tmp_path / "new", {}).register({})
    with pytest.raises(ResultsError, match="holds an evaluation"):
        results.Store(tmp_path / "new", {}).register({})
    with pytest.raises(ResultsError, match="holds an evaluation"):
        results.load(tmp_path / "new")
    with pytest.raises(ResultsError, match="nothing evaluated yet"):
        summary.load(tmp_path / "new")


def test_the_layers_that_select():
    cell, scorer = Cell("quest", Selection(index_source_layers=(1, 3))), object()
    available = [0, 1, 2, 3, 5]
    assert Options().applied_layers(cell, scorer, available, 6) == available
    assert Options(layers=(2, 5), dense_layers=3).applied_layers(cell, scorer, available, 6) == [5]
    assert Options(layers="index_sources").applied_layers(cell, scorer, available, 6) == [1, 3]
    with pytest.raises(ValueError, match=r"evaluation\.layers=\[4\]"):
        Options(layers=(4,)).applied_layers(cell, scorer, available, 6)
    with pytest.raises(ValueError, match=r"evaluation\.dense_layers=6"):
        Options(dense_layers=6).applied_layers(cell, scorer, available, 6)


def test_ids_tell_apart_what_gives_other_numbers(whole):
    from dataclasses import replace

    from sparsity_lab.evaluation.run import place
    from sparsity_lab.scorers import BASELINES

    model, source, scorers = Dictated(), documents().source, {"quest": BASELINES["quest"]()}

    def key(layers=(0, 1, 2), options=OPTIONS, **changed):
        placed = place(model, {**source, **changed}, CELLS[:1], scorers, {CELLS[0]: list(layers)}, options)[0]
        return next(iter(placed))

    assert key() in whole.cells
    assert key(options=replace(OPTIONS, tasks=(), depths=(0.9,))) == key()
    different = [key(layers=(1, 2)), key(options=replace(OPTIONS, rows=8)), key(seed=1)]
    assert len({key(), *different}) == 4


def test_only_some_documents_hold_tasks(tmp_path):
    from dataclasses import replace

    found = run(tmp_path, options=replace(OPTIONS, task_documents=1, perplexity=False), cells=CELLS[:1])
    assert found.tables["likelihood"].empty
    assert set(found.tables["retrieval"]["document"]) == {documents()[0].id}
    assert found.frame()["retrieval"].tolist() == [0]
    second = run(tmp_path / "shard", documents(2, first=1), options=replace(OPTIONS, task_documents=1), cells=CELLS[:1])
    assert second.tables["retrieval"].empty
    assert len(second.tables["likelihood"])
