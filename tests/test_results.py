"""Result folders: whole or not there, merged without loss, averaged as DESIGN section 2 says."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_model import FakeModel, documents

from sparsity_lab.cells import grid
from sparsity_lab.measurement import measure
from sparsity_lab.metrics import METRICS
from sparsity_lab.results import (
    KEYS,
    SCHEMA,
    TALLY_COLUMNS,
    TALLY_SCHEMA,
    Results,
    ResultsError,
    Store,
    bootstrap_interval,
    collect,
    load,
    mean_of_defined,
    merge,
    merge_results,
    read_manifest,
    read_tallies,
    tally_frame,
    write_atomically,
    write_tallies,
    write_text,
)

LENGTH = 40
DESCRIPTION = {"scorer": "quest", "topk": 4, "compress_ratio": 1, "candidate_source_layer": None}


def tallies(cells=("a", "b"), docs=("d0", "d1", "d2"), layers=(0, 3), buckets=(1, 4, 8), seed=0) -> pd.DataFrame:
    """Random but possible tallies; some metrics undefined."""
    draw = np.random.default_rng(seed)
    rows = [(c, d, layer, b) for c in cells for d in docs for layer in layers for b in buckets]
    columns = {name: np.array(values, object) for name, values in zip(KEYS, zip(*rows, strict=True), strict=True)}
    columns["document_index"] = [int(d[1:]) for d in columns["document"]]
    for name in ("rows", "saturated", "empty"):
        columns[name] = draw.integers(0, 9, len(rows))
    for name in METRICS:
        columns[f"{name}_n"] = draw.integers(0, 9, len(rows)) * (name != "pool_recall")
        columns[f"{name}_sum"] = draw.integers(0, 2**20, len(rows)) / 2**20 * columns[f"{name}_n"]
    return tally_frame(columns)


def results(frame: pd.DataFrame | None = None, **options) -> Results:
    frame = tallies(**options) if frame is None else frame
    return Results(frame, {key: DESCRIPTION | {"topk": i} for i, key in enumerate(sorted(set(frame.cell_id)))}, {})


def filled(folder, frame: pd.DataFrame | None = None) -> Store:
    """A finished folder with the cells a and b."""
    store = Store(folder, {"name": "test"})
    store.register({"a": DESCRIPTION, "b": DESCRIPTION})
    store.add(tallies() if frame is None else frame)
    store.finish()
    return store


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.sort_values(KEYS, ignore_index=True)


# --- averages ---------------------------------------------------------------------------------------------------------


def plain_averages(frame: pd.DataFrame, cell: str, metric: str, **where) -> list[float]:
    """Mean over the rows of each document, in loops; documents where it is undefined are left out."""
    out = []
    for document in sorted(set(frame.document)):
        total = count = 0.0
        for row in frame.to_dict("records"):
            if row["cell_id"] == cell and row["document"] == document and all(row[k] == v for k, v in where.items()):
                total += row[f"{metric}_sum"]
                count += row[f"{metric}_n"]
        if count:
            out.append(total / count)
    return out


def test_averages_are_within_documents_then_over_them():
    frame = tallies()
    table = results(frame).frame()
    assert len(table) == 4
    for row in table.to_dict("records"):
        mine = frame[(frame.cell_id == row["cell_id"]) & (frame.layer == row["layer"])]
        assert row["documents"] == 3
        for name in ("rows", "saturated", "empty"):
            assert row[name] == sum(mine[name])
        for name in METRICS:
            values = plain_averages(frame, row["cell_id"], name, layer=row["layer"])
            if name == "pool_recall":
                assert values == []
                assert math.isnan(row[name])
                assert math.isnan(row[f"{name}_low"])
            else:
                assert row[name] == pytest.approx(sum(values) / len(values), abs=1e-12)
                assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]


def test_averages_by_bucket():
    frame = tallies()
    table = results(frame).frame(by=("layer", "bucket"))
    assert len(table) == 12
    for row in table.to_dict("records"):
        for name in ("recall", "coverage"):
            values = plain_averages(frame, row["cell_id"], name, layer=row["layer"], bucket=row["bucket"])
            assert row[name] == pytest.approx(sum(values) / len(values), abs=1e-12)


@pytest.mark.parametrize("by", [(), ("bucket",)])
def test_averages_over_layers_weigh_layers_alike(by):
    frame = tallies()
    for row in results(frame).frame(by=by).to_dict("records"):
        where = {"bucket": row["bucket"]} if by else {}
        per_document = []
        for document in sorted(set(frame.document)):
            one = frame[frame.document == document]
            layers = [plain_averages(one, row["cell_id"], "coverage", layer=layer, **where) for layer in (0, 3)]
            defined = [layer[0] for layer in layers if layer]
            if defined:
                per_document.append(sum(defined) / len(defined))
        assert row["coverage"] == pytest.approx(sum(per_document) / len(per_document), abs=1e-12)
        assert row["documents"] == 3


def test_a_long_document_weighs_no_more_than_a_short_one():
    frame = tallies(cells=["a"], docs=["d0", "d1"], layers=[0], buckets=[1])
    frame["recall_sum"], frame["recall_n"] = [1.0, 500.0], [1, 1000]
    [row] = results(frame).frame().to_dict("records")
    assert row["recall"] == 0.75


def test_documents_that_a_cell_lacks_are_left_out():
    frame = tallies()
    frame = frame[~((frame.cell_id == "a") & (frame.document == "d1"))].reset_index(drop=True)
    for row in results(frame).frame().to_dict("records"):
        values = plain_averages(frame, row["cell_id"], "coverage", layer=row["layer"])
        assert row["documents"] == len(values) == (2 if row["cell_id"] == "a" else 3)
        assert row["coverage"] == pytest.approx(sum(values) / len(values), abs=1e-12)


def test_one_document_has_no_interval():
    table = results(docs=["d0"]).frame()
    assert table["recall"].notna().all()
    assert table[["recall_low", "recall_high"]].isna().all(axis=None)


def test_nothing_measured_gives_an_empty_table():
    assert results(TALLY_SCHEMA.empty_table().to_pandas()).frame().empty


def test_the_fields_of_a_cell_are_columns():
    table = results().frame()
    assert set(table["scorer"]) == {"quest"}
    assert dict(zip(table["cell_id"], table["topk"], strict=True)) == {"a": 0, "b": 1}


def plain_bootstrap(values: list[float], resamples: int, seed: int) -> tuple[float, float]:
    if sum(not math.isnan(v) for v in values) < 2:
        return math.nan, math.nan
    draw, means = np.random.default_rng(seed), []
    picks = draw.integers(len(values), size=(resamples, len(values)))
    for pick in picks:
        chosen = [values[i] for i in pick if not math.isnan(values[i])]
        if chosen:
            means.append(sum(chosen) / len(chosen))
    return tuple(np.percentile(means, [2.5, 97.5]))


@pytest.mark.parametrize("seed", [0, 1])
def test_bootstrap_equals_the_loops(seed):
    values = np.random.default_rng(seed).random((2, 3, 7))
    values[0, 1, 2] = values[1, 2, 1:5] = values[1, 0, 1:] = math.nan
    values[1, 1] = math.nan
    low, high = bootstrap_interval(values, 200, seed)
    for i in range(2):
        for j in range(3):
            wanted = plain_bootstrap(values[i, j].tolist(), 200, seed)
            np.testing.assert_allclose((low[i, j], high[i, j]), wanted, atol=1e-12)
    assert np.isnan(low[1, 0])
    assert np.isnan(low[1, 1])


def test_bootstrap_interval_is_about_two_standard_errors_wide():
    values = np.random.default_rng(0).normal(size=400)
    low, high = bootstrap_interval(values, 2000)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    assert low < values.mean() < high


def test_mean_of_defined():
    values = np.array([[1.0, math.nan, 3.0], [math.nan] * 3, [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(mean_of_defined(values), [2, math.nan, 0])


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_failing_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "deep" / "file"
    write_text(path, "old")

    def fail(temporary):
        temporary.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["file"]
    write_text(path, "new")
    assert path.read_text() == "new"


def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")
    seen = []
    write_atomically(path, lambda temporary: (temporary.write_text("new"), seen.append(path.read_text())))
    assert seen == ["old"]


def test_tallies_survive_the_disk(tmp_path):
    frame = tallies()
    write_tallies(tmp_path / "t.parquet", frame.sample(frac=1, random_state=0))
    pd.testing.assert_frame_equal(read_tallies(tmp_path / "t.parquet"), in_order(frame), check_exact=True)


def test_documented_columns_are_the_columns(tmp_path):
    filled(tmp_path)
    schema = pq.read_schema(tmp_path / "tallies.parquet")
    assert schema.names == list(TALLY_COLUMNS)
    assert schema.equals(TALLY_SCHEMA)


def test_a_finished_folder(tmp_path):
    frame = tallies()
    filled(tmp_path, frame)
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == [
        "manifest.json", "parts", "status", "summary.csv", "tallies.parquet",
    ]  # fmt: skip
    assert list((tmp_path / "parts").iterdir()) == []
    assert (tmp_path / "status").read_text() == "complete\n"
    loaded = load(tmp_path)
    pd.testing.assert_frame_equal(loaded.tallies, in_order(frame), check_exact=True)
    assert loaded.cells == {"a": DESCRIPTION, "b": DESCRIPTION}
    assert loaded.manifest["name"] == "test"
    assert loaded.manifest["schema"] == SCHEMA
    summary = pd.read_csv(tmp_path / "summary.csv")
    assert len(summary) == 4
    np.testing.assert_allclose(summary["coverage"], loaded.frame()["coverage"], rtol=1e-5)


def test_a_running_folder_can_be_read(tmp_path):
    store = Store(tmp_path, {})
    store.register({"a": DESCRIPTION, "b": DESCRIPTION})
    with pytest.raises(ResultsError, match=r"nothing measured yet \(status: running\)"):
        load(tmp_path)
    first, second = tallies(docs=["d0"]), tallies(docs=["d1"])
    store.add(first)
    pd.testing.assert_frame_equal(in_order(load(tmp_path).tallies), in_order(first))
    store.add(second)
    assert len(load(tmp_path).tallies) == len(first) + len(second)
    assert (tmp_path / "status").read_text() == "running\n"


def test_adding_nothing_writes_nothing(tmp_path):
    Store(tmp_path, {}).add(TALLY_SCHEMA.empty_table().to_pandas())
    assert not list(tmp_path.rglob("*.parquet"))


def test_registering_again_keeps_the_cells(tmp_path):
    Store(tmp_path, {"seed": 1}).register({"a": DESCRIPTION})
    Store(tmp_path, {"seed": 2}).register({"b": DESCRIPTION}, [{"topk": 0, "reason": "bad"}] * 2)
    manifest = read_manifest(tmp_path)
    assert sorted(manifest["cells"]) == ["a", "b"]
    assert manifest["seed"] == 2
    assert manifest["failed_cells"] == [{"topk": 0, "reason": "bad"}]


@pytest.mark.parametrize("which", ["tallies.parquet", "parts/one.parquet"])
@pytest.mark.parametrize("damage", [b"", b"PAR1 but no parquet PAR1", None])
def test_a_damaged_file_is_set_aside_and_the_rest_kept(which, damage, tmp_path):
    store = filled(tmp_path, tallies(docs=["d0"]))
    write_tallies(tmp_path / "parts" / "one.parquet", tallies(docs=["d1"]))
    path = tmp_path / which
    path.write_bytes(path.read_bytes()[:-20] if damage is None else damage)
    with pytest.raises(ResultsError, match=f"{which}: damaged or not a parquet file"):
        load(tmp_path)
    kept = "d1" if which == "tallies.parquet" else "d0"
    assert store.done() == {("a", kept), ("b", kept)}
    assert len(store.damaged) == 1
    assert str(path) in store.damaged[0]
    assert not path.exists()
    assert path.with_suffix(".damaged").exists()
    assert set(store.finish().tallies.document) == {kept}


@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        (pa.table({"x": [1]}), "not tallies of this version .*'x'"),
        (pa.table({n: pa.array([], TALLY_COLUMNS[n]) for n in TALLY_COLUMNS if n != "rows"}), r"differ: \['rows'\]"),
        (pa.table({n: pa.array([], pa.string()) for n in TALLY_COLUMNS}), "differ: their types"),
    ],
)
def test_a_foreign_parquet_file(foreign, message, tmp_path):
    filled(tmp_path)
    pq.write_table(foreign, tmp_path / "tallies.parquet")
    with pytest.raises(ResultsError, match=f"tallies.parquet: {message}|tallies.parquet: .*{message}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"manifest.json: damaged"),
        ("", r"manifest.json: damaged"),
        ("\xff", r"manifest.json: damaged"),
        ("[]", r"manifest.json: schema=None: this version reads schema 1"),
        ('{"name": "other"}', r"manifest.json: schema=None"),
        ('{"schema": 0, "cells": {}}', r"manifest.json: schema=0: this version reads schema 1"),
    ],
)
def test_a_foreign_or_damaged_manifest(text, message, tmp_path):
    filled(tmp_path)
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ResultsError, match=message):
        load(tmp_path)
    with pytest.raises(ResultsError, match=message):
        Store(tmp_path, {}).register({})
    assert (tmp_path / "manifest.json").read_bytes() == text.encode("latin-1")


def test_a_folder_without_results(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ResultsError, match=rf"{folder}: no results here \(no manifest.json\)"):
            load(folder)


def test_tallies_of_unknown_cells(tmp_path):
    store = filled(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    del manifest["cells"]["b"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ResultsError, match=r"tallies of 1 cells that manifest.json does not describe"):
        load(tmp_path)
    store.register({"b": DESCRIPTION})
    assert set(load(tmp_path).cells) == {"a", "b"}


# --- merging ----------------------------------------------------------------------------------------------------------


def test_what_is_measured_twice_counts_once():
    one, other = tallies(docs=["d0", "d1"]), tallies(docs=["d1", "d2"])
    both = merge([one, other])
    assert len(both) == 2 * 3 * 2 * 3
    assert not both.duplicated(KEYS).any()
    assert merge([]).columns.tolist() == list(TALLY_COLUMNS)


def test_two_shards_are_one_run_bit_for_bit(tmp_path):
    cells = grid("quest", topk=[2, 6], compress_ratio=[1, 3])
    whole = documents(4, LENGTH)
    for name, indices in (("one", [0, 2]), ("two", [1, 3]), ("all", range(4))):
        docs = documents(indices=indices, length=LENGTH)
        measure(FakeModel(), docs, cells, rows=8, store=Store(tmp_path / name, {}))
    for shard in ([0, 2], [1, 3]):  # or both into one folder
        docs = documents(indices=shard, length=LENGTH)
        measure(FakeModel(), docs, cells, rows=8, store=Store(tmp_path / "shared", {}))
    wanted = (tmp_path / "all/tallies.parquet").read_bytes()
    assert (tmp_path / "shared/tallies.parquet").read_bytes() == wanted
    merged = merge_results([load(tmp_path / "one"), load(tmp_path / "two")])
    write_tallies(tmp_path / "merged.parquet", merged.tallies)
    assert (tmp_path / "merged.parquet").read_bytes() == wanted
    direct = measure(FakeModel(), whole, cells, rows=8)
    a, b = (r.frame().sort_values(["cell_id", "layer"], ignore_index=True) for r in (merged, direct))
    pd.testing.assert_frame_equal(a, b[a.columns], check_exact=True)


def test_collect_finds_every_folder_below(tmp_path):
    filled(tmp_path / "x/one", tallies(docs=["d0"]))
    filled(tmp_path / "two", tallies(docs=["d1", "d2"]))
    found = collect(tmp_path)
    assert set(found.tallies.document) == {"d0", "d1", "d2"}
    assert set(found.cells) == {"a", "b"}
    with pytest.raises(ResultsError, match="nothing measured here or below"):
        collect(tmp_path / "x/one/parts")
    with pytest.raises(ResultsError, match="no results to merge"):
        merge_results([])


def test_only_some_cells_and_documents():
    part = results().only(["b"], ["d0", "d2"])
    assert list(part.cells) == ["b"]
    assert set(zip(part.tallies.cell_id, part.tallies.document, strict=True)) == {("b", "d0"), ("b", "d2")}
    assert len(results().only(["a", "b"]).tallies) == len(tallies())


WORKER = """
import sys
from pathlib import Path

import test_results as t

folder, me = Path(sys.argv[1]), int(sys.argv[2])
store = t.Store(folder, {})
for i in range(3):
    store.register({"a": t.DESCRIPTION, f"w{me}": t.DESCRIPTION})
    store.done()
    store.add(t.tallies(cells=["a", f"w{me}"], docs=[f"d{100 * me + i}"]))
    store.finish()
assert store.damaged == [], store.damaged
"""


def test_processes_adding_at_once_lose_nothing(tmp_path):
    folder = tmp_path / "results"
    command = [sys.executable, "-c", WORKER, str(folder)]
    workers = [
        subprocess.Popen([*command, str(i)], cwd=Path(__file__).parent, stderr=subprocess.PIPE) for i in range(2)
    ]
    errors = [worker.communicate(timeout=120)[1].decode() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
    found = load(folder)
    assert set(found.cells) == {"a", "w0", "w1"}
    assert set(zip(found.tallies.cell_id, found.tallies.document, strict=True)) == {
        (cell, f"d{100 * me + i}") for me in range(2) for i in range(3) for cell in ("a", f"w{me}")
    }
    assert not found.tallies.duplicated(KEYS).any()
    assert not list(folder.rglob("*.damaged"))


def test_a_part_that_another_process_folds_in_meanwhile_is_not_lost(tmp_path, monkeypatch):
    store, other = filled(tmp_path, tallies(docs=["d0"])), Store(tmp_path, {})
    other.add(tallies(docs=["d1"]))
    folding = threading.Thread(target=other.finish)

    def read_late(path):
        if path.parent.name == "parts" and not folding.is_alive():
            folding.start()
            folding.join(timeout=1.0)  # ends at once unless it has to wait for us
        return read_tallies(path)

    monkeypatch.setattr("sparsity_lab.results.read_tallies", read_late)
    done = store.done()
    monkeypatch.undo()
    folding.join()
    assert done == {(cell, document) for cell in ("a", "b") for document in ("d0", "d1")}
    assert store.damaged == []
