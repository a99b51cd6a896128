"""The figures beyond curves over k: what is drawn is what the tables say, everything fits, files are the same."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from tiny_results import BOUNDS, tiny_results

from sparsity_lab import plot
from sparsity_lab.compare import against
from sparsity_lab.figures.look import STYLE
from sparsity_lab.results import Results

ROOT = Path(__file__).parent.parent
FEW_POOLS = [None, *((layer, blocks, 8) for layer in (0, 1) for blocks in (4, 8))]
POOLS = [None, *((layer, blocks, size) for layer in (0, 1) for blocks, size in ((4, 8), (8, 8), (8, 4), (16, 4)))]


def with_buckets(results: Results, buckets: tuple[int, ...] = (32, 64, 128)) -> Results:
    """The same rows in later buckets too, a tenth worse in each."""
    parts = []
    for i, bucket in enumerate(buckets):
        part = results.tallies.assign(bucket=bucket)
        sums = [c for c in part if c.endswith("_sum")]
        part[sums] *= 1 - 0.1 * i
        parts.append(part)
    return Results(pd.concat(parts, ignore_index=True), results.cells, {})


def with_density(results: Results) -> Results:
    """Density grows with k and ratio."""
    tallies = results.tallies.copy()
    share = tallies["cell_id"].map({k: c["topk"] * c["compress_ratio"] / 512 for k, c in results.cells.items()})
    tallies["density_sum"] = share * tallies["density_n"]
    return Results(tallies, results.cells, {})


def line_of(axis: Axes, name: str) -> Line2D:
    return next(line for line in axis.get_lines() if line.get_label() == name)


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def frame_of(results: Results, by: tuple[str, ...] = (), **cell: object) -> pd.DataFrame:
    frame = results.frame(by)
    for key, value in cell.items():
        frame = frame[frame[key].isna() if value is None else frame[key] == value]
    return frame


def test_density_is_measured() -> None:
    results = with_density(tiny_results(ratios=(4,)))
    figure = plot.density(results)
    rows = frame_of(results, scorer="quest").sort_values("topk")
    line = line_of(figure.axes[0], "quest")
    np.testing.assert_allclose(line.get_xdata(), [0.125, 0.25, 0.5])
    np.testing.assert_array_equal(line.get_ydata(), rows["coverage"])
    assert "density" in figure.axes[0].get_xlabel()
    assert {"coverage", "density"} <= set(figure.table)
    with pytest.raises(ValueError, match="over itself"):
        plot.density(results, "density")


def test_density_of_a_difference_is_that_of_a() -> None:
    a, b = with_density(tiny_results(ratios=(4,))), tiny_results(ratios=(4,), scorers=("mean_key",))
    line = line_of(plot.density(against(a, b)).axes[0], "quest \u2212 mean_key")
    np.testing.assert_allclose(line.get_xdata(), [0.125, 0.25, 0.5])
    np.testing.assert_allclose(line.get_ydata(), 0.1)


def test_positions_are_buckets_at_one_k() -> None:
    results = with_buckets(tiny_results(ratios=(1,)))
    figure = plot.by_position(results, "recall", topk=64)
    line = line_of(figure.axes[0], "quest")
    rows = frame_of(results, ("bucket",), scorer="quest", topk=64).sort_values("bucket")
    assert list(line.get_xdata()) == [32, 64, 128]
    np.testing.assert_array_equal(line.get_ydata(), rows["recall"])
    assert "k = 64" in figure.get_suptitle()
    assert "k = 32" in plot.by_position(results).get_suptitle(), "the middle one"
    with pytest.raises(ValueError, match="topk=17: not in these results, which have 16, 32, 64"):
        plot.by_position(results, topk=17)


def test_buckets_without_a_value_have_no_place() -> None:
    results = with_buckets(tiny_results(ratios=(1,)))
    early = results.tallies["bucket"] == 32
    results.tallies.loc[early, "saturated"] = results.tallies.loc[early, "rows"]
    results.tallies.loc[early, [c for c in results.tallies if c == "rows" or c.endswith(("_n", "_sum"))]] = 0
    assert list(line_of(plot.by_position(results).axes[0], "quest").get_xdata()) == [64, 128]


def test_layers() -> None:
    results = tiny_results()
    axis = plot.over_layers(results).axes[0]
    rows = frame_of(results, ("layer",), scorer="quest", topk=32, compress_ratio=1)
    np.testing.assert_array_equal(line_of(axis, "quest").get_ydata(), rows["coverage"])
    assert axis.get_xlabel() == "layer"
    with pytest.raises(ValueError, match="layer=1: cannot be drawn over layers"):
        plot.over_layers(results, layer=1)


def test_scorers_are_single_level() -> None:
    figure = plot.scorers(tiny_results(scorers=("quest", "mean_key"), pools=POOLS), where="topk < 64")
    assert legend_of(figure) == ["mean_key", "quest", *BOUNDS]
    assert [axis.get_title().split("\n")[0] for axis in figure.axes] == ["ratio 1", "ratio 4"]
    assert set(figure.table["topk"]) == {16, 32}
    assert figure.table["candidate_source_layer"].isna().all()
    with pytest.raises(ValueError, match="no cell is left"):
        plot.scorers(tiny_results(pools=[(0, 4, 8)], scorers=("quest",)), where="scorer == 'quest'")


def test_two_levels_are_differences_behind_the_sources() -> None:
    results = tiny_results(ratios=(1,), pools=[None, (0, 4, 8), (1, 4, 8)])
    figure = plot.two_level(results)
    assert set(legend_of(figure)) == {"quest, pool 4x8 of layer 0", "quest, pool 4x8 of layer 1"}
    np.testing.assert_allclose(line_of(figure.axes[0], "quest, pool 4x8 of layer 1").get_ydata(), -0.051)
    assert "mean of 1 layer" in figure.get_suptitle()
    assert "behind the candidate sources" in figure.get_suptitle()
    assert figure.axes[0].get_ylabel() == "difference in coverage"


@pytest.mark.parametrize(
    ("by", "column", "values", "panels"),
    [
        ("ratio", "compress_ratio", [1, 4], 9),
        ("block_size", "candidate_block_size", [4, 8], 4),
        ("pool_size", "pool_positions", [32, 64], 4),
        ("source", "candidate_source_layer", [0, 1], 4),
    ],
)
def test_families(by: str, column: str, values: list[int], panels: int) -> None:
    results = tiny_results(pools=POOLS)
    figure = plot.family(results, by, "recall", ratio=None if by == "ratio" else 4)
    assert len(figure.axes) == panels
    for axis in figure.axes:
        lines = [line for line in axis.get_lines() if line.get_marker() not in ("None", None, "")]
        assert [list(line.get_xdata()) for line in lines] == [values] * 3, "a curve a k"
    reference = "oracle" if by == "ratio" else "single-level"
    assert legend_of(figure) == ["k = 16", "k = 32", "k = 64", reference]
    tested = figure.table[figure.table["candidate_source_layer"].notna() | (by == "ratio")]
    assert set(tested[column].dropna()) == set(values)
    assert ("all behind the candidate sources" in figure.get_suptitle()) == (by != "ratio")


def test_a_family_is_its_cells() -> None:
    """Coverage over pool size, on the layers behind all sources, beside single-level selection on the same layers."""
    results = tiny_results(pools=POOLS, ratios=(1,))
    figure = plot.family(results, "pool_size", topk=32)
    assert figure.axes[0].get_title().replace("\u00a0", " ") == "pools of layer 0, blocks of 4"
    frame = frame_of(results, ("layer",), scorer="quest", layer=2, topk=32)
    drawn, dashed = figure.axes[0].get_lines()[1], figure.axes[0].get_lines()[0]
    pools = frame[(frame["candidate_source_layer"] == 0) & (frame["candidate_block_size"] == 4)]
    np.testing.assert_allclose(drawn.get_ydata(), pools.sort_values("candidate_topk_blocks")["coverage"])
    single = frame[frame["candidate_source_layer"].isna()]["coverage"]
    np.testing.assert_allclose(dashed.get_ydata(), float(single.iloc[0]))


def test_families_that_are_none() -> None:
    with pytest.raises(ValueError, match="by='k': must be one of ratio, block_size"):
        plot.family(tiny_results(), "k")
    with pytest.raises(ValueError, match=r"by=ratio: nothing was measured at two values .* selection.compress_ratio"):
        plot.family(tiny_results(ratios=(1,)))
    with pytest.raises(ValueError, match="no cell of these results has a candidate pool"):
        plot.family(tiny_results(), "pool_size")
    with pytest.raises(ValueError, match=r"by=block_size: .* selection.candidate"):
        plot.family(tiny_results(pools=[(0, 4, 8), (0, 8, 8)]), "block_size")


def test_heads_are_points_a_layer() -> None:
    results = tiny_results(ratios=(1,))
    figure = plot.head_spread(results, topk=16)
    frame = frame_of(results, ("layer",), scorer="quest", topk=16)
    (points,) = [line for line in figure.axes[0].get_lines() if line.get_linestyle() == "None"]
    np.testing.assert_array_equal(points.get_xdata(), frame["coverage"])
    np.testing.assert_array_equal(points.get_ydata(), frame["worst_head_coverage"])
    with pytest.raises(ValueError, match=r"set measure\.detail_rows"):
        plot.head_spread(tiny_results(undefined=["worst_head_coverage"]))


def costs() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "seconds": [1e-6, 2e-6, 4e-6, 3e-6],
            "coverage": [0.5, 0.7, 0.9, 0.6],
            "coverage_low": [0.4, 0.6, 0.85, None],
            "coverage_high": [0.6, 0.8, 0.95, None],
            "dominated": [False, False, False, True],
            "recommended": [False, True, False, False],
            "label": ["a", "b", "c", "d"],
            "scorer": ["quest", "quest", "learned", "learned"],
            "compress_ratio": [1, 4, 4, 1],
        }
    )


def test_costs() -> None:
    figure = plot.cost_coverage(costs(), cost="seconds", cost_label="s a token", threshold=0.65)
    (axis,) = figure.axes
    assert axis.get_xscale() == "log"
    assert axis.get_xlabel() == "s a token"
    assert [text.get_text() for text in axis.texts] == ["a", "b", "c"]
    grey = [line for line in axis.get_lines() if line.get_color() == "#b5b5b5"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in grey] == [([3e-6], [0.6])]
    step = next(line for line in axis.get_lines() if len(line.get_xdata()) == 3)
    assert list(step.get_xdata()) == [1e-6, 2e-6, 4e-6]
    wanted = ["learned", "quest", "ratio 1", "ratio 4", "dominated", "recommended", "to be kept"]
    assert legend_of(figure) == wanted
    bare = plot.cost_coverage(costs()[["seconds", "coverage"]], cost="seconds")
    assert not bare.axes[0].texts
    with pytest.raises(ValueError, match="bytes: no such column"):
        plot.cost_coverage(costs(), cost="bytes")
    with pytest.raises(ValueError, match="nothing to show"):
        plot.cost_coverage(costs().assign(coverage=None), cost="seconds")


FIGURES: dict[str, Callable[[Results], Figure]] = {
    "density": lambda r: plot.density(with_density(r)),
    "by_position": lambda r: plot.by_position(with_buckets(r)),
    "over_layers": plot.over_layers,
    "by_layer": lambda r: plot.by_layer(r, ratio=4, where="candidate_block_size == 8"),
    "scorers": plot.scorers,
    "two_level": plot.two_level,
    "head_spread": plot.head_spread,
    "pool_size": lambda r: plot.family(r, "pool_size", ratio=4, scorer="quest"),
    "source": lambda r: plot.family(r, "source", ratio=4, scorer="quest"),
    "cost_coverage": lambda r: plot.cost_coverage(costs(), cost="seconds"),
}


@pytest.mark.parametrize(
    ("name", "difference"),
    [*((name, False) for name in FIGURES), *((name, True) for name in ("over_layers", "two_level", "pool_size"))],
)
def test_everything_fits(name: str, difference: bool) -> None:
    """Title, axes and legend keep apart and inside the page; the title says model, data, documents and interval."""
    results = tiny_results(scorers=("quest", "mean_key"), pools=FEW_POOLS, topk=(16, 64))
    if difference:
        results = against(results, results, "one", "other")
    figure = FIGURES[name](results)
    figure.draw_without_rendering()
    page, title = figure.bbox, figure._suptitle.get_window_extent()
    legends = [legend.get_window_extent() for legend in figure.legends]
    boxes = [axis.get_tightbbox() for axis in figure.axes]
    for box in (*legends, title, *boxes):
        assert box.x0 >= page.x0 - 1
        assert box.x1 <= page.x1 + 1
        assert box.y0 >= page.y0 - 1
        assert box.y1 <= page.y1 + 1
    assert all(legend.y1 <= box.y0 + 1 for legend in legends for box in boxes)
    assert all(box.y1 <= title.y0 + 1 for box in boxes)
    for i, a in enumerate(boxes):
        assert not any(a.overlaps(b.shrunk(0.99, 0.99)) for b in boxes[i + 1 :])
    assert figure.get_figwidth() <= 7.6, "fits a page"
    assert isinstance(figure.table, pd.DataFrame)
    assert len(figure.table)
    if name != "cost_coverage":
        words = ["tiny on lines", "3 documents x 64 tokens"] + (["A: one", "B: other"] if difference else [])
        words += [] if name == "by_layer" else ["95 % interval over documents"]
        assert all(word in figure.get_suptitle() for word in words)


def test_every_public_figure_can_be_reached() -> None:
    for name in plot.__all__:
        assert callable(getattr(plot, name))


def test_the_style_file_is_what_figures_use() -> None:
    assert STYLE["savefig.dpi"] == 200
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "figures/style.mplstyle" in packaged["sparsity_lab"]
    figure = plot.recall(tiny_results())
    assert figure.axes[0].title.get_fontsize() == STYLE["axes.titlesize"] == 8
