"""One pass over documents: what is computed, refused, resumed and named."""

from __future__ import annotations

import dataclasses
import hashlib
import math

import naive
import numpy as np
import pandas as pd
import pytest
import torch
from fake_model import FakeModel, documents

from sparsity_lab import measurement
from sparsity_lab.cells import Candidate, Cell, Selection, grid
from sparsity_lab.checks import CheckError
from sparsity_lab.measurement import Plan, measure, measured_layers, sample_rows
from sparsity_lab.metrics import METRICS
from sparsity_lab.results import Store, load
from sparsity_lab.scorers import BASELINES, MeanKey, Oracle, Quest

LENGTH = 40
ENVELOPE = {"oracle", "recency", "random"}
NO_POOL = dict.fromkeys(["candidate_source_layer", "candidate_topk_blocks", "candidate_block_size"])


def cell(scorer: str = "quest", pool: tuple[int, int, int] | None = None, **fields) -> Cell:
    fields = {"compress_ratio": 2, "topk": 4, "window": 3} | fields
    return Cell(scorer, Selection(**fields, candidate=pool and Candidate(*pool)))


def plan(model: FakeModel | None = None, cells=None, *, source=None, length: int = LENGTH, **options) -> Plan:
    return Plan(model or FakeModel(), source or documents(1, length).source, length, cells or [cell()], **options)


def sorted_tallies(results) -> pd.DataFrame:
    return results.tallies.sort_values(["cell_id", "document", "layer", "bucket"], ignore_index=True)


def assert_same(a, b) -> None:
    pd.testing.assert_frame_equal(sorted_tallies(a), sorted_tallies(b), check_exact=True)


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "count"), [(40, 8), (41, 7), (1000, 128), (5, 5), (5, 1)])
def test_sampled_rows_are_one_from_each_span(length, count):
    rows = sample_rows(length, count, 0, "d").tolist()
    assert len(rows) == count
    for i, row in enumerate(rows):
        assert i * length // count <= row < (i + 1) * length // count


def test_sampled_rows_depend_on_seed_and_document_alone():
    rows = sample_rows(1000, 16, 3, "a").tolist()
    assert sample_rows(1000, 16, 3, "a").tolist() == rows
    assert sample_rows(1000, 16, 4, "a").tolist() != rows
    assert sample_rows(1000, 16, 3, "b").tolist() != rows


def test_sampled_rows_are_spread_evenly_within_their_span():
    rows = torch.stack([sample_rows(80, 8, seed, "d") for seed in range(600)])
    counts = torch.bincount((rows % 10).flatten(), minlength=10)  # 4800 draws in 10 bins: 480 each, deviation 21
    assert counts.min() > 380
    assert counts.max() < 580


@pytest.mark.parametrize("count", [None, 7, 8])
def test_all_rows(count):
    assert sample_rows(7, count, 0, "d").tolist() == list(range(7))


# --- what is measured -------------------------------------------------------------------------------------------------


def test_measure_equals_the_reference_averaged_over_rows_and_documents():
    """The oracle and a two-level cell all the way: model -> tallies -> table."""
    model, docs = FakeModel(num_layers=3, sink=True), documents(2, 21)
    cells = [cell("mean_key", topk=3), cell("mean_key", topk=3, pool=(0, 2, 2))]
    frame = measure(model, docs, cells, rows=None, detail_rows=21, envelope=False).frame()
    for one in cells:
        for layer in range(3):
            averages = []
            for document in docs:
                acts = [model.activations(document.tokens.unsqueeze(0), i) for i in range(3)]
                pool = one.selection.candidate
                narrow = {}
                if pool and layer > pool.source_layer:
                    narrow = {"pool_scores": scores_of(acts[0]), "topk_blocks": 2, "block_size": 2}
                rows = naive.measure(
                    acts[layer].q[0].numpy(), acts[layer].k[0].numpy(), acts[layer].v[0].numpy(), range(21),
                    scale=acts[layer].scale, sink=acts[layer].sink, ratio=2, topk=3, window=3,
                    index_scores=scores_of(acts[layer]), **narrow,
                )  # fmt: skip
                averages.append({name: naive.average(rows, name) for name in METRICS})
            [found] = frame[
                (frame.layer == layer) & (frame.candidate_source_layer.notna() == (pool is not None))
            ].to_dict("records")
            assert found["rows"] == 2 * (21 - 7)  # visible 4 and more, from row 7 on
            assert found["saturated"] == 2 * 6
            assert found["empty"] == 2
            for name in METRICS:
                if averages[0][name] is None:
                    assert math.isnan(found[name])
                else:
                    assert found[name] == pytest.approx((averages[0][name] + averages[1][name]) / 2, abs=5e-6), name


def scores_of(acts) -> np.ndarray:
    """mean_key at ratio 2 over all heads, [1, t, n]: softmax over the visible positions, averaged over heads."""
    q, k = acts.q[0].double(), acts.k[0].double()
    n = k.shape[1] // 2
    mean = (k[:, 0 : 2 * n : 2] + k[:, 1 : 2 * n : 2]) / 2
    logits = torch.einsum("hsd,hnd->hsn", q, mean.repeat_interleave(2, dim=0)) * acts.scale
    hidden = torch.arange(n) >= ((torch.arange(q.shape[1]) + 1) // 2).unsqueeze(1)
    return logits.masked_fill(hidden, -1e300).softmax(-1).mean(0, keepdim=True).numpy()


def test_envelope_is_added_without_repeats():
    cells = [cell(topk=4), cell(topk=8, pool=(0, 8, 2)), cell("oracle", topk=4), cell(topk=8)]
    frame = measure(FakeModel(), documents(1, LENGTH), cells, rows=8).cell_frame()
    found = sorted(zip(frame.scorer, frame.topk, frame.candidate_source_layer.notna(), strict=True))
    wanted = [("quest", 4, False), ("quest", 8, True), ("quest", 8, False)]
    wanted += [(name, k, False) for name in ENVELOPE for k in (4, 8)]
    assert found == sorted(wanted)


def test_no_envelope():
    results = measure(FakeModel(), documents(1, LENGTH), [cell()], rows=8, envelope=False)
    assert [c["scorer"] for c in results.cells.values()] == ["quest"]


def test_layers_subset_and_one_forward_a_document():
    model = FakeModel()
    results = measure(model, documents(3, LENGTH), [cell()], rows=8, layers=[3, 1])
    assert model.observed == [[1, 3]] * 3
    assert set(results.tallies.layer) == {1, 3}
    every = measure(FakeModel(), documents(3, LENGTH), [cell()], rows=8)
    columns = [c for c in results.tallies if c != "cell_id"]
    scorer = {key: value["scorer"] for key, value in (results.cells | every.cells).items()}
    a, b = (r.tallies[r.tallies.cell_id.map(scorer) == "quest"] for r in (results, every))
    b = b[b.layer.isin([1, 3])]
    pd.testing.assert_frame_equal(
        a[columns].reset_index(drop=True), b[columns].reset_index(drop=True), check_exact=True
    )


def test_short_sliding_windows_are_skipped_and_said():
    said: list[str] = []
    model = FakeModel(sliding={0: 8, 2: LENGTH, 3: 4096})
    assert measured_layers(model, LENGTH, None) == ([1, 2, 3], [0])
    results = measure(model, documents(1, LENGTH), [cell()], rows=8, say=said.append)
    assert set(results.tallies.layer) == {1, 2, 3}
    assert said == [f"layers [0] do not apply: their sliding window is shorter than {LENGTH} tokens"]


def test_progress_counts_layers():
    steps: list[tuple[int, int]] = []
    measure(FakeModel(), documents(2, LENGTH), [cell()], rows=4, progress=lambda *step: steps.append(step))
    assert steps == [(i, 8) for i in range(1, 9)]


def test_detail_rows_of_0_leave_the_per_head_metrics_undefined():
    frame = measure(FakeModel(), documents(1, LENGTH), [cell()], rows=8, detail_rows=0).frame()
    assert frame[["worst_head_coverage", "output_error"]].isna().all(axis=None)
    assert frame["coverage"].notna().all()


def test_detail_rows_are_as_many_as_asked_for():
    tallies = measure(FakeModel(), documents(1, LENGTH), [cell(topk=1, compress_ratio=1)], detail_rows=5).tallies
    at_most_one_saturated = tallies.groupby(["cell_id", "layer"])["output_error_n"].sum()
    assert set(at_most_one_saturated) <= {4, 5}


def test_row_tiles_do_not_matter():
    found = [
        measure(FakeModel(), documents(1, LENGTH), [cell(), cell("oracle", (0, 4, 2))], rows=20, row_tile=tile)
        for tile in (None, 7, 1)
    ]
    for other in found[1:]:
        a, b = sorted_tallies(found[0]), sorted_tallies(other)
        counts = ["cell_id", "document", "layer", "bucket", "rows", "saturated", "empty"]
        pd.testing.assert_frame_equal(a[counts], b[counts])
        for name in ("coverage", "total_coverage", "density", "oracle_coverage"):
            np.testing.assert_allclose(a[f"{name}_sum"], b[f"{name}_sum"], atol=1e-5)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (cell(compress_ratio=LENGTH + 1), f"compress_ratio={LENGTH + 1}: larger than the documents' {LENGTH} tokens"),
        (cell(pool=(4, 4, 2)), "source_layer=4: the model has layers 0 to 3"),
        (cell(pool=(3, 4, 2)), "source_layer=3: no measured layer after it would use its pool"),
    ],
)
def test_a_cell_that_cannot_be_measured_is_recorded_and_the_rest_go_on(bad, reason, tmp_path):
    said: list[str] = []
    store = Store(tmp_path, {})
    results = measure(FakeModel(), documents(1, LENGTH), [bad, cell()], rows=4, store=store, say=said.append)
    assert "quest" in {c["scorer"] for c in results.cells.values()}
    recorded = load(tmp_path).manifest["failed_cells"]
    assert all(reason in f["reason"] for f in recorded)
    assert {"quest"} <= {f["scorer"] for f in recorded}
    assert [text for text in said if reason in text] == [f"cell cannot be measured: {f['reason']}" for f in recorded]
    assert not {f["candidate_source_layer"] for f in recorded} & set(results.cell_frame()["candidate_source_layer"])


def test_source_layer_that_is_not_measured():
    with pytest.raises(ValueError, match=r"source_layer=0: not among the measured layers \[1, 2\]"):
        measure(FakeModel(), documents(1, LENGTH), [cell(pool=(0, 4, 2))], layers=[1, 2], envelope=False)
    with pytest.raises(ValueError, match=r"source_layer=2: no measured layer after it"):
        measure(FakeModel(), documents(1, LENGTH), [cell(pool=(2, 4, 2))], layers=[1, 2], envelope=False)
    with pytest.raises(ValueError, match=r"source_layer=1: not among the measured layers .*sliding-window"):
        measure(FakeModel(sliding={1: 4}), documents(1, LENGTH), [cell(pool=(1, 4, 2))], envelope=False)


def test_all_cells_failing_is_an_error_and_nothing_is_run(tmp_path):
    model = FakeModel()
    with pytest.raises(ValueError, match="compress_ratio=99: larger than"):
        measure(model, documents(1, LENGTH), [cell(compress_ratio=99)], store=Store(tmp_path, {}))
    with pytest.raises(ValueError, match="topk=0"):
        measure(model, documents(1, LENGTH), [], failed=[{"scorer": "quest", "topk": 0, "reason": "topk=0"}])
    with pytest.raises(ValueError, match="no cells to measure"):
        measure(model, documents(1, LENGTH), [])
    assert model.observed == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [0, 4]}, r"measure.layers=\[4\]: the model has attention layers \[0, 1, 2, 3\]"),
        ({"layers": [-1]}, r"measure.layers=\[-1\]"),
        ({"layers": []}, r"measure.layers=\[\]"),
        ({"rows": 0}, "measure.rows=0: must be at least 1"),
        ({"rows": -3}, "measure.rows=-3: must be at least 1"),
        ({"detail_rows": -1}, "measure.detail_rows=-1: must be at least 0"),
        ({"cells": [cell("best")]}, "scorer='best': must be one of oracle, recency, random, mean_key, quest"),
        ({"model": FakeModel(max_length=39)}, "data.length=40: fake was made for at most 39 positions"),
        ({"model": FakeModel(sliding=dict.fromkeys(range(4), 8))}, "all are sliding-window layers"),
        ({"documents": documents(0, LENGTH)}, "no documents to measure"),
    ],
)
def test_bad_options(options, message):
    options = {"model": FakeModel(), "documents": documents(1, LENGTH), "cells": [cell()]} | options
    with pytest.raises(ValueError, match=message):
        measure(**options)
    assert options["model"].observed == []


@pytest.mark.parametrize("order", [1, -1])
def test_documents_of_different_lengths(order):
    items = (documents(1, LENGTH)[0], documents(indices=[7], length=LENGTH + 1)[0])[::order]
    with pytest.raises(ValueError, match=rf"data: document \d has 4[01] tokens, the first one {len(items[0].tokens)}"):
        measure(FakeModel(), dataclasses.replace(documents(1, LENGTH), items=items), [cell()], rows=8)


def test_attention_that_is_not_the_models_own_is_refused():
    with pytest.raises(
        CheckError, match=r"layer 0: attention rebuilt .* differs from the model's own output by 9.99e-04"
    ):
        measure(FakeModel(lie=1.001), documents(1, LENGTH), [cell()], rows=8)
    measure(FakeModel(lie=1.001), documents(1, LENGTH), [cell()], rows=8, checks=False)


def test_nan_scores_are_refused():
    class Broken(Oracle):
        def describe(self):
            return {"name": "broken"}

        def scores(self, tile, ratio, share):
            return super().scores(tile, ratio, share) * math.nan

    with pytest.raises(ValueError, match="scores contain NaN"):
        measure(FakeModel(), documents(1, LENGTH), [cell("broken")], rows=8, scorers={"broken": Broken()})


# --- ids --------------------------------------------------------------------------------------------------------------


def id_of(**options) -> str:
    ids = plan(**{"envelope": False} | options).cells
    assert len(ids) == 1
    return next(iter(ids))


CHANGES = {
    "topk": {"cells": [cell(topk=5)]},
    "ratio": {"cells": [cell(compress_ratio=3)]},
    "window": {"cells": [cell(window=4)]},
    "share": {"cells": [cell(share="kv_head")]},
    "exclude_window": {"cells": [cell(exclude_window=True)]},
    "sinks": {"cells": [cell(sinks=1)]},
    "sources": {"cells": [cell(index_source_layers=(0, 2))]},
    "pool": {"cells": [cell(pool=(0, 4, 2))]},
    "pool's source": {"cells": [cell(pool=(1, 4, 2))]},
    "pool's blocks": {"cells": [cell(pool=(0, 5, 2))]},
    "pool's block size": {"cells": [cell(pool=(0, 4, 3))]},
    "scorer": {"cells": [cell("mean_key")]},
    "scorer's options": {"cells": [cell("q")], "scorers": {"q": Quest("logit")}},
    "weights": {"model": FakeModel(fingerprint="other")},
    "attention": {"model": FakeModel(attention="eager")},
    "dtype": {"model": FakeModel(dtype=torch.bfloat16)},
    "device": {"model": FakeModel(device=torch.device("meta"))},
    "length": {"length": 41},
    "data": {"source": documents(1, LENGTH).source | {"digest": "other"}},
    "data seed": {"source": documents(1, LENGTH, seed=1).source},
    "rows": {"rows": 64},
    "all rows": {"rows": None},
    "seed": {"seed": 1},
    "layers": {"layers": [0, 1, 2]},
    "detail rows": {"detail_rows": 4},
}


def test_every_change_of_the_numbers_changes_the_id():
    ids = {name: id_of(**change) for name, change in CHANGES.items()} | {"": id_of()}
    same = {}
    for name, key in ids.items():
        same.setdefault(key, []).append(name)
    assert [names for names in same.values() if len(names) > 1] == []


def test_what_does_not_change_the_numbers_does_not_change_the_id():
    wanted = id_of()
    assert wanted in plan().cells  # the envelope
    assert wanted in plan(cells=[cell("random"), cell(topk=9), cell()]).cells  # neighbours and order
    assert id_of(layers=[3, 2, 1, 0]) == wanted  # the same layers
    assert id_of(model=FakeModel(name="renamed")) == wanted
    assert id_of(cells=[cell("mine")], scorers={"mine": Quest()}) == wanted  # the same scorer by another name
    for docs in (documents(5, LENGTH), documents(indices=[3], length=LENGTH)):  # count and shard
        results = measure(FakeModel(), docs, [cell()], envelope=False, row_tile=3, checks=False)
        assert list(results.cells) == [wanted]


def test_ids_are_for_good():
    """A changed id makes every stored result of the past unreachable; only NUMBERS_VERSION may do that."""
    import json

    from sparsity_lab.measurement import NUMBERS_VERSION

    about = {
        "selection": {
            "compress_ratio": 2, "topk": 4, "window": 3, "share": "layer", "exclude_window": False, "sinks": 0,
            **NO_POOL,
        },
        "scorer": {"name": "quest", "head_reduction": "softmax"},
        "pass": {
            "numbers": NUMBERS_VERSION, "model": "fa4e", "attention": "plain", "dtype": "float32", "device": "cpu",
            "data": {"name": "random", "length": LENGTH, "seed": 0}, "rows": 128, "seed": 0, "layers": [0, 1, 2, 3],
            "detail_rows": 16,
        },
    }  # fmt: skip
    assert id_of() == hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def test_the_description_of_a_cell():
    [found] = measure(FakeModel(), documents(1, LENGTH), [cell()], rows=8, seed=3, envelope=False).cells.values()
    wanted = {"scorer": "quest", "compress_ratio": 2, "topk": 4, "window": 3, "share": "layer"}
    wanted |= {
        "exclude_window": False,
        "sinks": 0,
        "index_source_layers": None,
        "model": "fake",
        "data": "random",
        "length": LENGTH,
    }
    wanted |= {"dtype": "float32", "device": "cpu", "seed": 3, "sampled_rows": 8}
    assert found == wanted | NO_POOL | {"scorer_options": {"name": "quest", "head_reduction": "softmax"}}


# --- resuming ---------------------------------------------------------------------------------------------------------


def run_into(folder, docs, cells, **options):
    model, said = FakeModel(), []
    results = measure(model, docs, cells, **{"rows": 8} | options, store=Store(folder, {}), say=said.append)
    return results, len(model.observed), said


def test_running_again_computes_nothing_and_says_so(tmp_path):
    cells, docs = grid("quest", topk=[2, 4], compress_ratio=[1, 2]), documents(2, LENGTH)
    first, forwards, said = run_into(tmp_path, docs, cells)
    assert (forwards, said) == (2, [])
    before = (tmp_path / "tallies.parquet").read_bytes()
    again, forwards, said = run_into(tmp_path, docs, cells)
    assert (forwards, said) == (0, ["2 of 2 documents are in the results already"])
    assert (tmp_path / "tallies.parquet").read_bytes() == before
    assert (tmp_path / "status").read_text() == "complete\n"
    assert_same(first, again)


def test_more_documents_add_only_these(tmp_path):
    run_into(tmp_path, documents(2, LENGTH), [cell()])
    more, forwards, said = run_into(tmp_path, documents(5, LENGTH), [cell()])
    assert (forwards, said) == (3, ["2 of 5 documents are in the results already"])
    assert_same(more, measure(FakeModel(), documents(5, LENGTH), [cell()], rows=8))


def test_a_larger_grid_computes_only_the_new_cells(tmp_path):
    class Counting(MeanKey):
        calls = 0

        def scores(self, tile, ratio, share):
            type(self).calls += 1
            return super().scores(tile, ratio, share)

    docs, old, new = documents(2, LENGTH), cell("counting"), cell("counting", topk=6, compress_ratio=1)
    options = {"scorers": {"counting": Counting()}, "envelope": False}
    run_into(tmp_path, docs, [old], **options)
    assert Counting.calls == 2 * 4  # documents x layers: the rows fit into one tile
    results, forwards, said = run_into(tmp_path, docs, [old, new], **options)
    assert (forwards, said, Counting.calls) == (2, [], 4 * 4)
    assert_same(results, measure(FakeModel(), docs, [old, new], rows=8, **options))


def test_only_what_is_missing_of_a_document(tmp_path):
    run_into(tmp_path, documents(1, LENGTH), [cell(), cell(topk=9)])
    run_into(tmp_path, documents(3, LENGTH), [cell()])
    results, forwards, said = run_into(tmp_path, documents(3, LENGTH), [cell(), cell(topk=9)])
    assert (forwards, said) == (2, ["1 of 3 documents are in the results already"])
    assert_same(results, measure(FakeModel(), documents(3, LENGTH), [cell(), cell(topk=9)], rows=8))


def test_another_seed_does_not_reuse_results(tmp_path):
    run_into(tmp_path, documents(1, LENGTH), [cell()])
    _, forwards, said = run_into(tmp_path, documents(1, LENGTH), [cell()], seed=1)
    assert (forwards, said) == (1, [])


def test_an_interrupted_run_is_resumed(tmp_path):
    class Interrupted(FakeModel):
        def observe(self, tokens, observer, layers):
            if len(self.observed) == 2:
                raise KeyboardInterrupt
            super().observe(tokens, observer, layers)

    with pytest.raises(KeyboardInterrupt):
        measure(Interrupted(), documents(4, LENGTH), [cell()], rows=8, store=Store(tmp_path, {}))
    assert len(set(load(tmp_path).tallies.document)) == 2
    assert (tmp_path / "status").read_text() != "complete\n"
    results, forwards, _ = run_into(tmp_path, documents(4, LENGTH), [cell()])
    assert forwards == 2
    assert_same(results, measure(FakeModel(), documents(4, LENGTH), [cell()], rows=8))


def test_a_damaged_file_is_named_and_computed_again(tmp_path):
    first, _, _ = run_into(tmp_path, documents(2, LENGTH), [cell()])
    path = tmp_path / "tallies.parquet"
    path.write_bytes(path.read_bytes()[:500])
    results, forwards, said = run_into(tmp_path, documents(2, LENGTH), [cell()])
    assert forwards == 2
    assert len(said) == 1
    assert said[0].startswith(f"set aside and computed again: {path}: damaged")
    assert path.with_suffix(".damaged").stat().st_size == 500
    assert_same(results, first)


def test_the_same_run_twice_gives_the_same_bytes(tmp_path):
    cells = grid(["quest", "mean_key"], topk=[2, 4], compress_ratio=[1, 3], share=["layer", "kv_head"])
    for name, order in (("a", 1), ("b", -1)):
        run_into(tmp_path / name, documents(3, LENGTH), cells[::order])
    assert (tmp_path / "a/tallies.parquet").read_bytes() == (tmp_path / "b/tallies.parquet").read_bytes()
    assert (tmp_path / "a/summary.csv").read_bytes() == (tmp_path / "b/summary.csv").read_bytes()


def test_saved_results_are_what_a_store_writes(tmp_path):
    results = measure(FakeModel(), documents(2, LENGTH), [cell()], rows=8)
    results.save(tmp_path / "saved")
    run_into(tmp_path / "stored", documents(2, LENGTH), [cell()])
    assert (tmp_path / "saved/tallies.parquet").read_bytes() == (tmp_path / "stored/tallies.parquet").read_bytes()
    assert_same(load(tmp_path / "saved"), results)


def test_the_same_document_twice_counts_once(tmp_path):
    [one] = documents(1, LENGTH)
    docs = dataclasses.replace(documents(1, LENGTH), items=(one, dataclasses.replace(one, index=1)))
    in_memory = measure(FakeModel(), docs, [cell()], rows=8)
    stored, _, _ = run_into(tmp_path, docs, [cell()])
    once = measure(FakeModel(), documents(1, LENGTH), [cell()], rows=8)
    for results in (in_memory, stored, once):
        results.tallies = results.tallies.drop(columns="document_index")  # either place is right
    assert_same(in_memory, stored)
    assert_same(in_memory, once)


def test_every_baseline_runs_with_its_defaults():
    results = measure(FakeModel(), documents(1, LENGTH), [cell(name) for name in BASELINES], rows=8)
    assert {c["scorer"] for c in results.cells.values()} == set(BASELINES)


def test_out_of_device_memory_halves_the_row_tile_and_goes_on():
    """What a GPU raises when the probabilities of a tile do not fit, here for any tile above 5 rows."""
    model, docs, heard = FakeModel(num_layers=2), documents(2), []
    right = measurement.row_tiles

    def short_of_memory(acts, rows, tile, *rest):
        if tile > 5:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return right(acts, rows, tile, *rest)

    cells = [Cell("recency", Selection(topk=3))]
    wanted = measure(model, docs, cells, rows=24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurement, "row_tiles", short_of_memory)
        found = measure(model, docs, cells, rows=24, say=heard.append)
    assert [text for text in heard if "memory" in text] == [
        f"out of device memory: going on with measure.row_tile={tile}" for tile in (12, 6, 3)
    ]
    assert found.tallies.equals(wanted.tallies)
