"""experiments/evaluate.py: sweeps, going on, shards, dry runs, and what it says to bad input."""

from __future__ import annotations

import os
import re
import signal
from functools import partial

import cli
import pandas as pd
import pytest
from hydra import compose, initialize_config_dir

from sparsity_lab import schemas
from sparsity_lab.evaluation.job import read_job
from sparsity_lab.evaluation.summary import load, merge

SCRIPT = cli.ROOT / "experiments" / "evaluate.py"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return [*cli.tiny(tmp_path_factory.mktemp("model")), "evaluation=likelihood"]


def evaluate(folder, *args, **options):
    return cli.run(folder, f"results_dir={folder}", "name=run", *args, script=SCRIPT, **options)


def test_a_sweep_shares_dense_runs_and_goes_on(tmp_path, tiny):
    done = evaluate(tmp_path, *tiny, "selection.topk=4,8", "scorer=quest,recency", flags=["-m"])
    assert done.code == 0, done.err
    # check_head, then dense and 4 cells for each of 2 documents; a sparse forward is one of the dense model's
    assert done.forwards == 1 + 2 * 5
    folder = tmp_path / "evaluate" / "run"
    found = load(folder)
    assert len(found.frame()) == 4
    assert pd.read_csv(folder / "summary.csv")["documents"].tolist() == [2] * 4
    assert len(pd.read_csv(folder / "jobs" / "2" / "summary.csv")) == 1
    assert cli.status(folder) == cli.status(folder / "jobs" / "2") == "complete"
    assert "dense perplexity" in done.out
    again = evaluate(tmp_path, *tiny, "selection.topk=[4,8,16]", "scorer=quest")
    assert again.forwards == 1 + 2 * 2
    assert "quest" in again.out
    assert "recency" not in again.out
    assert len(load(folder).frame()) == 5


def test_shards_in_folders_of_their_own_are_the_whole(tmp_path, tiny):
    for shard in (0, 1):
        options = ["data.num_shards=2", f"data.shard={shard}", f"experiment_name=shard{shard}"]
        assert evaluate(tmp_path, *tiny, *options).code == 0
    assert evaluate(tmp_path, *tiny).code == 0
    parts = merge([load(tmp_path / f"shard{shard}" / "run") for shard in (0, 1)])
    pd.testing.assert_frame_equal(parts.frame(), load(tmp_path / "evaluate" / "run").frame())


def test_an_interrupted_run_says_how_far_it_came(tmp_path, tiny):
    args = [f"results_dir={tmp_path}", "name=run", *tiny, "selection.topk=[4,8]", "scorer=quest"]
    work = cli.start(tmp_path, *args, script=SCRIPT, prepare=partial(cli.slowly, 0.5))
    cli.wait_for(lambda: work.forwards >= 1 + 3 + 1)  # check_head, the first document, and the second's dense has begun
    os.kill(work.process.pid, signal.SIGINT)
    assert work.finish(20).code != 0
    folder = tmp_path / "evaluate" / "run"
    assert cli.status(folder) == "interrupted: 1 of 2 documents and tasks are finished"
    assert pd.read_csv(folder / "summary.csv")["documents"].min() == 1
    done = cli.shell(str(folder), script=cli.ROOT / "analysis" / "plot_evaluate.py")
    assert done.returncode == 0
    assert f"note: {folder}: interrupted: 1 of 2 documents and tasks are finished; shown is" in done.stderr
    assert evaluate(tmp_path, *tiny, "selection.topk=[4,8]", "scorer=quest").code == 0
    assert cli.status(folder) == "complete"


def test_bounds_and_a_dry_run(tmp_path, tiny):
    told = evaluate(tmp_path, *tiny, "measure.envelope=true", "selection.topk=[4,8]", "dry_run=true")
    assert told.code == 0
    assert told.forwards == 0
    assert "8 cells: 18 forwards" in told.out
    assert "no forward serves two cells" in told.out
    swept = evaluate(tmp_path, *tiny, "selection.topk=4,8", "dry_run=true", flags=["-m"])
    assert "2 cells: 6 forwards" in swept.out
    assert "2 jobs" in swept.out


def test_an_experiment_file(tmp_path, tiny):
    """As search_sources and recommend write them: made for recall.py, and of use here as they are."""
    (tmp_path / "experiment").mkdir()
    text = "experiment_name: found\nmeasure: { detail_rows: 0 }\nselection: { topk: 8, index_source_layers: [0, 1] }\n"
    (tmp_path / "experiment" / "found.yaml").write_text(f"# @package _global_\n{text}")
    options = [arg for arg in tiny if not arg.startswith("selection.topk")]
    done = evaluate(tmp_path, *options, "experiment=found", flags=["--config-dir", str(tmp_path)])
    assert done.code == 0, done.err
    (about,) = load(tmp_path / "found" / "run").cells.values()
    assert (about["topk"], about["index_source_layers"], about["applied_layers"]) == (8, "0,1", "0,1,2")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("evaluation.layers=some", "evaluation.layers='some'"),
        ("evaluation.dense_layers=-1", "evaluation.dense_layers=-1"),
        ("measure.layers=[0]", "set evaluation.layers"),
        ("evaluation.perplexity=false", "leaves nothing to evaluate"),
        ("evaluation.retrieval.tasks=[double]", "tasks='double'"),
        ("evaluation.retrieval.lengths=[4096]", "data.length=128"),
        ("evaluation.retrieval.documents=0", "documents=0"),
        ("evaluation.retrieval.informative=2", "informative=2"),
        ("objective=recall", "objective=recall"),
    ],
)
def test_a_bad_option_is_told_by_its_key(tiny, override, said):
    schemas.register()
    with initialize_config_dir(str(cli.ROOT / "conf"), version_base="1.3"):
        config = compose("evaluate", overrides=[*tiny, override])
    with pytest.raises(ValueError, match=re.escape(said)):
        read_job(config)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("evaluation.layers=[7]", "evaluation.layers=[7]: no full attention there"),
        ("selection.compress_ratio=1000", "selection.compress_ratio=1000"),
        ("evaluation.harness.tasks=[arc_easy]", "pip install 'sparsity-lab[harness]'"),
        ("model=recorded data=recorded", "a recording cannot be run"),
    ],
)
def test_what_cannot_be_run_ends_with_one_line(tmp_path, tiny, override, said):
    done = evaluate(tmp_path, *tiny, *override.split())
    assert done.code == 1
    assert said in done.last


def test_a_model_with_sparse_attention_of_its_own(tmp_path):
    tiny = ["model=deepseek_v41", "model.size=tiny", "data.length=64", "data.num_documents=1", "selection.topk=4"]
    assert "only transformers models" in evaluate(tmp_path, *tiny, "evaluation=likelihood").last
