"""The report on ablations, distillations and evaluations; cost against the loss of the running model."""

from __future__ import annotations

import pandas as pd
import pytest
import tiny_ablation
import tiny_evaluation
from test_pareto import DEVICE
from test_plot_training import write_run
from test_recommend import script
from test_report import Tags, many, saved

from sparsity_lab import report
from sparsity_lab.evaluation.summary import EvaluationResults
from sparsity_lab.folders import load
from sparsity_lab.pareto import priced_loss
from sparsity_lab.pricing import Setting, prices
from sparsity_lab.recommend import Wish
from sparsity_lab.shape import described_model

SETTING = Setting(DEVICE, tiny_evaluation.LENGTH)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    here = tmp_path_factory.mktemp("others")
    tiny_ablation.make(here / "sources")
    write_run(here / "indexers", ratios=(1, 4))
    model = tiny_evaluation.Dictated()
    tiny_evaluation.run(here / "running", model=model, manifest={"model": described_model(model)})
    (here / "search").mkdir()
    pd.DataFrame({"name": ["best"], "predicted": [0.9]}).to_csv(here / "search" / "placements.csv")
    saved(here / "cells", many())
    return here


@pytest.fixture(scope="module")
def text(folders):
    paths = [folders / name for name in ("cells", "sources", "indexers", "running", "search")]
    page, troubles = report.build(paths, SETTING, Wish(0.6), title=None, command="c")
    assert troubles == []
    return Tags(page).text


def test_each_kind_has_its_section(text):
    for title in ("Headline", "Sources: sources", "Indexers: indexers", "Applied to the running model: running"):
        assert title in text
    sayings = (
        "share of single-level coverage kept",
        "Last evaluation, step 20",
        "best",
        "against loss",
    )
    for said in sayings:
        assert said in text, said


def test_evaluated_cells_are_priced_and_judged(folders, text):
    found = load(folders / "running")
    assert isinstance(found, EvaluationResults)
    table = priced_loss([found], SETTING).set_index("topk").sort_index()
    assert table["unpriced"].isna().all()
    assert table["seconds"].is_monotonic_increasing
    assert table["perplexity_difference"].is_monotonic_increasing  # random weights: the less attention, the better
    assert table["dominated"].tolist() == [False, True, True]
    alone = prices(found, SETTING).set_index("cell_id")["seconds"]
    assert alone[table["cell_id"]].tolist() == table["seconds"].tolist()
    row = table.loc[16]
    assert f"{row['perplexity_difference']:.3f}" in text


def test_plot_cost_of_an_evaluation(folders, tmp_path, capsys):
    assert script("plot_cost", folders / "running", "--out", tmp_path) == 0
    assert "loss-h200-131072-scaled.csv" in capsys.readouterr().out
    assert script("plot_cost", folders / "running", folders / "cells", "--out", tmp_path) == 2
    assert "holds an evaluation" in capsys.readouterr().err


def test_recommend_wants_measured_cells(folders, capsys):
    assert script("recommend", folders / "sources") == 2
    assert "holds an ablation" in capsys.readouterr().err
