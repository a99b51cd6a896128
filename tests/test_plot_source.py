"""The figures of an ablation: what is drawn, and the scripts that draw it."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
import tiny_ablation
from scripts import run

from sparsity_lab.ablation_table import ranking
from sparsity_lab.attribution import waterfall
from sparsity_lab.figures.attribution import draw_attribution
from sparsity_lab.figures.look import save
from sparsity_lab.figures.reuse import draw_reuse
from sparsity_lab.figures.source import draw_pool_sizes, draw_ranking, draw_sources


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    here = tmp_path_factory.mktemp("ablation")
    tiny_ablation.make(here)
    return here


@pytest.fixture(scope="module", params=[1, 3], ids=["one document", "three documents"])
def results(request, tmp_path_factory):
    return tiny_ablation.make(tmp_path_factory.mktemp("ablation"), count=request.param)


def drawn(figure, tmp_path):
    """Write it with every warning an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(path.stat().st_size > 100 for path in save(figure, tmp_path / "figure"))
    return figure


def test_maps_show_the_means(results, tmp_path):
    figure = drawn(draw_sources(results, "loss", topk=4, block_size=2), tmp_path)
    axes = [axis for axis in figure.axes if axis.images]
    assert [axis.get_title() for axis in axes] == ["pool of 8", "pool of 16", "pool of 32"]
    rows = results.source.query(
        "source == 1 and consumer == 3 and pool_positions == 16 and block_size == 2 and topk == 4"
    )
    want = (rows["single_coverage_sum"] - rows["coverage_sum"]) / rows["coverage_n"]
    assert axes[1].images[0].get_array()[1, 2] == pytest.approx(want.mean())


def test_pool_sizes_have_a_curve_a_source(results, tmp_path):
    figure = drawn(draw_pool_sizes(results, [0, 1, 2], topk=4, common=True), tmp_path)
    assert [len(axis.lines) for axis in figure.axes[:2]] == [3, 3]
    assert "behind layer 2" in figure.get_suptitle()


def test_a_single_source_can_be_drawn(results, tmp_path):
    figure = drawn(draw_pool_sizes(results, [0], topk=4, common=False), tmp_path)
    assert [len(axis.lines) for axis in figure.axes[:2]] == [1, 1]


def test_ranking_is_the_table(results, tmp_path):
    cell = {"topk": 4, "block_size": 2, "pool_positions": 8}
    figure = drawn(draw_ranking(results, [0, 1, 2], common=True, **cell), tmp_path)
    table = ranking(results, [0, 1, 2], **cell)
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_xdata(), table["kept"])
    assert [int(text.get_text()) for text in figure.axes[0].get_yticklabels()] == list(table["source"])


@pytest.mark.parametrize("metric", ["overlap", "reuse_coverage", "coverage"])
def test_reuse_has_a_map_a_budget(results, metric, tmp_path):
    figure = drawn(draw_reuse(results, metric), tmp_path)
    assert [axis.get_title() for axis in figure.axes if axis.images] == ["k = 2", "k = 4"]


def test_bars_are_the_losses(results, tmp_path):
    figure = drawn(draw_attribution(results, topk=4), tmp_path)
    table = waterfall(results.attribution).query("topk == 4")
    heights = [[bar.get_height() for bar in bars][:-1] for bars in figure.axes[0].containers]
    np.testing.assert_allclose(heights, table[["compression_loss", "pool_loss", "scorer_loss", "reuse_loss"]].T)
    assert "selected in layers 0, 1, 3" in figure.get_suptitle()


@pytest.mark.parametrize(
    ("script", "options", "stems"),
    [
        ("plot_source", ["--keep", "0.9"], ["source-loss-k4-block4", "source-pool-size-k4",
                                            "source-ranking-k4-pool16-block4", "source-smallest-pool"]),
        ("plot_source", ["--own-consumers", "--topk", "2", "--metric", "coverage", "--sources", "0", "1"],
         ["source-coverage-k2-block4", "source-smallest-pool-own-consumers"]),
        ("plot_reuse", ["--metric", "overlap", "--topk", "2"], ["reuse-overlap-k2"]),
        ("plot_attribution", [], ["attribution-k4"]),
    ],
)  # fmt: skip
def test_script(script, options, stems, folder, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = run(f"{script}.py", folder, "--out", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    for stem in stems:
        assert len(pd.read_csv(tmp_path / f"{stem}.csv"))
    assert sorted(map(str, tmp_path.iterdir())) == sorted(done.stdout.split())


def test_script_says_what_is_wrong(folder, tmp_path):
    for arguments, named in (([str(tmp_path)], "no results here"), ([str(folder), "--topk", "9"], "topk=9")):
        done = run("plot_reuse.py", *arguments)
        assert done.returncode == 2
        assert named in done.stderr
        assert "Traceback" not in done.stderr
