"""The training figure and the table behind it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from scripts import run

from sparsity_lab.figures.training import draw_training, finals, find_runs, training_table


def write_run(folder: Path, *, heads: int = 8, gain: float = 0.0, ratios: tuple[int, ...] = (1,)) -> Path:
    """A log with two layers, evaluated at steps 0, 10 and 20; layer 1 is worse by 0.1."""
    folder.mkdir(parents=True)
    rows = [
        {
            "step": step, "layer": layer, "compress_ratio": ratio, "held_out": "x",
            "loss": None if step == 0 else 1 / step, "relative_coverage": 0.5 + step / 100 - layer / 10 + gain,
        }
        for step in (0, 10, 20) for layer in (0, 1) for ratio in ratios
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(folder / "training.csv", index=False)
    identity = {"indexer": {"index_n_heads": heads}, "recipe": {"ratios": list(ratios)}, "data": {"length": heads}}
    (folder / "manifest.json").write_text(json.dumps({"identity": identity}))
    return folder


def test_the_table_names_what_differs(tmp_path):
    for heads in (4, 2):
        write_run(tmp_path / f"heads-{heads}", heads=heads, gain=heads / 100)
    runs = find_runs([tmp_path])
    assert [run.name for run in runs] == ["heads-2", "heads-4"]
    table = training_table(runs)
    assert table.attrs["differ"] == ["indexer.index_n_heads"]
    assert table.groupby("run")["indexer.index_n_heads"].first().to_dict() == {"heads-2": 2, "heads-4": 4}
    last = finals(table).set_index("run")
    assert last["step"].eq(20).all()
    assert last.loc["heads-4", "relative_coverage"] == pytest.approx(0.7 - 0.05 + 0.04)
    assert last.loc["heads-2", "worst"] == pytest.approx(0.7 - 0.1 + 0.02)


def test_one_run_has_a_curve_a_ratio(tmp_path):
    table = training_table([write_run(tmp_path / "one", ratios=(1, 4))])
    figure = draw_training(table)
    loss, coverage = figure.axes
    assert [line.get_label() for line in coverage.lines] == ["1", "4"]
    assert list(loss.lines[0].get_xdata()) == [10, 20]
    assert list(coverage.lines[0].get_ydata()) == pytest.approx([0.45, 0.55, 0.65])


def test_several_runs_have_a_curve_each_and_their_ends(tmp_path):
    for heads in (1, 2, 16):
        write_run(tmp_path / str(heads), heads=heads, gain=heads / 100)
    figure = draw_training(training_table(find_runs([tmp_path])))
    assert len(figure.axes) == 3
    ends = figure.axes[2]
    assert ends.get_xlabel() == "index n heads"
    assert [text.get_text() for text in ends.get_xticklabels()] == ["1", "2", "16"]
    assert list(ends.lines[0].get_ydata()) == pytest.approx([0.66, 0.67, 0.81])


def test_what_cannot_be_drawn(tmp_path):
    with pytest.raises(ValueError, match="no distillation here"):
        find_runs([tmp_path])
    for heads in range(8):
        write_run(tmp_path / "many" / str(heads), heads=heads)
    with pytest.raises(ValueError, match="8 runs, more than 7"):
        draw_training(training_table(find_runs([tmp_path / "many"])))
    (tmp_path / "many" / "3" / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match=r"3: not a distillation that can be read"):
        training_table(find_runs([tmp_path / "many"]))
    (tmp_path / "many" / "3" / "manifest.json").write_text('{"schema": 0, "identity": {"data": {}}}')
    with pytest.raises(ValueError, match=r"3: schema=0: this version reads schema 1"):
        training_table(find_runs([tmp_path / "many"]))
    only_steps = write_run(tmp_path / "only-steps")
    (only_steps / "training.csv").write_text("step\n1\n")
    with pytest.raises(ValueError, match=r"training\.csv lacks compress_ratio, held_out, layer"):
        training_table([only_steps])


def test_the_script_says_what_is_wrong_in_one_line(tmp_path):
    done = run("plot_training.py", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("plot_training.py: ")
    assert done.stderr.count("\n") == 1
