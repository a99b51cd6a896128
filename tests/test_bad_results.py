"""Every script of analysis/ on results that it cannot draw: one line that names the folder, no traceback, no file."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import tiny_ablation
from scripts import ANALYSIS, run
from test_plot_training import write_run
from tiny_results import tiny_results

SCRIPTS = sorted(path.name for path in ANALYSIS.glob("[!_]*.py"))
OF_ABLATIONS = {"plot_source.py", "plot_reuse.py", "plot_attribution.py"}
OF_CELLS = {name for name in SCRIPTS if name.startswith("plot_")} - OF_ABLATIONS
OF_CELLS -= {"plot_training.py", "plot_evaluate.py", "plot_free_running.py"}


def arguments(script: str, folder: Path) -> list[object]:
    """The script's arguments for one folder of results."""
    if script == "plot_free_running.py":
        return [folder, folder]
    return ["--recall", folder, "--evaluate", folder] if script == "plot_proxy.py" else [folder]


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What is wrong -> a folder like that."""
    here = tmp_path_factory.mktemp("bad")
    out = {"missing": here / "missing", "a file": here / "file", "an empty folder": here / "empty"}
    out["a file"].write_text("")
    out["an empty folder"].mkdir()
    for name in ("begun", "failed", "damaged tallies", "tallies of another version", "tallies without cells"):
        out[name] = tiny_results(topk=(16,)).save(here / name.replace(" ", "-"))
    for name, status in (("begun", "running"), ("failed", "failed: no memory")):
        (out[name] / "tallies.parquet").unlink()
        (out[name] / "status").write_text(status)
    (out["damaged tallies"] / "tallies.parquet").write_bytes(b"PAR1 no")
    pd.DataFrame({"x": [1]}).to_parquet(out["tallies of another version"] / "tallies.parquet")
    edit(out["tallies without cells"], cells={})
    for name, text in {
        "a damaged manifest": "{",
        "no manifest of ours": '{"name": "other"}',
        "an old schema": '{"schema": 0, "cells": {}}',
        "foreign cells": '{"schema": 1, "cells": {"a": {"model": "x"}}}',
        "a foreign ablation": '{"identity": {"ablation": {"k": 1}}}',
        "a recording": '{"recording_schema": 1, "documents": {}}',
    }.items():
        out[name] = here / name.replace(" ", "-")
        out[name].mkdir()
        (out[name] / "manifest.json").write_text(text)
    run = write_run(here / "an-unreadable-run")
    (run / "manifest.json").write_text("[]")
    return {**out, "an unreadable run": run}


@pytest.fixture(scope="module")
def ablation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "ablation"
    tiny_ablation.make(folder, count=1)
    return folder


def edit(folder: Path, **fields: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | fields))


@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_results_are_told_in_one_line(script: str, bad: dict[str, Path], tmp_path: Path) -> None:
    for what, folder in bad.items():
        before = sorted(folder.rglob("*"))
        done = run(script, *arguments(script, folder), "--out", tmp_path / "out")
        assert (done.returncode, done.stdout) == (2, ""), what
        assert len(done.stderr.splitlines()) == 1, (what, done.stderr)
        assert done.stderr.startswith(f"{script}: "), what
        assert folder.name in done.stderr, (what, done.stderr)
        assert "Traceback" not in done.stderr, what
        assert sorted(folder.rglob("*")) == before, what
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("script", sorted(OF_CELLS))
def test_results_of_another_experiment_are_named(script: str, ablation: Path, tmp_path: Path) -> None:
    done = run(script, *arguments(script, ablation), "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "ablation" in done.stderr


@pytest.mark.parametrize("script", sorted(OF_ABLATIONS))
def test_measured_cells_are_no_ablation(script: str, tmp_path: Path) -> None:
    done = run(script, tiny_results(topk=(16,)).save(tmp_path / "cells"))
    assert done.returncode == 2
    assert "holds a measurement (experiments/recall.py); this needs an ablation" in done.stderr


def test_unfinished_results_are_drawn_and_said(tmp_path: Path) -> None:
    folder = tiny_results(topk=(16,), ratios=(1,)).save(tmp_path / "cells")
    (folder / "status").write_text("running\n")
    edit(folder, failed_cells=[{"topk": 9, "reason": "no such k"}])
    done = run("plot_recall.py", folder)
    assert done.returncode == 0
    assert len(done.stdout.split()) == 4
    assert done.stderr.splitlines() == [
        f"plot_recall.py: note: {folder}: running; shown is what was measured so far",
        f"plot_recall.py: note: {folder}: 1 failed cell (the first: no such k)",
    ]


@pytest.mark.parametrize(
    ("script", "made", "words"),
    [
        ("plot_levels.py", {}, "no cell of these results has a candidate pool"),
        ("plot_family.py", {"ratios": (1,)}, "nothing was measured at two values"),
        ("plot_heads.py", {"undefined": ["worst_head_coverage"]}, "set measure.detail_rows"),
        ("plot_coverage.py", {"saturated": {(1, 16): 10, (4, 16): 10}}, "every row is saturated"),
        ("plot_density.py", {"saturated": {(1, 16): 10, (4, 16): 10}}, "every row is saturated"),
        ("plot_position.py", {"saturated": {(1, 16): 10, (4, 16): 10}}, "every row is saturated"),
        ("plot_layers.py", {"saturated": {(1, 16): 10, (4, 16): 10}}, "every row is saturated"),
        ("plot_scorers.py", {"saturated": {(1, 16): 10, (4, 16): 10}}, "every row is saturated"),
    ],
)
def test_no_figure_is_empty(script: str, made: dict[str, object], words: str, tmp_path: Path) -> None:
    folder = tiny_results(**{"topk": (16,), **made}).save(tmp_path / "cells")
    done = run(script, folder)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (folder / "figures").exists()


def test_one_flag_compares_two_runs(tmp_path: Path) -> None:
    kwargs = {"topk": (16,), "ratios": (1,), "pools": (None, (0, 4, 8))}
    a = tiny_results(**kwargs).save(tmp_path / "a")
    b = tiny_results(scorers=("mean_key",), **kwargs).save(tmp_path / "b")
    done = run("plot_coverage.py", a, "--against", b, "--where", "candidate_source_layer.isnull()")
    table = pd.read_csv(done.stdout.split()[3])
    assert table["coverage"].tolist() == pytest.approx([0.1])
    assert table["scorer"].tolist() == ["quest \u2212 mean_key"]
    done = run("plot_levels.py", a, "--against", tmp_path / "nowhere")
    assert done.returncode == 2
    assert "nowhere: no results here" in done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) > 5
