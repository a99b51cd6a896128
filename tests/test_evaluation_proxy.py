"""Proxies against truths: ranks by hand, known orders, intervals, matching cells, the scripts."""

from __future__ import annotations

import importlib
import itertools

import cli
import numpy as np
import pandas as pd
import pytest

from sparsity_lab.cells import Candidate, Cell, Selection
from sparsity_lab.evaluation import proxy
from sparsity_lab.evaluation.summary import EvaluationResults
from sparsity_lab.evaluation.tables import SCHEMAS, EvaluationStore
from sparsity_lab.metrics import METRICS
from sparsity_lab.results import Results, tally_frame

POOL = Candidate(0, 40, 8)
CELLS = [
    Cell("quest", Selection(compress_ratio=ratio, topk=k, candidate=pool))
    for k, ratio, pool in itertools.product((16, 64, 256), (1, 4), (None, POOL))
]
DOCUMENTS = ("a", "b", "c")
QUALITY = np.arange(len(CELLS)) * 0.05  # of each cell


def about(cell, **more):
    return {**cell.fields(), "model": "tiny", "data": "lines", "length": 512, "scorer_options": {}, **more}


def recall_results(values=None, **more):
    """Every metric says QUALITY but those in `values`."""
    rows = list(itertools.product(range(len(CELLS)), enumerate(DOCUMENTS), (0, 1)))
    columns = {
        "cell_id": [f"recall{i}" for i, _, _ in rows],
        "document": [name for _, (_, name), _ in rows],
        "document_index": [number for _, (number, _), _ in rows],
        "layer": [layer for _, _, layer in rows],
        "bucket": [64] * len(rows),
        "rows": [10] * len(rows),
        "saturated": [0] * len(rows),
        "empty": [0] * len(rows),
    }
    for name in METRICS:
        told = (values or {}).get(name, QUALITY)
        columns[f"{name}_sum"] = [10.0 * (told[i] + 0.001 * number + 0.002 * layer) for i, (number, _), layer in rows]
        columns[f"{name}_n"] = [10] * len(rows)
    cells = {f"recall{i}": about(cell, **more) for i, cell in enumerate(CELLS)}
    return Results(tally_frame(columns), cells, {})


def likelihood(loss):
    return [
        {"cell_id": f"ran{i}", "document": name, "document_index": number, "bucket": 64, "selective": True, "rows": 100,
         "dense_loss_sum": 100 * (2.0 + number), "loss_sum": 100 * (2.0 + number + loss[i]), "kl_sum": 100 * loss[i],
         "agreement_sum": 100 * (1 - loss[i])}
        for i in range(len(CELLS)) for number, name in enumerate(DOCUMENTS)
    ]  # fmt: skip


def evaluation(loss, cells=CELLS):
    tables = {name: schema.empty_table().to_pandas() for name, schema in SCHEMAS.items()}
    described = {f"ran{i}": about(cell) for i, cell in enumerate(cells)}
    return EvaluationResults({**tables, "likelihood": pd.DataFrame(likelihood(loss))}, described, {})


def judged(values=None, loss=None, **options):
    pairs = proxy.pair(recall_results(values), evaluation(0.9 - QUALITY if loss is None else loss))
    return proxy.agreement(pairs, resamples=200, **options).set_index(["truth", "proxy"])


def test_ranks_share_their_mean():
    assert proxy._rank_rows(np.array([[3.0, 1, 3, 2], [1, 1, 1, 1]])).tolist() == [[3.5, 1, 3.5, 2], [2.5] * 4]


def test_rank_correlation_by_hand():
    # ranks 1 2 3 4 5 against 2 1 4 3 5: differences 1 1 1 1 0, rho = 1 - 6 * 4 / (5 * 24)
    rho, cells = proxy._rho(np.array([1.0, 2, 3, 4, 50]), np.array([20.0, 10, 40, 30, 500]))
    assert (rho, cells) == (pytest.approx(0.8), 5)
    rho, cells = proxy._rho(np.array([1.0, 2, np.nan, 3, 4, 50]), np.array([20.0, 10, 7, 40, 30, 500]))
    assert (rho, cells) == (pytest.approx(0.8), 5)
    assert np.isnan(proxy._rho(np.ones(5), np.arange(5.0))[0])
    assert np.isnan(proxy._rho(np.arange(3.0), np.arange(3.0))[0])


def test_a_perfect_proxy_and_a_reversed_one():
    table = judged({"output_error": 1 - QUALITY, "density": 1 - QUALITY})
    for truth in ("loss_difference", "kl", "top1_agreement"):
        assert table.loc[(truth, "coverage"), "agreement"] == pytest.approx(1)
        assert table.loc[(truth, "output_error"), "agreement"] == pytest.approx(1)  # less is better
        assert table.loc[(truth, "density"), "agreement"] == pytest.approx(-1)
    assert table.loc[("kl", "coverage"), "rho"] == pytest.approx(-1)
    assert table.loc[("top1_agreement", "coverage"), "rho"] == pytest.approx(1)
    assert set(table["cells"]) == {len(CELLS)}
    assert ("retrieval", "coverage") not in table.index


def test_the_best_comes_first_and_what_is_as_good_is_tied():
    noise = np.random.default_rng(0).permutation(QUALITY)
    table = judged({"recall": noise, "density": np.ones(len(CELLS))}).loc["kl"]
    assert table.iloc[0]["agreement"] == pytest.approx(1)
    assert table.loc["total_coverage", "tied"]
    assert not table.loc["recall", "tied"]
    assert (
        table.loc["recall", "agreement_low"] < table.loc["recall", "agreement"] < table.loc["recall", "agreement_high"]
    )
    assert table.index[-1] in ("density", "recall")


def test_a_constant_proxy_has_no_agreement():
    found = judged({"density": np.full(len(CELLS), 0.5)})
    assert np.isnan(found.loc[("kl", "density"), "agreement"])
    assert found.loc["kl"].index[-1] == "density"


def test_a_verdict_names_the_best_and_its_equals():
    noise = np.random.default_rng(0).permutation(QUALITY)
    table = judged({name: noise for name in proxy.PROXIES if name != "coverage"}).reset_index()
    line = proxy.verdict(table)[0]
    assert line == "loss_difference: coverage orders cells best (1.00 [1.00-1.00])"
    assert "not to be told from it" in proxy.verdict(judged().reset_index())[0]


def test_cells_are_matched_by_what_they_select():
    pairs = proxy.pair(recall_results(), evaluation(0.9 - QUALITY, cells=CELLS[::-1]))
    means = pairs.means()
    order = [
        next(i for i, cell in enumerate(CELLS) if cell.fields()["topk"] == row.topk
             and cell.fields()["compress_ratio"] == row.compress_ratio
             and (cell.selection.candidate is None) == pd.isna(row.candidate_source_layer))
        for row in means.itertuples()
    ]  # fmt: skip
    np.testing.assert_allclose(means["coverage"], QUALITY[order] + 0.002)
    np.testing.assert_allclose(means["loss_difference_truth"], (0.9 - QUALITY)[::-1][order])


def test_too_few_cells_in_common():
    with pytest.raises(ValueError, match="0 cells are in both"):
        proxy.pair(recall_results(data="other"), evaluation(QUALITY))


@pytest.fixture
def folders(tmp_path):
    recall_results({"recall": np.random.default_rng(0).permutation(QUALITY)}).save(tmp_path / "recall")
    store = EvaluationStore(tmp_path / "evaluate", {})
    store.register({f"ran{i}": about(cell) for i, cell in enumerate(CELLS)})
    store.add({"likelihood": likelihood(0.9 - QUALITY)})
    store.finish()
    return tmp_path


@pytest.fixture
def script(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(cli.ROOT / "analysis"))

    def run(name, *args):
        code = importlib.import_module(name).main([*map(str, args)])
        return code, *capsys.readouterr()

    return run


def test_the_scripts_draw(folders, script):
    code, out, _ = script("plot_proxy", "--recall", folders / "recall", "--evaluate", folders / "evaluate")
    assert code == 0
    assert "orders cells best" in out
    written = {path.name for path in (folders / "evaluate" / "figures").iterdir()}
    assert {"proxy-agreement.png", "proxy-agreement.csv", "proxy-loss_difference.svg"} <= written
    table = pd.read_csv(folders / "evaluate" / "figures" / "proxy-agreement.csv")
    assert len(table) == 3 * len(proxy.PROXIES)
    assert script("plot_evaluate", folders / "evaluate", "--out", folders / "out", "--metric", "kl")[0] == 0
    assert len(pd.read_csv(folders / "out" / "evaluate-kl.csv")) == len(CELLS)


def test_the_scripts_refuse(folders, script):
    code, _, err = script("plot_evaluate", folders / "recall")
    assert code == 2
    assert "not an evaluation" in err
    assert "not measured here" in script("plot_evaluate", folders / "evaluate", "--metric", "retrieval")[2]
    both = ["--recall", folders / "recall", "--evaluate", folders / "evaluate"]
    assert "not measured" in script("plot_proxy", *both, "--truth", "retrieval")[2]
