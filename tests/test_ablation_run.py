"""An ablation over documents: its folder, going on, refusals, the command."""

from __future__ import annotations

import cli
import pandas as pd
import pytest
import tiny_ablation
import torch
from fake_model import FakeModel
from sparse_model import SparseModel

from sparsity_lab import ablation_run
from sparsity_lab.ablation import Ablation
from sparsity_lab.ablation_run import AblationRun, load, pool_of
from sparsity_lab.native import Native

SCRIPT = cli.ROOT / "experiments" / "ablate_source.py"


def test_all_pairs_of_all_documents(tmp_path):
    found = tiny_ablation.make(tmp_path)
    assert len(found.source) == 3 * 15 * 2 * 3 * 2
    assert len(found.reuse) == 3 * 21 * 2
    assert len(found.attribution) == 3 * 6 * 2
    assert len(found.joint) == 3 * 35 * 2
    assert found.ablation == tiny_ablation.GRID


def test_only_missing_documents_are_measured_and_nothing_changes(tmp_path):
    whole = tiny_ablation.make(tmp_path / "whole")
    tiny_ablation.make(tmp_path / "parts", count=1)
    model = FakeModel(num_layers=6)
    parts = tiny_ablation.make(tmp_path / "parts", model=model)
    assert len(model.observed) == 2
    for name in ("source", "reuse", "attribution", "joint"):
        pd.testing.assert_frame_equal(getattr(parts, name), getattr(whole, name), check_exact=True)


def test_a_document_that_was_cut_short_is_measured_again(tmp_path):
    whole = tiny_ablation.make(tmp_path)
    (tmp_path / "source" / f"{whole.source['document'].iloc[0]}.parquet").unlink()
    model = FakeModel(num_layers=6)
    again = tiny_ablation.make(tmp_path, model=model)
    assert len(model.observed) == 1
    pd.testing.assert_frame_equal(again.source, whole.source, check_exact=True)


def test_without_joint_pools_there_are_no_triples(tmp_path):
    found = tiny_ablation.make(tmp_path, grid=Ablation(1, (2, 4), (8, 16, 32), (2, 4)))
    assert found.joint.empty
    assert not (tmp_path / "joint").exists()


def test_out_of_device_memory_halves_the_row_tile_and_goes_on(tmp_path, monkeypatch):
    want, right, heard, steps = tiny_ablation.make(tmp_path / "one"), ablation_run.row_tiles, [], []

    def short_of_memory(acts, rows, tile, *rest):
        if tile > 12 and acts.layer == 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return right(acts, rows, tile, *rest)

    monkeypatch.setattr(ablation_run, "row_tiles", short_of_memory)
    run = tiny_ablation.prepare()
    found = run.run(tmp_path / "two", tiny_ablation.ABOUT, progress=lambda *n: steps.append(n), say=heard.append)
    assert heard == [f"out of device memory: going on with measure.row_tile={tile}" for tile in (23, 11)]
    assert steps[:2] == steps[2:4] == steps[4:6] == [(1, 18), (2, 18)]
    assert steps[-1] == (18, 18)
    for name in ("source", "reuse", "attribution", "joint"):
        keys = [c for c in getattr(want, name) if not c.endswith(("_sum", "_n"))]
        one, other = (getattr(results, name).sort_values(keys, ignore_index=True) for results in (want, found))
        pd.testing.assert_frame_equal(one, other, check_exact=True)


def test_other_settings_are_not_mixed_in(tmp_path):
    tiny_ablation.make(tmp_path)
    with pytest.raises(ValueError, match="rows"):
        tiny_ablation.make(tmp_path, rows=8)
    with pytest.raises(ValueError, match="ablation"):
        tiny_ablation.make(tmp_path, grid=Ablation(1, (2,), (8,), (2,)))


def test_a_wrong_attention_is_noticed(tmp_path):
    from sparsity_lab.checks import CheckError

    with pytest.raises(CheckError, match="layer 0"):
        tiny_ablation.make(tmp_path, model=FakeModel(num_layers=3, lie=1.1), index_source_layers=None)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"layers": [2]}, "needs two layers"),
        ({"rows": 0}, "measure.rows=0"),
        ({"row_tile": 0}, "measure.row_tile=0"),
        ({"index_source_layers": (0, 9)}, "index_source_layers"),
        ({"index_source_layers": (0, 3)}, r"layers \[1\]"),
        ({"grid": Ablation(64, (2,), (8,), (2,))}, "ablation.compress_ratio=64"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, named):
    with pytest.raises(ValueError, match=named):
        tiny_ablation.prepare(**options)


def test_native_indexers_take_part_where_they_run(tmp_path):
    model = SparseModel()
    from fake_model import documents

    grid = Ablation(1, (4,), (8, 16), (2,), window=model.raw_window)
    run = AblationRun(model, documents(1, 47), grid, Native(model), "native")
    assert run.layers == [3, 4]
    found = run.run(tmp_path, tiny_ablation.ABOUT)
    assert set(zip(found.source["source"], found.source["consumer"], strict=True)) == {(3, 4)}
    two = Ablation(2, (4,), (8,), (2,), window=model.raw_window)
    with pytest.raises(ValueError, match="needs two layers"):  # ratio 2 has a single layer that selects
        AblationRun(model, documents(1, 47), two, Native(model), "native")


def test_pool_of_needs_all_or_nothing():
    assert pool_of(None, None, None) is None
    with pytest.raises(ValueError, match="block_size=None"):
        pool_of(1, 2, None)


def test_damaged_and_foreign_folders(tmp_path):
    with pytest.raises(ValueError, match="no ablation"):
        load(tmp_path)
    found = tiny_ablation.make(tmp_path)
    (tmp_path / "reuse" / f"{found.reuse['document'].iloc[0]}.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="damaged"):
        load(tmp_path)


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    here = tmp_path_factory.mktemp("ablate")
    small = [o for o in cli.tiny(here) if not o.startswith(("selection", "measure.detail"))]
    grid = ["ablation.topk=[2,4]", "ablation.pool_positions=[16,32]", "ablation.block_sizes=[4]", "scorer=quest"]
    return here, [*small, *grid, f"results_dir={here}/results"]


def test_the_command_with_a_models_own_indexers(tmp_path):
    grid = ["ablation.topk=[8]", "ablation.pool_positions=[64]", "ablation.block_sizes=[4]", "ablation.joint_pools=[]"]
    args = ["model=deepseek_v41", "scorer=native", "data.num_documents=1", "data.length=160", *grid, "measure.rows=16"]
    done = cli.run(tmp_path, *args, f"results_dir={tmp_path}/results", script=SCRIPT)
    assert done.code != 0
    assert done.last.endswith("beside its compressed keys; set ablation.window=16")
    done = cli.run(tmp_path, *args, "ablation.window=16", f"results_dir={tmp_path}/results", script=SCRIPT)
    assert done.code == 0, done.err
    assert len(load(tmp_path / "results" / "ablate_source" / "deepseek_v41-pydoc-160-native-ratio1").reuse)


def test_the_command(command):
    here, args = command
    done = cli.run(here, *args, script=SCRIPT)
    assert done.code == 0, done.err
    folder = here / "results" / "ablate_source" / "llama-pydoc-128-quest-ratio1"
    assert done.last == f"results: {folder}"
    found = load(folder)
    assert {"git", "versions", "device"} <= set(found.manifest)
    again = cli.run(here, *args, script=SCRIPT)
    assert (again.code, again.forwards) == (0, 0)
    assert "2 of 2 documents" in again.err


def test_dry_run_measures_nothing_and_tells_the_memory(command):
    here, args = command
    done = cli.run(here, *args, "dry_run=true", script=SCRIPT)
    assert (done.code, done.forwards) == (0, 0)
    assert "3 pairs, 4 triples in pools of 512 in blocks of 8" in done.out
    assert "MiB kept between layers" in done.out
