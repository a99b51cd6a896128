"""Dense against sparse runs of the same measurement: rankings of candidate sources, coverage by layer, the script."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import numpy as np
import pytest
import tiny_ablation
import tiny_models
from fake_model import FakeModel
from test_config import composed

from sparsity_lab.ablation_table import ranking
from sparsity_lab.figures.free_running import draw_coverage, draw_rankings
from sparsity_lab.free_running import compared_coverage, compared_rankings, rank_agreement
from sparsity_lab.job import execute
from sparsity_lab.results import load

ANALYSIS = Path(__file__).parent.parent / "analysis"
SPARSE = "plain, sparse {}"


@pytest.fixture(scope="module")
def ablations(tmp_path_factory):
    """One model, and another that stands for it run sparse."""
    folders = [tmp_path_factory.mktemp(name) for name in ("teacher", "free")]
    tiny_ablation.make(folders[0])
    free = FakeModel(num_layers=6, attention=SPARSE, sharpness=1.0)
    return folders, [tiny_ablation.prepare(count=3).run(folders[0], tiny_ablation.ABOUT),
                     tiny_ablation.make(folders[1], model=free, count=2)]  # fmt: skip


def test_both_rankings_over_the_documents_that_both_have(ablations):
    _, (teacher, free) = ablations
    cell = {"topk": 4, "block_size": 2, "pool_positions": 16}
    table = compared_rankings(teacher, free)
    assert set(table["documents"]) == {2}
    some = table[(table[list(cell)] == list(cell.values())).all(axis=1)].set_index("source")
    shared = set(free.source["document"])
    same = dataclasses.replace(teacher, source=teacher.source[teacher.source["document"].isin(shared)])
    for side, results in (("teacher", same), ("free", free)):
        alone = ranking(results, [0, 1, 2, 3], **cell)
        assert list(alone["source"]) == list(some[f"rank_{side}"].sort_values(kind="stable").index)
        for row in alone.itertuples():
            assert some.loc[row.source, f"kept_{side}"] == pytest.approx(row.kept)
            assert some.loc[row.source, f"kept_{side}_low"] == pytest.approx(row.kept_low)


def test_agreement_is_spearmans_and_what_the_wrong_source_costs(ablations):
    _, (teacher, free) = ablations
    table = compared_rankings(teacher, free)
    for row in rank_agreement(table).itertuples():
        some = table.query(f"topk == {row.topk} and block_size == {row.block_size}")
        some = some[some["pool_positions"] == row.pool_positions]
        a, b = (np.argsort(np.argsort(some[f"kept_{side}"])) for side in ("teacher", "free"))
        n = len(some)
        if len(set(some["kept_teacher"])) == len(set(some["kept_free"])) == n:
            assert row.rank_correlation == pytest.approx(1 - 6 * ((a - b) ** 2).sum() / (n * (n * n - 1)))
        kept = some.set_index("source")
        assert row.regret == pytest.approx(kept["kept_free"].max() - kept.loc[row.best_teacher, "kept_free"])
        assert kept.loc[row.best_free, "kept_free"] == kept["kept_free"].max()
        assert row.regret >= 0


def test_the_same_numbers_agree_wholly(ablations, tmp_path):
    _, (teacher, _) = ablations
    again = tiny_ablation.make(tmp_path, model=FakeModel(num_layers=6, attention=SPARSE))
    agreed = rank_agreement(compared_rankings(teacher, again))
    assert np.allclose(agreed["rank_correlation"].dropna(), 1)
    assert (agreed["regret"] == 0).all()


def test_what_cannot_be_compared(ablations, tmp_path):
    _, (teacher, free) = ablations
    with pytest.raises(ValueError, match="same attention"):
        compared_rankings(teacher, teacher)
    other = tiny_ablation.make(tmp_path, model=FakeModel(num_layers=6, attention=SPARSE), rows=9)
    with pytest.raises(ValueError, match=r"different settings \(rows\)"):
        compared_rankings(teacher, other)
    with pytest.raises(ValueError, match="sources=\\[9\\]"):
        compared_rankings(teacher, free, [9])


def test_figure_of_rankings(ablations):
    _, (teacher, free) = ablations
    figure = draw_rankings(teacher, free, topk=4, block_size=2, pool_positions=16)
    agreed = rank_agreement(compared_rankings(teacher, free))
    rho = agreed.query("topk == 4 and block_size == 2 and pool_positions == 16")["rank_correlation"].iloc[0]
    assert f"rank correlation {rho:.3f}" in figure.get_suptitle()
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["teacher-forced", "free-running"]
    assert len(figure.axes[1].texts) == len(figure.table) == 4


@pytest.fixture(scope="module")
def recalls(tmp_path_factory):
    """Both runs of a tiny model, by the configuration that a command line makes."""
    folder = tmp_path_factory.mktemp("recall")
    path = tiny_models.make("gemma2", folder / "gemma2")
    asked = ["model=hf", f"model.path={path}", "scorer=quest", "data.length=96", "measure.rows=24",
             "measure.detail_rows=2", "selection.topk=[4,8]", "selection.compress_ratio=2", "selection.window=4",
             f"results_dir={folder}"]  # fmt: skip
    sparse = ["model.attention=sparse", "model.applied.topk=2", "model.applied.window=2"]
    return [execute(composed(*asked, *more), folder / "job")[0].folder for more in ([], sparse)]


def test_a_run_with_a_selection_applied_has_a_folder_and_cells_of_its_own(recalls):
    dense, sparse = (load(folder) for folder in recalls)
    assert "-sparse-" in recalls[1].name
    assert not set(dense.cells) & set(sparse.cells)
    assert sparse.manifest["config"]["model"]["applied"]["scorer"] == {"name": "quest", "head_reduction": "softmax"}
    assert "applied" not in dense.manifest["config"]["model"]


def test_coverage_by_layer_of_both_runs(recalls):
    dense, sparse = (load(folder) for folder in recalls)
    table = compared_coverage(dense, sparse)
    assert set(table["scorer"]) == {"quest"}
    for side, results in (("teacher", dense), ("free", sparse)):
        frame = results.frame(("layer",)).query("scorer == 'quest'").set_index(["topk", "layer"])["coverage"]
        assert table.set_index(["topk", "layer"])[f"coverage_{side}"].to_dict() == pytest.approx(frame.to_dict())
    first = table[table["layer"] == table["layer"].min()]
    assert (first["difference"] == 0).all()  # it is behind sliding-window layers alone, which stay dense
    assert (table[table["layer"] > 1]["difference"] != 0).all()
    assert np.allclose(table["difference"], table["coverage_free"] - table["coverage_teacher"])
    figure = draw_coverage(dense, sparse, topk=4)
    assert [axis.get_title() for axis in figure.axes] == ["quest, ratio 2"]
    with pytest.raises(ValueError, match="the first run must be of the dense model"):
        compared_coverage(sparse, dense)
    with pytest.raises(ValueError, match="topk=5: not in both runs"):
        draw_coverage(dense, sparse, topk=5)


def test_the_script(ablations, recalls, tmp_path, monkeypatch, capsys):
    (teacher, free), _ = ablations
    monkeypatch.syspath_prepend(ANALYSIS)
    script = importlib.import_module("plot_free_running")

    def run(*args):
        code, (out, err) = script.main([str(arg) for arg in args]), capsys.readouterr()
        return code, out, err

    code, out, err = run(teacher, free, "--out", tmp_path / "a")
    assert (code, err) == (0, "")
    assert "rank correlation" in out
    assert (tmp_path / "a" / "free-running-agreement.csv").is_file()
    code, out, err = run(*recalls, "--out", tmp_path / "b", "--topk", 4)
    assert (code, err) == (0, "")
    assert "quest, ratio 2: coverage" in out
    assert (tmp_path / "b" / "free-running-coverage.png").is_file()
    code, _, err = run(teacher, recalls[1])
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "must both be" in err
