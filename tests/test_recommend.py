"""The recommendation: the right cell, honest words, an experiment that measures it again."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path

import cli
import pandas as pd
import pytest
import yaml
from hydra import compose, initialize_config_dir
from test_pareto import DEVICE, SHAPE, shaped
from tiny_results import tiny_results

from sparsity_lab import schemas
from sparsity_lab.config import read_job
from sparsity_lab.pareto import pareto
from sparsity_lab.pricing import Setting, cell_of
from sparsity_lab.recommend import Wish, experiment, quantity, recommend, text
from sparsity_lab.results import load

ANALYSIS = Path(__file__).parent.parent / "analysis"
POOLS = [None, (0, 40, 4), (1, 40, 4)]
SETTING = Setting(DEVICE, 640)


@pytest.fixture(scope="module")
def parts():
    return [shaped(tiny_results(["quest", "mean_key"], topk=(8, 16, 32), pools=POOLS))]


def script(name: str, *arguments: object) -> int:
    sys.path.insert(0, str(ANALYSIS))
    try:
        return importlib.import_module(name).main([str(each) for each in arguments])
    finally:
        sys.path.remove(str(ANALYSIS))


@pytest.mark.parametrize("coverage", [0.1, 0.5, 0.62, 0.66, 0.7, 0.72])
@pytest.mark.parametrize("layers", [0.3, 0.9])
@pytest.mark.parametrize("sure", [False, True])
def test_the_cheapest_that_keeps_enough(parts, coverage, layers, sure):
    answer = recommend(parts, SETTING, Wish(coverage, layers, sure=sure))
    table = pareto(parts, SETTING, layers=layers)
    enough = [
        row
        for _, row in table.iterrows()
        if row["scorer"] in ("quest", "mean_key") and row["kept_low" if sure else "kept"] >= coverage
    ]
    if not enough:
        assert answer.chosen is None
        assert answer.shown["kept"] == table.loc[table["unpriced"].isna(), "kept"].max()
        assert not answer.table["recommended"].any()
        return
    assert answer.chosen["seconds"] == min(row["seconds"] for row in enough)
    assert answer.table.loc[answer.table["recommended"], "cell_id"].tolist() == [answer.chosen["cell_id"]]


def test_bounds_are_never_chosen(parts):
    assert pareto(parts, SETTING).query("kept >= 0.9")["scorer"].unique().tolist() == ["oracle"]
    answer = recommend(parts, SETTING, Wish(0.9))
    assert answer.chosen is None
    assert "nothing qualifies" in text(answer, parts)
    assert answer.nearest["scorer"] == "quest"


def test_extrapolation_is_told(parts):
    scaled = text(recommend(parts, SETTING, Wish(0.7)), parts)
    assert "EXTRAPOLATION: measured on documents of 64 tokens, priced at 640" in scaled
    assert "is scaled to" in scaled
    fixed = text(recommend(parts, Setting(DEVICE, 640, budget="fixed"), Wish(0.7)), parts)
    assert "EXTRAPOLATION" in fixed
    assert "taken as it is" in fixed
    there = text(recommend(parts, Setting(DEVICE, 64), Wish(0.7)), parts)
    assert "EXTRAPOLATION" not in there
    shorter = text(recommend(parts, Setting(DEVICE, 32), Wish(0.7)), parts)
    assert "EXTRAPOLATION" not in shorter
    assert "priced at 32" in shorter


def test_weights_that_would_serve_longer_contexts_than_they_were_distilled_on_are_told(parts):
    told = {"settings": None, "indexers": {}, "distilled": {"weights": "mine", "lengths": {"1": 64, "2": 64, "4": 64}}}
    part = [shaped(parts[0], quest=told, mean_key=told)]
    assert "distilled" not in text(recommend(part, Setting(DEVICE, 64), Wish(0.7)), part)
    told = text(recommend(part, SETTING, Wish(0.7)), part)
    assert "scorer.weights=mine: distilled on documents of 64 tokens, used on 640" in told


def test_what_is_said_of_few_documents(parts):
    assert "3 documents were measured" in text(recommend(parts, SETTING, Wish(0.7)), parts)
    one = [shaped(tiny_results(documents=1))]
    told = text(recommend(one, SETTING, Wish(0.7)), one)
    assert "One document was measured, so there is no interval" in told
    assert "nan" not in told
    assert recommend(one, SETTING, Wish(0.1, sure=True)).chosen is None


def test_late_rows_and_saturation_are_told():
    found = shaped(tiny_results(["quest"], [1], [16], saturated={(1, 16): 8}))
    late = found.tallies.assign(bucket=16)
    late["coverage_sum"] += 0.2 * late["coverage_n"]
    found.tallies = found.tallies.assign(document_index=0)
    found.tallies = pd.concat([late, found.tallies], ignore_index=True)
    told = text(recommend([found], SETTING, Wish(0.8, 0.3)), [found])
    assert "rows 16 to 31 keep" in told
    assert "the latest rows alone fall short" in told
    assert "80.0 % of its rows see no more than k positions" in told


def test_layers_that_were_not_measured_are_told():
    found = [shaped(tiny_results(), dataclasses.replace(SHAPE, num_layers=5, attention_layers=(0, 1, 2, 3, 4)))]
    assert "2 layers were not measured" in text(recommend(found, SETTING, Wish(0.5)), found)


def test_several_models_need_a_choice():
    parts = [shaped(tiny_results(model=name)) for name in ("one", "two")]
    with pytest.raises(ValueError, match=r"model=one.*model=two.*--where"):
        recommend(parts, SETTING, Wish(0.5))
    assert recommend(parts, SETTING, Wish(0.5), "model == 'two'").chosen["model"] == "two"
    with pytest.raises(ValueError, match="where='nonsense'"):
        recommend(parts, SETTING, Wish(0.5), "nonsense")
    with pytest.raises(ValueError, match="no cell is left"):
        recommend(parts, SETTING, Wish(0.5), "topk > 1000")


def test_only_bounds_or_no_shape_is_said():
    with pytest.raises(ValueError, match="is a bound"):
        recommend([shaped(tiny_results([]))], SETTING, Wish(0.5))
    with pytest.raises(ValueError, match="do not tell the model's shape"):
        recommend([tiny_results()], SETTING, Wish(0.5))


@pytest.mark.parametrize("fields", [{"coverage": 0}, {"coverage": 1.2}, {"layers": 0}, {"layers": -1}])
def test_wishes_are_checked(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Wish(**fields)


def test_quantities():
    units = ((1.0, "s"), (1e-3, "ms"))
    assert [quantity(value, units) for value in (12.345, 0.5, 0.00001)] == [
        "12.3\u00a0s",
        "500\u00a0ms",
        "0.01\u00a0ms",
    ]


def composed(folder: Path, name: str = "recommended"):
    schemas.register()
    with initialize_config_dir(str(cli.ROOT / "conf"), version_base="1.3"):
        return compose("recall", overrides=[f"hydra.searchpath=[{folder}]", f"experiment={name}"])


@pytest.mark.parametrize("model", [
    {"name": "smollm2", "dtype": "auto", "device": "cpu", "attn_implementation": None},
    {"name": "x", "path": "a/b: c", "dtype": "auto", "device": "cpu", "attn_implementation": None, "gguf_file": None,
     "revision": None, "trust_remote_code": False, "attention": "native"},
])  # fmt: skip
@pytest.mark.parametrize("data", [
    {"name": "pydoc", "num_documents": 3, "length": 64, "seed": 1, "skip": 2, "shard": 1, "num_shards": 4},
    {"name": "jsonl", "num_documents": 3, "length": 64, "seed": 1, "path": "*.jsonl", "field": "text"},
])  # fmt: skip
@pytest.mark.parametrize("scorer", [
    {"name": "quest", "head_reduction": "logit"}, {"name": "lightning", "weights": "shipped"},
])  # fmt: skip
def test_experiments_compose_to_the_same_cell(tmp_path, model, data, scorer):
    fields = {"exclude_window": True, "sinks": 2, "index_source_layers": "0,1", "seed": 7, "share": "kv_head"}
    found = shaped(tiny_results(["quest"], [4], [16], [(0, 10, 4)], **fields), quest={"settings": scorer})
    measure = {"rows": 5, "seed": 0, "detail_rows": 4, "layers": [0, 1], "envelope": True, "checks": True}
    found.manifest["config"] = {"model": model, "data": data, "measure": {**measure, "row_tile": None}}
    key = next(key for key in found.cells if key.startswith("quest"))
    path = tmp_path / "experiment" / "recommended.yaml"
    path.parent.mkdir()
    path.write_text("# @package _global_\n" + yaml.safe_dump(experiment(found, key, "recommended")))
    job = read_job(composed(tmp_path))
    assert [cell.selection for cell in job.cells] == [cell_of(found.cells[key]).selection]
    assert job.scorer == scorer
    assert {**job.model, **model} == job.model
    assert {**job.data, "shard": 0, "num_shards": 1, "skip": data.get("skip", 0)} == {
        **data, "shard": 0, "num_shards": 1, "skip": data.get("skip", 0),
    }  # fmt: skip
    assert job.measure == {**measure, "row_tile": None, "rows": 10, "seed": 7}  # the cell's own rows and seed


def test_experiment_needs_a_configuration(parts):
    with pytest.raises(ValueError, match=r"experiments/recall\.py"):
        experiment(parts[0], next(iter(parts[0].cells)), "recommended")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A small sweep with the command line, pools and reuse included."""
    folder = tmp_path_factory.mktemp("sweep")
    words = [*cli.tiny(folder), f"results_dir={folder}/results", "selection.topk=[4,8,16]", "scorer=quest"]
    pools = "selection.zipped=[{candidate: null}, {candidate: {source_layer: 0, topk_blocks: 10, block_size: 4}}]"
    done = cli.run(folder, *words, pools)
    assert done.code == 0, done.err
    return folder, words, folder / "results" / "recall" / "llama-pydoc-128"


def test_from_sweep_to_experiment_and_back(measured, capsys, tmp_path):
    folder, _, results = measured
    code = script("recommend", results, "--coverage", 0.3, "--context", 128, "--device", "laptop_cpu")
    out = capsys.readouterr().out
    assert code == 0
    assert out.startswith("recommended: quest ratio 1 top-")
    assert "dense attention" in out
    command = out.splitlines()[-1].split("recall.py ")[1].split()
    assert command[0] == "--config-dir"
    done = cli.run(folder, f"results_dir={tmp_path}", flags=command[:2] + command[2:])
    assert done.code == 0, done.err
    again = load(tmp_path / "recommended" / "llama-pydoc-128")
    found = load(results)
    label = out.split(": ")[1].split(",")[0]
    same = [key for key in again.cells if cell_of(found.cells[key]).label() == label]
    assert len(same) == 1
    cli.assert_same_tallies(again.only(same).tallies, found.only(same).tallies)


def test_script_says_when_nothing_qualifies(measured, capsys):
    assert script("recommend", measured[2], "--coverage", 1, "--layers", 1) == 1
    out = capsys.readouterr().out
    assert out.startswith("nothing qualifies: no measured configuration keeps at least 100 % coverage")
    assert "nearest: quest" in out
    assert "experiment" not in out


@pytest.mark.parametrize(("arguments", "told"), [
    (["--device", "toaster"], "device='toaster': must be one of"),
    (["--devices", "no/such.yaml"], "no/such.yaml"),
    (["--context", "0"], "context=0: must be at least 1"),
    (["--coverage", "95"], "coverage=95.0: must be a share"),
    (["--where", "topk ="], "where='topk ='"),
])  # fmt: skip
def test_script_tells_mistakes_in_one_line(measured, capsys, arguments, told):
    assert script("recommend", measured[2], *arguments) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


def test_script_and_folders_that_hold_nothing(tmp_path, capsys):
    assert script("recommend", tmp_path / "nowhere") == 2
    (tmp_path / "manifest.json").write_text('{"schema": 0, "cells": {}}')
    assert script("recommend", tmp_path) == 2
    err = capsys.readouterr().err
    assert "no results here" in err
    assert "this version reads schema 1" in err
