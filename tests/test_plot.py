"""Figures: what is drawn is what the tables say, files are the same every time, mistakes are told in one line."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scripts import ANALYSIS, run
from tiny_results import BOUNDS, LAYERS, tiny_results

from sparsity_lab import plot
from sparsity_lab.figures.look import BOUND_LINES, RATIO_COLOURS
from sparsity_lab.figures.panels import MAX_CURVES
from sparsity_lab.figures.table import curve_table
from sparsity_lab.results import merge_results

POOLS = [None, (0, 4, 8), (0, 8, 8), (1, 4, 8), (1, 8, 8)]


def curves_of(axis: Axes, name: str) -> list[Line2D]:
    return [line for line in axis.get_lines() if line.get_label() == name]


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("draw", [plot.recall, plot.coverage])
def test_curves_are_the_frame(draw) -> None:
    results = tiny_results()
    figure = draw(results)
    (axis,) = figure.axes
    metric = draw.__name__
    frame = results.frame(())
    for name in ("quest", *BOUNDS):
        lines = curves_of(axis, name)
        assert len(lines) == 2
        for ratio, line in zip((1, 4), lines, strict=True):
            rows = frame[(frame.scorer == name) & (frame.compress_ratio == ratio)].sort_values("topk")
            np.testing.assert_array_equal(line.get_xdata(), rows["topk"])
            np.testing.assert_array_equal(line.get_ydata(), rows[metric])
            assert line.get_color() == RATIO_COLOURS[[1, 4].index(ratio)]
    assert {line.get_linestyle() for line in curves_of(axis, "quest")} == {"-"}
    assert all(line.get_linestyle() != "-" for name in BOUNDS for line in curves_of(axis, name))


def test_bounds_of_a_single_k_can_be_seen() -> None:
    (axis,) = plot.coverage(tiny_results(), where="topk == 16", ratio=1).axes
    for name in BOUNDS:
        (line,) = curves_of(axis, name)
        assert list(line.get_xdata()) == [0, 1], "across the panel"
        assert len(set(line.get_ydata())) == 1


def test_axes_and_words() -> None:
    figure = plot.coverage(tiny_results(saturated={(4, 64): 4}))
    (axis,) = figure.axes
    assert axis.get_xscale() == "log"
    assert [t.get_text() for t in axis.get_xticklabels()] == ["16", "32", "64"]
    assert axis.get_ylim() == (0, 1.03)
    title = figure.get_suptitle()
    for words in (
        "tiny on lines",
        "3 documents x 64 tokens",
        "10 rows a document",
        "mean of 3 layers",
        "95 % interval",
    ):
        assert words in title
    assert "0\u201340 % at ratio 4" in axis.get_title().replace("\n", " ").replace("\u00a0", " ")
    assert legend_of(figure) == ["quest, ratio 1", "quest, ratio 4", *BOUNDS]


def test_band_is_the_interval() -> None:
    results = tiny_results(ratios=(1,))
    (axis,) = plot.recall(results).axes
    (band,) = axis.collections
    frame = results.frame(())
    rows = frame[frame.scorer == "quest"]
    corners = band.get_paths()[0].vertices
    assert set(rows["recall_low"]) | set(rows["recall_high"]) == set(corners[:, 1])


def test_one_document_has_no_band_and_says_so() -> None:
    figure = plot.recall(tiny_results(documents=1))
    assert not figure.axes[0].collections
    assert "one document, so no interval" in figure.get_suptitle()


def test_one_layer() -> None:
    results = tiny_results(ratios=(1,))
    figure = plot.recall(results, layer=2)
    frame = results.frame()
    rows = frame[(frame.scorer == "quest") & (frame.layer == 2)]
    np.testing.assert_array_equal(curves_of(figure.axes[0], "quest")[0].get_ydata(), rows["recall"])
    assert "layer 2" in figure.get_suptitle()
    assert "mean of" not in figure.get_suptitle()


def test_saturated_points_are_hollow_and_curves_end() -> None:
    figure = plot.recall(tiny_results(ratios=(1,), saturated={(1, 32): 6, (1, 64): 10}))
    (axis,) = figure.axes
    assert list(curves_of(axis, "quest")[0].get_xdata()) == [16, 32]
    (hollow,) = curves_of(axis, "_hollow")
    assert list(hollow.get_xdata()) == [32]
    assert hollow.get_markerfacecolor() == "white"
    assert "most rows saturated" in legend_of(figure)


def test_several_scorers_get_a_panel_a_ratio() -> None:
    figure = plot.recall(tiny_results(scorers=("quest", "mean_key")))
    assert [axis.get_title().split("\n")[0] for axis in figure.axes] == ["ratio 1", "ratio 4"]
    for axis in figure.axes:
        tested = [curves_of(axis, name)[0] for name in ("quest", "mean_key")]
        assert len({line.get_color() for line in tested}) == 2
        assert len({line.get_marker() for line in tested}) == 2
        bounds = [curves_of(axis, name)[0] for name in BOUNDS]
        assert [line.get_color() for line in bounds] == [BOUND_LINES[name][0] for name in BOUNDS]
        assert len({str(line._dash_pattern) for line in bounds}) == 3
    assert legend_of(figure) == ["mean_key", "quest", *BOUNDS]


def test_many_pools_split_by_scorer_with_short_names() -> None:
    figure = plot.coverage(tiny_results(scorers=("quest", "mean_key"), pools=POOLS))
    titles = [axis.get_title().split("\n")[0] for axis in figure.axes]
    assert titles == ["mean_key, ratio 1", "mean_key, ratio 4", "quest, ratio 1", "quest, ratio 4"]
    names = ["no pool", *(f"pool {b}x8 of layer {layer}" for layer in (0, 1) for b in (4, 8))]
    assert legend_of(figure) == [*names, *BOUNDS]
    for axis in figure.axes:
        assert all(len(curves_of(axis, name)) == 1 for name in (*names, *BOUNDS))


def test_no_panel_holds_more_curves_than_colours() -> None:
    pools = [None, *((layer, blocks, 8) for layer in range(3) for blocks in (4, 8, 16, 32))]
    figure = plot.recall(tiny_results(ratios=(1,), pools=pools))
    assert len(figure.axes) == 3
    for layer, axis in enumerate(figure.axes):
        assert axis.get_title().startswith(f"pools of layer {layer}, ratio 1")
        tested = [line for line in axis.get_lines() if line.get_marker() != "None"]
        assert len(tested) == 5 <= MAX_CURVES  # four pools, and the cells without one in every panel


def test_what_bounds_depend_on_gets_its_own_panel() -> None:
    merged = merge_results([tiny_results(share="layer"), tiny_results(share="kv_head")])
    figure = plot.recall(merged)
    assert {axis.get_title().split("\n")[0] for axis in figure.axes} == {
        "one selection a layer",
        "one selection a KV head",
    }
    assert all(len(curves_of(axis, name)) == 2 for axis in figure.axes for name in ("quest", *BOUNDS))


def test_choice_keeps_bounds_of_what_is_left() -> None:
    results = tiny_results(scorers=("quest", "mean_key"), pools=POOLS)
    table = curve_table(results, "recall", scorer="quest", where="candidate_topk_blocks == 4 and topk < 64", ratio=[4])
    assert set(table["compress_ratio"]) == {4}
    assert set(table["topk"]) == {16, 32}
    assert set(table.loc[~table["bound"], "curve"]) == {"quest, pool 4x8 of layer 0", "quest, pool 4x8 of layer 1"}
    assert set(table.loc[table["bound"], "scorer"]) == set(BOUNDS)
    only = curve_table(results, "recall", scorer="oracle")
    assert set(only["scorer"]) == {"oracle"}


def test_bounds_alone_can_be_drawn() -> None:
    (axis,) = plot.coverage(tiny_results(), scorer=["oracle", "random"]).axes
    assert len(axis.get_lines()) == 4


def test_pool_metrics_show_pooled_cells_only() -> None:
    figure = plot.curves(tiny_results(ratios=(1,), pools=POOLS[:2]), "pool_recall")
    assert legend_of(figure) == ["quest, pool 4x8 of layer 0"]


def test_same_scorer_with_other_options_is_told_apart() -> None:
    other = tiny_results(window=8.0)
    for cell in other.cells.values():
        cell["window"] = 8
        if cell["scorer"] == "quest":
            cell["scorer_options"] = {"name": "quest", "head_reduction": "max"}
    other.cells = {key: cell for key, cell in other.cells.items() if cell["scorer"] == "quest"}
    names = set(curve_table(merge_results([tiny_results(), other]), "recall")["curve"])
    assert {"quest (head_reduction=max)", "quest (head_reduction=None)"} < names


def test_cells_that_look_the_same_are_refused() -> None:
    other = tiny_results(window=8.0)
    for cell in other.cells.values():
        cell["window"] = 8
    with pytest.raises(ValueError, match="look the same"):
        plot.recall(merge_results([tiny_results(), other]))


def test_by_layer_is_the_frame() -> None:
    results = tiny_results(saturated={(4, 64): 10})
    figure = plot.by_layer(results, "recall")
    maps = figure.axes[:2]
    assert [axis.get_title() for axis in maps] == ["quest\nratio 1", "quest\nratio 4"]
    frame = results.frame()
    for ratio, axis in zip((1, 4), maps, strict=True):
        rows = frame[(frame.scorer == "quest") & (frame.compress_ratio == ratio)]
        expected = rows.pivot(index="layer", columns="topk", values="recall").to_numpy()
        np.testing.assert_array_equal(axis.get_images()[0].get_array().filled(np.nan), expected)
        assert axis.get_images()[0].origin == "lower"
    assert [t.get_text() for t in maps[0].get_yticklabels()] == [str(layer) for layer in LAYERS]
    assert "hatched: every row saturated" in figure.get_suptitle()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"layer": 9}, "layer=9: measured were layers 0 to 2"),
        ({"scorer": "lightning"}, "scorer='?lightning'?: not in these results"),
        ({"ratio": 3}, "ratio=3: not in these results, which have 1, 4"),
        ({"where": "topk =="}, "where='topk =='"),
        ({"where": "topk + 1"}, "must be true or false"),
        ({"where": "nothing == 1"}, "nothing"),
        ({"where": "topk > 999"}, "no cell is left"),
    ],
)
def test_bad_choice(choice: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plot.recall(tiny_results(), **choice)


def test_nothing_to_show() -> None:
    empty = tiny_results()
    empty.tallies = empty.tallies.iloc[:0]
    with pytest.raises(ValueError, match="nothing measured yet"):
        plot.recall(empty)
    with pytest.raises(ValueError, match="every row is saturated"):
        plot.recall(tiny_results(topk=(16,), ratios=(1,), saturated={(1, 16): 10}))
    with pytest.raises(ValueError, match="not measured"):
        plot.curves(tiny_results(undefined=["output_error"]), "output_error")
    with pytest.raises(ValueError, match="metric='recal': must be one of recall"):
        plot.curves(tiny_results(), "recal")


def test_too_many_panels() -> None:
    pools = [(layer, blocks, 8) for layer in range(30) for blocks in (4, 8)]
    with pytest.raises(ValueError, match="60 curves would need 30 panels, more than 24; choose"):
        plot.recall(tiny_results(ratios=(1,), topk=(16,), pools=pools))
    with pytest.raises(ValueError, match="heat maps"):
        plot.by_layer(tiny_results(pools=pools))


def test_nothing_overlaps_or_is_clipped() -> None:
    """Title, axes and legend of the busiest figures keep apart and inside the page."""
    for results in (
        tiny_results(ratios=(1, 4, 16), saturated={(16, 64): 8}),
        tiny_results(scorers=("quest", "mean_key"), pools=POOLS),
        tiny_results(ratios=(1, 2, 4, 8, 16)),
    ):
        figure = plot.coverage(results)
        figure.draw_without_rendering()
        page = figure.bbox
        legend = figure.legends[0].get_window_extent()
        title = figure._suptitle.get_window_extent()
        boxes = [axis.get_tightbbox() for axis in figure.axes]
        for box in (legend, title, *boxes):
            assert box.x0 >= page.x0 - 1
            assert box.x1 <= page.x1 + 1
            assert box.y0 >= page.y0 - 1
            assert box.y1 <= page.y1 + 1
        assert all(legend.y1 <= box.y0 + 1 and box.y1 <= title.y0 + 1 for box in boxes)
        for i, a in enumerate(boxes):
            assert not any(a.overlaps(b.shrunk(0.99, 0.99)) for b in boxes[i + 1 :])


def test_no_trace_in_matplotlib() -> None:
    """Neither pyplot's figures nor its settings change, and pyplot need not even be there."""
    before = dict(mpl.rcParams)
    figure = plot.coverage(tiny_results())
    assert dict(mpl.rcParams) == before
    assert figure._repr_png_().startswith(b"\x89PNG")
    code = "import sys; import sparsity_lab.plot; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_saved_twice_is_the_same(tmp_path: Path) -> None:
    first = plot.save(plot.coverage(tiny_results()), tmp_path / "a" / "coverage")
    second = plot.save(plot.coverage(tiny_results()), tmp_path / "b" / "coverage")
    assert [path.name for path in first] == [f"coverage.{kind}" for kind in ("png", "svg", "pdf", "csv")]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert b"<dc:date>" not in first[1].read_bytes()


def test_scripts_write_figures_and_tables(tmp_path: Path) -> None:
    results = tiny_results()
    folder = results.save(tmp_path / "one")
    done = run("plot_recall.py", folder)
    assert done.returncode == 0, done.stderr
    paths = [folder / "figures" / f"recall.{kind}" for kind in ("png", "svg", "pdf", "csv")]
    assert done.stdout.split() == list(map(str, paths))
    before = [path.read_bytes() for path in paths]
    table = pd.read_csv(paths[3])
    expected = results.frame(())
    merged = table.merge(expected, on="cell_id", suffixes=("", "_frame"))
    assert len(merged) == len(expected)
    np.testing.assert_allclose(merged["recall"], merged["recall_frame"], rtol=1e-5)
    assert run("plot_recall.py", folder).returncode == 0
    assert [path.read_bytes() for path in paths] == before


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """What plot_coverage.py runs, in this process: starting one takes seconds."""
    monkeypatch.syspath_prepend(ANALYSIS)
    monkeypatch.setattr(sys, "argv", ["plot_coverage.py"])
    curves = importlib.import_module("_curves")
    return lambda *arguments: curves.main("Draw.", ["coverage", "density"], list(map(str, arguments)))


def test_scripts_merge_folders_and_name_the_choice(tmp_path: Path, draw: Callable[..., int]) -> None:
    one = tiny_results(ratios=(1,)).save(tmp_path / "one")
    two = tiny_results(ratios=(4,)).save(tmp_path / "two")
    assert draw(one, two, "--by-layer", "--ratio", 1, 4) == 0
    assert (tmp_path / "figures" / "coverage-by-layer-ratio1-ratio4.svg").exists()
    table = pd.read_csv(tmp_path / "figures" / "coverage-by-layer-ratio1-ratio4.csv")
    assert set(table["compress_ratio"]) == {1, 4}
    assert set(table["layer"]) == set(LAYERS)
    assert draw(one, "--out", tmp_path / "out", "--layer", 1, "--scorer", "quest", "--metric", "density") == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"density-layer1-quest.{kind}" for kind in ("png", "svg", "pdf", "csv")
    }


def test_scripts_tell_mistakes_in_one_line(
    tmp_path: Path, draw: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_results().save(tmp_path / "one")
    damaged = tiny_results().save(tmp_path / "damaged")
    (damaged / "tallies.parquet").write_bytes(b"PAR1 no")
    empty = tiny_results().save(tmp_path / "empty")
    (empty / "tallies.parquet").unlink()
    (tmp_path / "file").write_text("")
    for arguments, words in [
        ([tmp_path / "missing"], "no results here"),
        ([folder, damaged], "damaged"),
        ([empty], "nothing measured yet"),
        ([folder, "--where", "topk > 999"], "no cell is left"),
        ([folder, "--out", tmp_path / "file" / "in"], "file"),
    ]:
        assert draw(*arguments) == 2
        out, err = capsys.readouterr()
        assert words in err
        assert err.startswith("plot_coverage.py: ")
        assert len(err.splitlines()) == 1
        assert out == ""
    assert not (folder / "figures").exists()


def test_scripts_exit_with_two(tmp_path: Path) -> None:
    command = [sys.executable, str(ANALYSIS / "plot_coverage.py"), str(tmp_path / "missing")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"plot_coverage.py: {tmp_path / 'missing'}: no results here (no manifest.json)\n"


@pytest.mark.parametrize("script", ["plot_recall.py", "plot_coverage.py"])
def test_scripts_help(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0
    for option in ("--out", "--against", "--layer", "--by-layer", "--scorer", "--ratio", "--where", "--metric"):
        assert option in done.stdout
