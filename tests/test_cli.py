"""`experiments/recall.py` as people run it: what a run leaves and prints, what it reuses, and how it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import cli
import pandas as pd
import pyarrow.parquet as pq
import pytest

from sparsity_lab import console
from sparsity_lab.metrics import METRICS
from sparsity_lab.results import TALLY_SCHEMA, load

FOLDER = "results/recall/llama-pydoc-128"
POOL = [f"selection.candidate.{key}" for key in ("source_layer=0", "topk_blocks=4", "block_size=2")]
GRID = ["selection.topk=[4,8]", "selection.compress_ratio=[1,4]"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return cli.tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def first(tiny, tmp_path_factory):
    """A grid of four cells, run in a Python of its own; and where."""
    here = tmp_path_factory.mktemp("first")
    return cli.shell(*tiny, *GRID, cwd=here), here


@pytest.fixture
def run(tiny, tmp_path):
    """Run the command into `results` of a new folder."""
    return lambda *args, **options: cli.run(tmp_path, *tiny, f"results_dir={tmp_path}/results", *args, **options)


# --- a single run


def test_a_run_succeeds_and_says_where_its_results_are(first):
    done, _ = first
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == f"results: {FOLDER}"


def test_the_table_is_plain_text_when_piped(first):
    out = first[0].stdout
    assert "\x1b" not in out
    assert "\u2500" not in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("quest", "oracle", "recency", "random"))]
    assert sorted((r[0], r[1], r[2]) for r in rows) == sorted(
        (scorer, ratio, k) for scorer in ("quest", "oracle", "recency", "random") for ratio in "14" for k in "48"
    )
    assert out.splitlines()[-1].startswith("mean of 3 layers")


def test_the_results_folder(first):
    folder = first[1] / FOLDER
    assert cli.status(folder) == "complete"
    table = pq.read_table(folder / "tallies.parquet")
    assert table.schema.equals(TALLY_SCHEMA)
    assert table.num_rows > 0
    assert list((folder / "parts").glob("*")) == []
    summary = pd.read_csv(folder / "summary.csv")
    assert len(summary) == 16 * 3
    assert set(METRICS) <= set(summary)
    assert summary["documents"].eq(2).all()


def test_the_manifest(first):
    manifest = json.loads((first[1] / FOLDER / "manifest.json").read_text())
    assert manifest["schema"] == 1
    assert manifest["model"].keys() == {"name", "fingerprint", "dtype", "shape"}
    assert manifest["model"]["name"] == "llama"
    assert manifest["data"]["name"] == "pydoc"
    assert manifest["config"]["selection"]["topk"] == [4, 8]
    assert manifest["config"]["data"]["length"] == 128
    assert manifest["seed"] == 0
    assert {"python", "torch", "transformers", "sparsity_lab"} <= manifest["versions"].keys()
    assert manifest["device"]
    assert manifest["git"] == {} or manifest["git"].keys() == {"sha", "dirty"}
    assert len(manifest["cells"]) == 16
    assert manifest["failed_cells"] == []


def test_the_job_folder(first):
    job = first[1] / FOLDER / "jobs" / "single"
    assert {p.name for p in job.iterdir()} == {".hydra", "recall.log", "status", "summary.csv"}
    assert {p.name for p in (job / ".hydra").iterdir()} == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    assert cli.status(job) == "complete"
    assert "loading model llama" in (job / "recall.log").read_text()
    assert (job / "summary.csv").read_text() == (first[1] / FOLDER / "summary.csv").read_text()


def test_nothing_is_written_elsewhere(first):
    assert [p.name for p in first[1].iterdir()] == ["results"]


# --- running again


def test_what_is_there_is_not_computed_again(run, tmp_path):
    """The same line, a larger grid, more documents, other rows and seeds, one after the other in one folder."""
    folder = tmp_path / FOLDER
    assert run(*GRID).forwards == 2
    before = (folder / "tallies.parquet").read_bytes()

    again = run(*GRID)
    assert (again.code, again.forwards) == (0, 0)
    assert "2 of 2 documents are in the results already" in again.out
    assert (folder / "tallies.parquet").read_bytes() == before

    reordered = run("selection.topk=8", "selection.compress_ratio=4")
    assert reordered.forwards == 0
    assert len(table(reordered)) == 4
    assert (folder / "tallies.parquet").read_bytes() == before

    old = cli.tallies(folder)
    larger = run("selection.topk=[4,8,16]", "selection.compress_ratio=[1,4]")
    assert larger.forwards == 2
    assert len(table(larger)) == 24
    assert same_where_known(old, cli.tallies(folder))

    old = cli.tallies(folder)
    assert run(*GRID, "data.num_documents=3").forwards == 1
    assert same_where_known(old, cli.tallies(folder))
    assert cli.tallies(folder)["document"].nunique() == 3


def test_other_rows_and_seeds_do_not_mix(run, tmp_path):
    base = run()
    other = [run("measure.seed=1"), run("measure.rows=16"), run("measure.detail_rows=2"), run("data.seed=1")]
    assert [r.forwards for r in other] == [2, 2, 2, 2]
    assert len({r.out.split("scorer", 1)[1] for r in [base, *other]}) >= 4
    assert all(len(table(r)) == 4 for r in [base, *other])
    again = run()
    assert again.forwards == 0
    assert table(again) == table(base)
    # the folder holds them all, and tells them apart
    results = load(tmp_path / FOLDER)
    assert len(results.cells) == 5 * 4
    about = results.cell_frame()
    assert set(about["seed"]) == {0, 1}
    assert set(about["sampled_rows"]) == {16, 32}


def table(run: cli.Run) -> list[str]:
    """The rows of the printed table."""
    return [line for line in run.out.splitlines() if line.startswith(("quest", "oracle", "recency", "random"))]


def same_where_known(old: pd.DataFrame, new: pd.DataFrame) -> bool:
    keys = ["cell_id", "document", "layer", "bucket"]
    both = old[keys].merge(new, on=keys)
    pd.testing.assert_frame_equal(both[old.columns], old, check_exact=True)
    return True


# --- grids in one job


def grid_of(folder: Path) -> list[tuple]:
    """(ratio, k, source layer, blocks, block size) of the cells under test."""
    about = load(folder).cell_frame().query("scorer == 'quest'")
    pool = [f"candidate_{name}" for name in ("source_layer", "topk_blocks", "block_size")]
    found = about[["compress_ratio", "topk", *pool]].astype(object).where(lambda t: t.notna(), None)
    return sorted(found.itertuples(index=False, name=None), key=str)


def test_grid_in_an_experiment_file_of_ones_own(tiny, tmp_path):
    """Lists, and null beside a real source layer."""
    mine = tmp_path / "conf" / "experiment" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text(
        "# @package _global_\n"
        "experiment_name: mine\n"
        "selection:\n"
        "  topk: [2, 4]\n"
        "  compress_ratio: [1, 2]\n"
        "  candidate: {source_layer: [null, 0, 1], topk_blocks: 4, block_size: [2, 4]}\n"
    )
    base = [arg for arg in tiny if not arg.startswith("selection.")]  # those would beat the experiment
    args = [*base, f"results_dir={tmp_path}/results", "experiment=mine", "measure.envelope=false"]
    done = cli.run(tmp_path, *args, flags=["--config-dir", str(tmp_path / "conf")])
    assert (done.code, done.forwards) == (0, 2), done.err
    found = grid_of(tmp_path / "results/mine/llama-pydoc-128")
    pools = [(None, None, None), *((layer, 4, size) for layer in (0, 1) for size in (2, 4))]
    assert found == sorted(((r, k, *pool) for r in (1, 2) for k in (2, 4) for pool in pools), key=str)


def test_zipped_values_and_a_bad_point(run, tmp_path):
    """Matched budgets beside a point that cannot be: it is recorded with its reason, the rest is measured."""
    zipped = "selection.zipped=[{topk:8,compress_ratio:1},{topk:2,compress_ratio:4},{topk:0,compress_ratio:1}]"
    done = run(zipped, "measure.envelope=false")
    assert (done.code, done.forwards) == (0, 2), done.err
    assert grid_of(tmp_path / FOLDER) == [(1, 8, None, None, None), (4, 2, None, None, None)]
    assert "cell cannot be measured: selection.topk=0: must be at least 1" in done.out
    failed = load(tmp_path / FOLDER).manifest["failed_cells"]
    assert [(f["topk"], f["reason"]) for f in failed] == [(0, "selection.topk=0: must be at least 1")]


# --- bad input

OURS = [
    (["selection.topk=0"], "selection.topk=0: must be at least 1"),
    (["selection.topk=abc"], "selection.topk='abc': must be a whole number"),
    (["selection.topk=[]"], "selection.topk=[]: needs at least one value"),
    (["selection.compress_ratio=0"], "selection.compress_ratio=0: must be at least 1"),
    (["selection.compress_ratio=129"], "selection.compress_ratio=129: larger than the documents' 128 tokens"),
    ([*POOL, "selection.candidate.block_size=0"], "selection.candidate.block_size=0: must be at least 1"),
    ([*POOL, "selection.candidate.source_layer=9"], "candidate.source_layer=9: the model has layers 0 to 2"),
    ([*POOL, "selection.candidate.source_layer=2"], "candidate.source_layer=2: no measured layer after it"),
    ([*POOL, "selection.topk=8"], "may hold only 7 visible positions, fewer than selection.topk=8"),
    (POOL[:1], "selection.candidate.topk_blocks: needed for a two-level selection"),
    (["selection.exclude_window='false'"], "selection.exclude_window='false': must be true or false"),
    (["selection.share=head"], "selection.share='head': must be one of layer, kv_head"),
    (
        ["selection.zipped=[{topk:4,no_such:1}]"],
        "selection.no_such: no such field; there are candidate, compress_ratio",
    ),
    (["model.path=/nowhere/x"], "model.path=/nowhere/x: no such file or folder"),
    (["model.path=no/such"], "model.path=no/such: could not be loaded"),
    (["model.dtype=float7"], "dtype=float7: must be auto, float32, bfloat16 or float16"),
    (["model.device=tpu"], "device=tpu: not a torch device"),
    (["data=text"], "data.path: mandatory, but no value given"),
    (["data=text", "data.path={here}/binary.txt"], "binary.txt is not text (it has NUL bytes)"),
    (["data.shard=2", "data.num_shards=2"], "data.shard=2: must be below num_shards=2"),
    (["data.num_documents=99999"], "asked for num_documents=99999"),
    (["data.length=1000"], "data.length=1000: llama was made for at most 256 positions"),
    (["measure.rows=0"], "measure.rows=0: must be at least 1"),
    (["measure.layers=[7]"], "measure.layers=[7]: the model has attention layers [0, 1, 2]"),
    (["objective=accuracy"], "objective=accuracy: must be one of recall, coverage"),
    (["name=''"], "name='': must name a folder of its own"),
    (["scorer=random", "+scorer.depth=1"], "scorer.name=random: does not take the options {'depth': 1}"),
    (["scorer=quest", "scorer.head_reduction=max"], "scorer.head_reduction='max': must be one of softmax, logit"),
    (["scorer=lightning", "scorer.quant=fp3"], "quant='fp3': must be one of"),
    (["scorer=lightning", "scorer.weights=/nowhere"], "scorer.weights=/nowhere: no such file"),
    (["scorer=learned"], "scorer.weights=shipped: indexers come with sparsity_lab for smollm2 only, not for llama"),
    (["scorer=native"], "selection=native: model llama has no sparse attention of its own"),
]
HYDRAS = [
    (["scorer=no_such"], "no_such"),
    (["model=no_such"], "no_such"),
    (["selection.top_k=3"], "selection.top_k"),
    (["measure.checks=maybe"], "measure.checks"),
    (["measure.rows=abc"], "measure.rows"),
]


@pytest.mark.parametrize(("args", "message"), OURS, ids=lambda value: value[-1][:40] if isinstance(value, list) else "")
def test_bad_input_is_one_clear_line(args, message, run, tmp_path):
    """Told before anything is measured: in the last line printed, in the job's log and in its status."""
    (tmp_path / "binary.txt").write_bytes(b"\0\1\2" * 100)
    done = run(*(arg.format(here=tmp_path) if "{here}" in arg else arg for arg in args))
    assert done.code == 1
    assert done.forwards == 0
    assert message in done.last
    assert done.last.startswith("ValueError: ")
    (job,) = tmp_path.glob("results/**/jobs/single")
    assert cli.status(job) == f"failed: {done.last.removeprefix('ValueError: ')}"
    assert message in (job / "recall.log").read_text()
    assert list(tmp_path.rglob("tallies.parquet")) == []


@pytest.mark.parametrize(("args", "key"), HYDRAS, ids=lambda value: value[-1] if isinstance(value, list) else "")
def test_what_hydra_refuses_is_named(args, key, run, tmp_path):
    done = run(*args)
    assert done.code == 1
    assert key in done.err
    assert not (tmp_path / "results").exists()


def test_bad_input_is_told_in_words_and_the_stack_only_if_asked(tiny, tmp_path, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    command = [*tiny, f"results_dir={tmp_path}"]
    bad = ("selection.topk=0", "measure.rows=abc")
    ours, hydras = (cli.shell(*command, arg) for arg in bad)
    assert "Traceback" not in ours.stderr + hydras.stderr
    assert (ours.returncode, hydras.returncode) == (1, 1)
    assert ours.stderr.splitlines()[-1] == "ValueError: selection.topk=0: must be at least 1"
    assert hydras.stderr.splitlines()[-1] == "ConfigCompositionException: Error merging override measure.rows=abc"
    assert "could not be converted to Integer" in hydras.stderr
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert all("Traceback" in cli.shell(*command, arg).stderr for arg in bad)


def test_faults_keep_their_stack(capsys):
    for error in (RuntimeError("a fault"), ValueError("bad input"), KeyboardInterrupt()):
        console._in_words(type(error), error, None)
    assert capsys.readouterr().err.splitlines() == [
        "RuntimeError: a fault", "(HYDRA_FULL_ERROR=1 shows where)", "ValueError: bad input", "interrupted",
    ]  # fmt: skip


def test_a_bool_given_as_text_is_read_as_one(run, tmp_path):
    done = run("measure.envelope='false'")
    assert done.code == 0
    assert len(table(done)) == 1
    assert load(tmp_path / FOLDER).manifest["config"]["measure"]["envelope"] is False


@pytest.mark.parametrize(
    ("path", "name"),
    [("Qwen/Qwen2.5-0.5B", "Qwen2.5-0.5B"), ("a/b.gguf", "b"), ("a/llama/", "llama"), (".", Path.cwd().name)],
)
def test_default_names_of_models(path, name):
    from sparsity_lab.config import _basename

    assert _basename(path) == name


def test_a_folder_that_cannot_be_written(run, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = run(f"results_dir={blocked}/x")
    assert done.code == 1
    assert str(blocked) in done.last


def test_help_and_config_need_no_model(run):
    shown = run(flags=["--help"])
    assert shown.code == 0
    assert "selection" in shown.out
    composed = run(flags=["--cfg", "job"])
    assert composed.code == 0
    assert "experiment_name: recall" in composed.out
    assert os.environ.get("HYDRA_FULL_ERROR") is None
