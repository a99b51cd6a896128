"""`sl.load`: every kind of results folder by its manifest, and clear words for everything else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import tiny_ablation
from matplotlib.figure import Figure
from test_plot_training import write_run
from tiny_results import tiny_results

import sparsity_lab as sl
from sparsity_lab.ablation_run import AblationResults
from sparsity_lab.folders import Tables, load_kind, load_measurements, notes
from sparsity_lab.results import Results


@pytest.fixture(scope="module")
def ablation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ablation")
    tiny_ablation.make(folder)
    return folder


def test_measured_cells(tmp_path: Path) -> None:
    want = tiny_results()
    found = sl.load(want.save(tmp_path / "one"))
    assert isinstance(found, Results)
    pd.testing.assert_frame_equal(found.frame(()), want.frame(()), check_like=True)
    assert isinstance(sl.plot.coverage(found), Figure)


def test_an_ablation(ablation: Path) -> None:
    found = sl.load(str(ablation))
    assert isinstance(found, AblationResults)
    assert {"document", "source", "consumer", "loss"} <= set(found.frame())
    assert {"reuse_coverage", "overlap"} <= set(found.frame("reuse"))
    assert {"layer", "scorer_loss"} <= set(found.frame("attribution"))
    with pytest.raises(ValueError, match="table='nothing': must be one of source, reuse, attribution"):
        found.frame("nothing")
    for draw in (sl.plot.sources, sl.plot.pool_sizes, sl.plot.source_ranking, sl.plot.reuse, sl.plot.attribution):
        figure = draw(found)
        assert isinstance(figure, Figure)
        assert len(figure.table)


def test_a_distillation(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    found = sl.load(run)
    assert isinstance(found, Tables)
    assert len(found.frame()) == len(pd.read_csv(run / "training.csv"))
    assert isinstance(sl.plot.training(found), Figure)
    with pytest.raises(ValueError, match="table='no': must be one of training"):
        found.frame("no")
    (run / "training.csv").unlink()
    with pytest.raises(ValueError, match=r"run: a distillation without training\.csv"):
        sl.load(run)


def test_a_pretraining(tmp_path: Path) -> None:
    identity = {"config": {}, "recipe": {}, "data": {}, "world": 1}
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": 1, "identity": identity}))
    with pytest.raises(ValueError, match=r"a pretraining without training\.csv"):
        sl.load(tmp_path)
    (tmp_path / "training.csv").write_text("step,loss\n10,2.5\n")
    assert list(sl.load(tmp_path).frame()["loss"]) == [2.5]
    (tmp_path / "losses.csv").write_text("step,loss\n1,3\n2,2\n")
    assert len(sl.load(tmp_path).frame("losses")) == 2


def test_a_search(tmp_path: Path) -> None:
    (tmp_path / "placements.csv").write_text("name,predicted\na,0.5\n")
    assert list(sl.load(tmp_path).frame()["predicted"]) == [0.5]
    (tmp_path / "placements.csv").write_text("")
    with pytest.raises(ValueError, match=r"placements\.csv: damaged"):
        sl.load(tmp_path)


def test_another_kind_is_named(tmp_path: Path, ablation: Path) -> None:
    folder = tiny_results().save(tmp_path / "one")
    with pytest.raises(
        ValueError,
        match=r"one: holds a measurement \(experiments/recall\.py\); this needs an ablation \(experiments/ablate_so",
    ):
        load_kind(folder, "ablation")
    with pytest.raises(ValueError, match="holds an ablation"):
        load_measurements([folder, ablation])


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ("{", "damaged"),
        ("[1]", "not a manifest"),
        ('{"name": "something"}', "of none of the experiments (recall.py, ablate_source.py"),
        ('{"recording_schema": 1}', "a recording of a model"),
        ('{"schema": 0, "cells": {}}', "schema=0: this version reads schema 1"),
        ('{"schema": 1, "cells": []}', "cells must be described"),
        ('{"schema": 1, "cells": {"a": {"scorer": 3}}}', "cell a has no proper scorer, scorer_options, compress_ratio"),
        ('{"schema": 1, "cells": {}}', "nothing measured yet (status: unknown)"),
        ('{"identity": {"ablation": {}}}', "nothing measured yet"),
        ('{"schema": 1, "kind": "evaluation", "cells": {}}', "nothing evaluated yet"),
        ('{"identity": 5}', "of none of the experiments"),
    ],
)
def test_manifests_that_cannot_be_used(manifest: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(ValueError, match=re.escape(words)) as told:
        sl.load(tmp_path)
    assert str(tmp_path) in str(told.value)


def test_folders_that_hold_none(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        (tmp_path / "many" / name).mkdir(parents=True)
        (tmp_path / "many" / name / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no manifest.json\); there are some in .*a, .*b, .*c and 1 more"):
        sl.load(tmp_path / "many")
    with pytest.raises(ValueError, match=r"no results here \(no manifest.json\)$"):
        sl.load(tmp_path / "missing")


def test_tables_of_another_version(tmp_path: Path, ablation: Path) -> None:
    manifest = json.loads((ablation / "manifest.json").read_text())
    old = tmp_path / "old"
    (old / "source").mkdir(parents=True)
    for name in ("source", "reuse", "attribution", "joint"):
        (old / name).mkdir(exist_ok=True)
        pd.DataFrame({"n": [1]}).to_parquet(old / name / "x.parquet")
    (old / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"old/source: not tables of this version \(no .*consumer"):
        sl.load(old)
    manifest["identity"]["ablation"]["from_the_future"] = 1
    (old / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="another version"):
        sl.load(old)


def test_notes(tmp_path: Path) -> None:
    folder = tiny_results().save(tmp_path / "one")
    assert notes(folder) == []
    (folder / "status").write_text("failed: out of memory\n")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["failed_cells"] = [{"topk": 1, "reason": "no such layer"}, {"reason": "x"}]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    first, second = notes(folder)
    scorer = next(iter(manifest["cells"].values()))["scorer"]
    manifest["scorers"] = {scorer: {"distilled": {"weights": "mine", "lengths": {"1": 4, "2": 4, "4": 4}}}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "one: scorer.weights=mine: distilled on documents of 4 tokens, used on 64" in notes(folder)[2]
    assert first.endswith("one: failed: out of memory; shown is what was measured so far")
    assert second.endswith("one: 2 failed cells (the first: no such layer)")
