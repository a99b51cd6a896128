"""Runs that are killed, interrupted, damaged or split: what is left can be read, and going on gives the same bits."""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import cli
import pytest

from sparsity_lab.results import ResultsError, collect, load, read_manifest, read_tallies

NAME = "recall/llama-pydoc-128"
FOLDER = f"results/{NAME}"
SIX = "data.num_documents=6"
CELLS = ["selection.topk=[4,8]"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return [*cli.tiny(tmp_path_factory.mktemp("model")), *CELLS]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """The folder of an uninterrupted run over six documents."""
    here = tmp_path_factory.mktemp("whole")
    done = cli.run(here, *tiny, SIX, f"results_dir={here}/results")
    assert (done.code, done.forwards) == (0, 6), done.err
    return here / FOLDER


def documents_in(folder: Path) -> int:
    """Documents that a folder holds tallies of. Every file under its final name must be readable."""
    found: set[str] = set()
    for path in folder.rglob("*.parquet"):
        found |= set(read_tallies(path)["document"])
    if (folder / "manifest.json").exists():
        read_manifest(folder)
    return len(found)


def assert_equals(folder: Path, whole: Path) -> None:
    assert cli.status(folder) == "complete"
    assert (folder / "tallies.parquet").read_bytes() == (whole / "tallies.parquet").read_bytes()
    assert (folder / "summary.csv").read_text() == (whole / "summary.csv").read_text()
    assert list((folder / "parts").glob("*.parquet")) == []


# --- killed


def test_killed_at_random_moments(tiny, whole, tmp_path):
    """Each time it goes on from where it was, and at most the document in work is lost."""
    draw = random.Random(5)
    args = [*tiny, SIX, f"results_dir={tmp_path}/results"]
    folder, kept = tmp_path / FOLDER, 0
    for begin in (1, 2, 1):  # at most so many documents more each time
        work = cli.start(tmp_path, *args, prepare=partial(cli.slowly, 0.3))
        cli.wait_for(lambda work=work, begin=begin: work.forwards >= begin)
        time.sleep(draw.random() * 0.4)
        os.kill(work.process.pid, signal.SIGKILL)
        killed = work.finish()
        assert killed.code == -signal.SIGKILL
        assert cli.status(folder) == "running"
        now = documents_in(folder)
        assert now >= kept + killed.forwards - 1
        kept = now
    assert 0 < kept < 6
    assert load(folder).tallies["document"].nunique() == kept  # readable in the middle of things
    rest = cli.run(tmp_path, *args)
    assert (rest.code, rest.forwards) == (0, 6 - kept), rest.err
    assert f"{kept} of 6 documents are in the results already" in rest.out
    assert_equals(folder, whole)


# every file that a run over two documents writes whole: manifest, status, a part each, tallies, summary, status, and
# then the job's summary and status
WRITES = 9


@pytest.mark.slow
def test_killed_at_every_write(tiny, tmp_path):
    """Just before each file gets its name, and after the last did."""
    args = [*tiny, "data.num_documents=2"]
    for number in range(1, WRITES + 2):
        die = partial(cli.die_at_write, min(number, WRITES), late=number > WRITES)
        done = cli.run(tmp_path, *args, f"results_dir={tmp_path}/{number}", prepare=die)
        assert done.code == -signal.SIGKILL, number
    folders = [tmp_path / f"{number}/{NAME}" for number in range(1, WRITES + 2)]
    kept = [documents_in(folder) for folder in folders]
    assert kept == sorted(kept)
    assert set(kept) == {0, 1, 2}

    whole = cli.run(
        tmp_path, *args, f"results_dir={tmp_path}/whole", prepare=partial(cli.die_at_write, WRITES + 1, late=False)
    )
    assert whole.code == 0
    everywhere = "results_dir=" + ",".join(f"{tmp_path}/{number}" for number in range(1, WRITES + 2))
    rest = cli.run(tmp_path, *args, everywhere, flags=["-m"])
    assert rest.code == 0, rest.err
    assert rest.forwards == sum(2 - n for n in kept)
    for folder in folders:
        assert_equals(folder, tmp_path / "whole" / NAME)


# --- interrupted, failed


def test_interrupted_run_says_so_and_goes_on(tiny, whole, tmp_path):
    args = [*tiny, SIX, f"results_dir={tmp_path}/results"]
    work = cli.start(tmp_path, *args, prepare=partial(cli.slowly, 0.4))
    cli.wait_for(lambda: work.forwards >= 3)
    os.kill(work.process.pid, signal.SIGINT)
    done = work.finish(20)
    assert done.code != 0
    folder = tmp_path / FOLDER
    assert cli.status(folder) == "interrupted"
    assert cli.status(folder / "jobs/single") == "interrupted"
    assert "interrupted" in (folder / "jobs/single/recall.log").read_text()
    kept = documents_in(folder)
    assert kept == done.forwards - 1
    rest = cli.run(tmp_path, *args)
    assert (rest.code, rest.forwards) == (0, 6 - kept)
    assert_equals(folder, whole)


def test_a_run_that_failed_goes_on(tiny, whole, tmp_path):
    args = [*tiny, SIX, f"results_dir={tmp_path}/results"]
    failed = cli.run(tmp_path, *args, prepare=cli.break_attention)
    assert failed.code == 1
    folder = tmp_path / FOLDER
    assert cli.status(folder) == cli.status(folder / "jobs/single") == "failed: layer 0: attention rebuilt differs"
    with pytest.raises(ResultsError, match="nothing measured yet"):
        load(folder)
    assert cli.run(tmp_path, *args).forwards == 6
    assert_equals(folder, whole)


# --- torn files


def test_torn_part_is_named_and_computed_again(tiny, whole, tmp_path):
    args = [*tiny, SIX, f"results_dir={tmp_path}/results"]
    work = cli.start(tmp_path, *args, prepare=partial(cli.slowly, 0.3))
    cli.wait_for(lambda: work.forwards >= 4)
    os.kill(work.process.pid, signal.SIGKILL)
    work.finish()
    folder = tmp_path / FOLDER
    parts = sorted((folder / "parts").glob("*.parquet"))
    kept = len(parts) - 1
    assert kept >= 2
    parts[1].write_bytes(parts[1].read_bytes()[:-100])
    with pytest.raises(ResultsError, match=parts[1].name):
        load(folder)
    rest = cli.run(tmp_path, *args)
    assert (rest.code, rest.forwards) == (0, 6 - kept)
    assert "set aside and computed again" in rest.out
    assert str(parts[1]) in rest.out
    assert f"{kept} of 6 documents are in the results already" in rest.out
    assert_equals(folder, whole)
    assert [p.name for p in (folder / "parts").iterdir()] == [parts[1].with_suffix(".damaged").name]
    assert cli.run(tmp_path, *args).forwards == 0


@pytest.mark.parametrize("content", [b"", b"PAR1 and then nothing", None], ids=["empty", "foreign", "cut"])
def test_damaged_tallies_are_named_and_computed_again(content, tiny, whole, tmp_path):
    args = [*tiny, "data.num_documents=2", f"results_dir={tmp_path}/results"]
    assert cli.run(tmp_path, *args).forwards == 2
    file = tmp_path / FOLDER / "tallies.parquet"
    good = file.read_bytes()
    file.write_bytes(good[: len(good) // 2] if content is None else content)
    again = cli.run(tmp_path, *args)
    assert (again.code, again.forwards) == (0, 2)
    assert f"set aside and computed again: {file}" in again.out
    assert file.read_bytes() == good


def test_damaged_manifest_is_named(tiny, tmp_path):
    args = [*tiny, "data.num_documents=2", f"results_dir={tmp_path}/results"]
    cli.run(tmp_path, *args)
    file = tmp_path / FOLDER / "manifest.json"
    file.write_text(file.read_text()[:100])
    again = cli.run(tmp_path, *args)
    assert (again.code, again.forwards) == (1, 0)
    assert f"{file}: damaged" in again.last


# --- shards


def test_shards_in_folders_of_their_own_merge_to_one_run(tiny, whole, tmp_path):
    for shard in range(3):
        split = [f"data.shard={shard}", "data.num_shards=3", f"results_dir={tmp_path}/shards/{shard}"]
        done = cli.run(tmp_path, *tiny, SIX, *split)
        assert (done.code, done.forwards) == (0, 2), done.err
    merged, one = collect(tmp_path / "shards"), load(whole)
    assert merged.cells == one.cells
    cli.assert_same_tallies(merged.tallies, one.tallies)
    saved = merged.save(tmp_path / "merged")
    assert (saved / "tallies.parquet").read_bytes() == (whole / "tallies.parquet").read_bytes()
    assert (saved / "summary.csv").read_text() == (whole / "summary.csv").read_text()


def test_shards_into_one_folder_at_the_same_time(tiny, whole, tmp_path):
    split = [*tiny, SIX, "data.num_shards=2", f"results_dir={tmp_path}/results"]
    work = [cli.start(tmp_path, *split, f"data.shard={i}", prepare=partial(cli.slowly, 0.1)) for i in range(2)]
    done = [one.finish() for one in work]
    assert [(d.code, d.forwards) for d in done] == [(0, 3), (0, 3)], done
    assert_equals(tmp_path / FOLDER, whole)
    # a whole run finds both shards' documents there
    assert cli.run(tmp_path, *tiny, SIX, f"results_dir={tmp_path}/results").forwards == 0


def test_two_different_sweeps_into_one_folder_at_the_same_time(tiny, tmp_path):
    args = [*tiny, "data.num_documents=3", f"results_dir={tmp_path}/results"]
    values = ("selection.topk=4,8", "selection.topk=8,16")
    slow = partial(cli.slowly, 0.1)
    dirs = [f"hydra.sweep.dir={tmp_path}/jobs{i}" for i in range(2)]
    work = [cli.start(tmp_path, *args, v, d, flags=["-m"], prepare=slow) for v, d in zip(values, dirs, strict=True)]
    assert [one.finish().code for one in work] == [0, 0]
    alone = cli.run(tmp_path, *args, "selection.topk=[4,8,16]", f"results_dir={tmp_path}/alone")
    assert alone.forwards == 3
    one, other = tmp_path / FOLDER, tmp_path / "alone" / NAME
    assert (one / "tallies.parquet").read_bytes() == (other / "tallies.parquet").read_bytes()
    assert load(one).cells == load(other).cells
