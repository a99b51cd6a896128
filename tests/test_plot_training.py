"""The figures of distillations and pretrainings, and the tables behind them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest
from scripts import run

from sparsity_lab.figures.pretraining import draw_pretraining, pretraining_table, save_small, spans
from sparsity_lab.figures.training import draw_training, finals, find_runs, table_of_runs, training_table
from sparsity_lab.models.deepseek_v41.checkpoint import SHIPPED


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
    with pytest.raises(ValueError, match="no distillation or pretraining here"):
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


def write_pretraining(folder: Path, stages: list[str], parts: tuple[tuple[str, int], ...] = (), **more: object) -> Path:
    """A row every 10 steps of 100 tokens. parts: (what was trained, steps) of trainings one after the other."""
    folder.mkdir(parents=True)
    rows = [
        {
            "step": 10 * i, "tokens": 1000 * i, "stage": stage, "loss": 6 - i / 10, "loss_dense": 6 - i / 20,
            "bits_dense": 2 - i / 10, "bits_sparse": 2.1 - i / 10 if stage == "sparse" else None, "coverage_2": i / 20,
            "coverage_4": i / 30,
        }
        for i, stage in enumerate(stages, start=1)
    ]  # fmt: skip
    pd.DataFrame(rows).assign(**more).to_csv(folder / "training.csv", index=False)
    record = None
    for what, steps in parts:
        record = {"training": {"steps": steps}, "config": {"recipe": {"train": what}}, "start": record}
    if record is not None:
        (folder / "record.json").write_text(json.dumps(record))
    return folder


def test_a_pretraining_shows_its_losses_and_stages(tmp_path):
    run = write_pretraining(tmp_path / "run", ["dense", "dense", "sparse", "pool"])
    pd.DataFrame({"step": range(40), "loss": 5.0}).to_csv(run / "losses.csv", index=False)
    table, draw = table_of_runs(find_runs([tmp_path]))
    assert spans(table) == [("dense", 0, 2000), ("sparse", 2000, 3000), ("pool", 3000, 4000)]
    loss, held_out, coverage = draw(table).axes
    steps, training, dense = loss.lines
    assert list(steps.get_xdata()) == pytest.approx([100 * i for i in range(1, 41)])
    assert list(training.get_ydata()) == pytest.approx([5.9, 5.8, 5.7, 5.6])
    assert list(dense.get_xdata()) == [1000, 2000, 3000, 4000]
    assert [line.get_label() for line in held_out.lines] == ["dense", "sparse"]
    assert list(held_out.lines[1].get_ydata()) == pytest.approx([math.nan, math.nan, 1.8, math.nan], nan_ok=True)
    assert [line.get_label() for line in coverage.lines] == ["2", "4"]
    shades = [patch.get_facecolor() for patch in loss.patches]
    assert len(shades) == len(set(shades)) == 3
    (run / "losses.csv").write_text("step,loss\n0,5\n")
    assert pretraining_table(run).attrs["losses"] is None, "of another part"


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ((("all", 30), ("indexers", 20)), ["dense", "sparse", "pool", "indexers", "indexers"]),
        ((("all", 20), ("indexers", 10), ("all", 20)), ["dense", "sparse", "indexers", "dense", "sparse"]),
        ((("all", 500), ("indexers", 50)), ["indexers"] * 5),  # the log is of the last one alone
        ((("indexers", 30), ("all", 20), ("indexers", 70)), [*["indexers"] * 3, "dense", "sparse"]),  # or of the first
        ((("all", 500), ("indexers", 70)), ["dense", "sparse", "pool", "dense", "sparse"]),  # or of none of them
        ((("all", 50),), ["dense", "sparse", "pool", "dense", "sparse"]),
    ],
)
def test_trainings_one_after_the_other(tmp_path, parts, wanted):
    run = write_pretraining(tmp_path / "run", ["dense", "sparse", "pool", "dense", "sparse"], parts)
    table = pretraining_table(run)
    assert list(table["stage"]) == wanted
    assert len(draw_pretraining(table).axes[0].patches) == len(spans(table))


def test_pretrainings_that_cannot_be_drawn(tmp_path):
    run = write_pretraining(tmp_path / "a" / "run", ["dense", "dense"])
    write_run(tmp_path / "a" / "distilled")
    bad = {
        "do not count on": {"tokens": [2000, 1000]},
        "training.csv lacks bits_dense": {},
    }
    for number, (words, changes) in enumerate(bad.items()):
        other = write_pretraining(tmp_path / str(number), ["dense", "dense"], **changes)
        if not changes:
            pd.read_csv(other / "training.csv").drop(columns="bits_dense").to_csv(other / "training.csv", index=False)
        told = run_script(other, tmp_path / "out")
        assert words in told
        assert str(other) in told
    (run / "record.json").write_text('{"training": {"steps": 20}}')
    assert "not the record of a training" in run_script(run, tmp_path / "out")
    (run / "record.json").write_text("{")
    assert "record.json: damaged" in run_script(run, tmp_path / "out")
    assert "2 trainings, " in run_script(tmp_path / "a", tmp_path / "out")
    (run / "record.json").unlink()
    (run / "training.csv").write_text((run / "training.csv").read_text().splitlines()[0])
    assert "no evaluation yet" in run_script(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def run_script(folder: Path, out: Path) -> str:
    """What the script says of a folder that it refuses, in one line."""
    done = run("plot_training.py", folder, "--out", out)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    return done.stderr


def test_the_shipped_model_is_drawn(tmp_path):
    done = run("plot_training.py", SHIPPED, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".pdf", ".png", ".svg"]
    card = tmp_path / "card.png"
    save_small(draw_pretraining(pretraining_table(SHIPPED)), card)
    assert 5_000 < card.stat().st_size < 50_000
