"""Sweeps: the fused launcher against Hydra's own, what each job is left with, and launchers that start processes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from functools import partial
from pathlib import Path

import cli
import pandas as pd
import pytest

from sparsity_lab.results import collect, load

FOLDER = "results/recall/llama-pydoc-128"
SWEEP = ["selection.topk=4,8", "selection.compress_ratio=1,4"]
BAD = "selection.topk=4,0,8"


def have(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return cli.tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def sweep(tiny, tmp_path):
    """Run a sweep into `results` of a new folder."""
    base = [*tiny, f"results_dir={tmp_path}/results"]
    return lambda *args, **options: cli.run(tmp_path, *base, *args, flags=["-m"], **options)


def jobs(folder: Path) -> list[Path]:
    return sorted((folder / "jobs").glob("[0-9]*"), key=lambda path: int(path.name))


# --- jobs that share a pass


@pytest.fixture(scope="module")
def fused(tiny, tmp_path_factory):
    """Four jobs that share a pass, with a callback that sees what they return."""
    here = tmp_path_factory.mktemp("fused")
    watch = ["+hydra.callbacks.watch._target_=cli.Returns", f"+hydra.callbacks.watch.file={here}/returns"]
    return cli.run(here, *tiny, *SWEEP, f"results_dir={here}/results", *watch, flags=["-m"]), here


def test_one_pass_serves_all_jobs(fused):
    done, here = fused
    assert done.code == 0, done.err
    assert "4 jobs share 1 pass" in done.out
    assert done.forwards == 2  # one a document
    assert done.out.count("loading model") == 1
    assert cli.status(here / FOLDER) == "complete"


def test_every_job_has_its_own_folder(fused):
    found = jobs(fused[1] / FOLDER)
    assert [job.name for job in found] == ["0", "1", "2", "3"]
    for job, (k, ratio) in zip(found, [(4, 1), (4, 4), (8, 1), (8, 4)], strict=True):
        assert {p.name for p in job.iterdir()} == {".hydra", "recall.log", "status", "summary.csv"}
        assert cli.status(job) == "complete"
        overrides = (job / ".hydra" / "overrides.yaml").read_text()
        assert f"- selection.topk={k}\n" in overrides
        assert f"- selection.compress_ratio={ratio}\n" in overrides
        summary = pd.read_csv(job / "summary.csv")
        assert set(summary["topk"]) == {k}
        assert set(summary["compress_ratio"]) == {ratio}
        assert sorted(set(summary["scorer"])) == ["oracle", "quest", "random", "recency"]
        assert len(summary) == 4 * 3


def test_every_job_prints_its_table(fused):
    assert fused[0].out.count("mean of 3 layers") == 4


def test_sweepers_and_callbacks_get_the_objective(fused):
    _, here = fused
    returned = [json.loads(line) for line in (here / "returns").read_text().splitlines()]
    assert [number for number, _ in returned] == [0, 1, 2, 3]
    for job, (_, value) in zip(jobs(here / FOLDER), returned, strict=True):
        summary = pd.read_csv(job / "summary.csv").query("scorer == 'quest'")
        assert value == pytest.approx(summary["coverage"].mean(), abs=1e-5)


def test_the_same_sweep_again_computes_nothing(fused, tiny):
    _, here = fused
    before = (here / FOLDER / "tallies.parquet").read_bytes()
    again = cli.run(here, *tiny, *SWEEP, f"results_dir={here}/results", flags=["-m"])
    assert (again.code, again.forwards) == (0, 0)
    assert "2 of 2 documents are in the results already" in again.out
    assert (here / FOLDER / "tallies.parquet").read_bytes() == before


@pytest.mark.slow
def test_stock_launcher_gives_the_same_bytes(fused, sweep, tmp_path):
    done = sweep(*SWEEP, "hydra/launcher=basic")
    assert done.code == 0, done.err
    assert done.forwards == 8  # a pass a job
    basic, ours = tmp_path / FOLDER, fused[1] / FOLDER
    assert (basic / "tallies.parquet").read_bytes() == (ours / "tallies.parquet").read_bytes()
    assert (basic / "summary.csv").read_text() == (ours / "summary.csv").read_text()
    for one, other in zip(jobs(basic), jobs(ours), strict=True):
        assert (one / "summary.csv").read_text() == (other / "summary.csv").read_text()
        assert {p.name for p in one.iterdir()} == {p.name for p in other.iterdir()}


def test_batches_of_a_sweeper_share_the_model(sweep, tmp_path):
    """A sweeper like Optuna's launches one batch after the other."""
    done = sweep(*SWEEP, "hydra.sweeper.max_batch_size=3")
    assert (done.code, done.forwards) == (0, 4), done.err
    assert done.out.count("loading model") == 1
    assert [job.name for job in jobs(tmp_path / FOLDER)] == ["0", "1", "2", "3"]
    assert [set(pd.read_csv(job / "summary.csv")["topk"]) for job in jobs(tmp_path / FOLDER)] == [{4}, {4}, {8}, {8}]


@pytest.mark.slow
def test_passes_differ_by_seed_and_data(sweep, tmp_path):
    done = sweep("selection.topk=4,8", "measure.seed=0,1", "data=pydoc,stdlib")
    assert done.code == 0, done.err
    assert "8 jobs share 4 passes" in done.out
    assert done.forwards == 8
    assert done.out.count("loading model") == 1
    for data in ("pydoc", "stdlib"):
        results = load(tmp_path / f"results/recall/llama-{data}-128")
        assert set(results.cell_frame()["seed"]) == {0, 1}
        assert set(results.cell_frame()["topk"]) == {4, 8}


def test_scorers_with_other_options_are_kept_apart(sweep, tmp_path):
    done = sweep("scorer=lightning", "scorer.seed=0,1", "scorer.relu=true,false")
    assert (done.code, done.forwards) == (0, 2), done.err
    names = ["lightning", "lightning[relu=False]", "lightning[seed=1]", "lightning[seed=1, relu=False]"]
    coverage = {}
    for job in jobs(tmp_path / FOLDER):
        summary = pd.read_csv(job / "summary.csv")
        (name,) = set(summary["scorer"]) - {"oracle", "recency", "random"}
        coverage[name] = tuple(summary.query("scorer == @name")["coverage"])
    assert sorted(coverage) == sorted(names)
    assert len(set(coverage.values())) == 4


def test_a_list_inside_a_sweep(sweep, tmp_path):
    done = sweep("selection.topk=[2,4],[4,8]", "selection.compress_ratio=1,4")
    assert (done.code, done.forwards) == (0, 2), done.err
    wanted = [{2, 4}, {2, 4}, {4, 8}, {4, 8}]
    assert [set(pd.read_csv(job / "summary.csv")["topk"]) for job in jobs(tmp_path / FOLDER)] == wanted


# --- jobs that fail


def check_one_failed(done: cli.Run, folder: Path, message: str, *, bad: int = 1) -> None:
    assert done.code == 1
    assert message in done.last
    for number, job in enumerate(jobs(folder)):
        log = (job / "recall.log").read_text() if (job / "recall.log").exists() else ""
        if number == bad:
            assert cli.status(job) == f"failed: {done.last.removeprefix('ValueError: ')}"
            assert f"[ERROR] - {done.last.removeprefix('ValueError: ')}" in log
            assert not (job / "summary.csv").exists()
        else:
            assert cli.status(job) == "complete"
            assert "ERROR" not in log
            assert (job / "summary.csv").exists()


def test_a_value_out_of_range_fails_alone(sweep, tmp_path):
    done = sweep(BAD)
    check_one_failed(done, tmp_path / FOLDER, "selection.topk=0: must be at least 1")
    assert done.forwards == 2
    assert cli.status(tmp_path / FOLDER) == "complete"


def test_a_cell_that_the_model_does_not_allow_fails_alone(sweep, tmp_path):
    pool = ["selection.candidate.topk_blocks=4", "selection.candidate.block_size=2"]
    done = sweep("selection.candidate.source_layer=0,9,1", *pool)
    check_one_failed(done, tmp_path / FOLDER, "selection.candidate.source_layer=9: the model has layers 0 to 2")
    assert done.forwards == 2
    (failed,) = load(tmp_path / FOLDER).manifest["failed_cells"]
    assert failed["candidate_source_layer"] == 9
    assert failed["reason"] in done.last


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["scorer=lightning", "scorer.quant=none,fp3,fp8_ue8m0"], "quant='fp3': must be one of"),
        (
            ["scorer=quest", "scorer.head_reduction=softmax,max,logit"],
            "scorer.head_reduction='max': must be one of softmax, logit",
        ),
    ],
    ids=["indexer", "baseline"],
)
def test_a_scorer_that_cannot_be_built_fails_alone(args, message, sweep, tmp_path):
    done = sweep(*args)
    check_one_failed(done, tmp_path / FOLDER, message)
    assert done.forwards == 2


def test_every_job_is_told_its_own_reason(sweep, tmp_path):
    """Also when no job of the pass can be measured."""
    pool = ["selection.candidate.topk_blocks=4", "selection.candidate.block_size=2"]
    done = sweep("selection.candidate.source_layer=8,9", *pool)
    assert (done.code, done.forwards) == (1, 0)
    found = [cli.status(job) for job in jobs(tmp_path / FOLDER)]
    wanted = "failed: selection.candidate.source_layer={}: the model has layers 0 to 2"
    assert found == [wanted.format(8), wanted.format(9)]


@pytest.mark.parametrize("launcher", ["fused", "basic"])
def test_a_missing_value_fails_its_job(launcher, sweep, tmp_path):
    done = sweep("data=pydoc,text", f"hydra/launcher={launcher}")
    assert done.code == 1
    assert done.last == "ValueError: data.path: mandatory, but no value given"
    assert cli.status(tmp_path / FOLDER / "jobs/0") == "complete"
    assert cli.status(tmp_path / "results/recall/llama-text-128/jobs/1").startswith("failed: data.path: mandatory")


def test_a_pass_that_fails_is_run_once(sweep, tmp_path):
    """All its jobs are told; the other pass is not touched."""
    done = sweep(*SWEEP, prepare=cli.break_attention)
    assert (done.code, done.forwards) == (1, 1)
    assert done.last.endswith("layer 0: attention rebuilt differs")
    for folder in (tmp_path / FOLDER, *jobs(tmp_path / FOLDER)):
        assert cli.status(folder) == "failed: layer 0: attention rebuilt differs"
    assert len(jobs(tmp_path / FOLDER)) == 4


def test_a_model_that_is_not_there_is_looked_for_once(sweep, tiny, tmp_path):
    there = next(arg for arg in tiny if arg.startswith("model.path="))
    done = sweep(f"{there},/nowhere/llama", "selection.topk=4,8")
    assert (done.code, done.forwards) == (1, 2)
    assert done.out.count("loading model") == 2
    found = [cli.status(job) for job in jobs(tmp_path / FOLDER)]
    assert found == ["complete"] * 2 + ["failed: model.path=/nowhere/llama: no such file or folder"] * 2


def test_ctrl_c_stops_a_sweep_that_can_go_on_later(sweep, tiny, tmp_path):
    args = [*tiny, f"results_dir={tmp_path}/results", "data.num_documents=4", *SWEEP]
    work = cli.start(tmp_path, *args, flags=["-m"], prepare=partial(cli.slowly, 0.5))
    cli.wait_for(lambda: work.forwards >= 2)
    os.kill(work.process.pid, signal.SIGINT)
    done = work.finish(20)
    assert done.code != 0
    assert cli.status(tmp_path / FOLDER) == "interrupted"
    assert jobs(tmp_path / FOLDER) == []
    rest = sweep("data.num_documents=4", *SWEEP)
    assert (rest.code, rest.forwards) == (0, 4 - (done.forwards - 1))


# --- launchers that start processes


@pytest.mark.slow
@have("hydra_plugins.hydra_joblib_launcher")
def test_joblib_over_shards_and_cells(tiny, tmp_path):
    """Two processes write two folders; merged they are one run, bit for bit. A job that fails does so alone."""
    here = [*tiny, "data.num_documents=4"]
    spread = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "data.shard=0,1", "data.num_shards=2"]
    shards = f"results_dir={tmp_path}/shards/${{data.shard}}"
    done = cli.shell("-m", *here, *spread, shards, "selection.topk=4,0,8")
    assert done.returncode == 1
    reason = "selection.topk=0: must be at least 1"
    assert reason in done.stderr
    for shard in range(2):
        folder = tmp_path / f"shards/{shard}/recall/llama-pydoc-128"
        assert [cli.status(job) for job in jobs(folder)] == ["complete", f"failed: {reason}", "complete"]
        assert cli.status(folder) == "complete"
    whole = cli.run(tmp_path, *here, "selection.topk=[4,8]", f"results_dir={tmp_path}/whole")
    assert whole.forwards == 4
    merged, one = collect(tmp_path / "shards"), collect(tmp_path / "whole")
    assert merged.cells == one.cells
    cli.assert_same_tallies(merged.tallies, one.tallies)


@pytest.mark.slow
@have("hydra_plugins.hydra_submitit_launcher")
def test_submitit_over_shards(tiny, tmp_path):
    """Two processes fill one folder at the same time."""
    here = [*tiny, "data.num_documents=4", "selection.topk=[4,8]"]
    spread = ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5", "data.shard=0,1", "data.num_shards=2"]
    done = cli.shell("-m", *here, *spread, f"results_dir={tmp_path}/results")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / FOLDER
    assert [cli.status(path) for path in (folder, *jobs(folder))] == ["complete"] * 3
    cli.run(tmp_path, *here, f"results_dir={tmp_path}/whole")
    whole = tmp_path / "whole/recall/llama-pydoc-128"
    assert (folder / "tallies.parquet").read_bytes() == (whole / "tallies.parquet").read_bytes()
    assert (folder / "summary.csv").read_text() == (whole / "summary.csv").read_text()


@pytest.mark.slow
@have("hydra_plugins.hydra_ray_launcher")
def test_ray_over_shards(tiny, tmp_path):
    here = [*tiny, "data.num_documents=4", f"results_dir={tmp_path}/results"]
    spread = ["hydra/launcher=ray", "hydra.launcher.ray.init.num_cpus=2", "data.shard=0,1", "data.num_shards=2"]
    done = cli.shell("-m", *here, *spread)
    assert done.returncode == 0, done.stderr
    cli.run(tmp_path, *tiny, "data.num_documents=4", f"results_dir={tmp_path}/whole")
    cli.assert_same_tallies(collect(tmp_path / "results").tallies, collect(tmp_path / "whole").tallies)


# --- sweepers


@have("hydra_plugins.hydra_optuna_sweeper")
def test_optuna_finds_the_larger_budget(sweep, tmp_path):
    search = ["hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", "hydra.sweeper.n_trials=4"]
    done = sweep(*search, "selection.topk=choice(2,8)")
    assert done.code == 0, done.err
    assert "selection.topk: 8" in next(tmp_path.rglob("optimization_results.yaml")).read_text()


def test_dry_run_measures_nothing(sweep, tmp_path):
    done = sweep(*SWEEP, "dry_run=true")
    assert (done.code, done.forwards) == (0, 0)
    assert "4 jobs, 1 passes" in done.out
    assert list(tmp_path.rglob("tallies.parquet")) == []
