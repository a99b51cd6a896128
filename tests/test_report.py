"""The report: everything on the page, nothing from outside, whatever the folders hold."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import cli
import pandas as pd
import pytest
from test_config import composed
from test_pareto import DEVICE, shaped
from test_recommend import script
from tiny_results import tiny_results

from sparsity_lab import report
from sparsity_lab.config import read_job
from sparsity_lab.pricing import Setting
from sparsity_lab.recommend import Wish
from sparsity_lab.report import study
from sparsity_lab.report.blocks import MOST_ROWS, Value, number, pictures, table, word
from sparsity_lab.report.folders import commands
from sparsity_lab.results import Results, ResultsError

SETTING = Setting(DEVICE, 640)
NASTY = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Tags(HTMLParser):
    """Every tag with its attributes, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def saved(folder: Path, results: Results, status: str = "complete", **manifest: Any) -> Path:
    """A results folder as recall.py leaves it."""
    told = {
        "config": {"model": {"name": "tiny"}},
        "versions": {"torch": "9.9"},
        "git": {"sha": "c0ffee", "dirty": True},
    }
    told |= {"device": "abacus", "seed": 3, "data": {"name": "lines", "digest": "beef"}}
    Results(results.tallies, results.cells, {**results.manifest, **told}).save(folder)
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **manifest}))
    (folder / "status").write_text(status + "\n")
    return folder


def many(**options: Any) -> Results:
    pools = [None, (0, 40, 4)]
    return shaped(tiny_results(["quest", "mean_key"], pools=pools, saturated={(4, 64): 8, (4, 32): 10}, **options))


def page_of(*folders: Path, wish: Wish | None = None) -> str:
    """The page with its first figure only, which is faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "pictures", lambda drawings: pictures(drawings[1:2]))
        return whole_page(*folders, wish=wish)


def whole_page(*folders: Path, wish: Wish | None = None) -> str:
    return report.build(folders, SETTING, wish or Wish(0.6), title=None, command="python analysis/report.py it")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    failed = [{"scorer": "quest", "topk": 7, "reason": "selection.topk=7: too odd"}]
    return saved(tmp_path_factory.mktemp("results") / "tiny", many(), failed_cells=failed)


@pytest.fixture(scope="module")
def page(folder) -> str:
    return whole_page(folder)


def test_sections(page):
    titles = [
        "To know first", "Headline", "Recommendation", "What was measured", "Figures", "Tables", "Saturated cells",
        "Failed cells", "Provenance", "How to reproduce", "What the words mean",
    ]  # fmt: skip
    found = Tags(page)
    places = [found.text.index(title) for title in titles]  # in the navigation
    assert places == sorted(places)
    assert len(found.all("section")) == len(titles)
    targets = {a["href"] for a in found.all("a")}
    assert targets == {f"#{section['id']}" for section in found.all("section")}


def test_what_it_says(page, folder):
    text = Tags(page).text
    for said in (
        "3 documents of 64 tokens", "tiny on lines",  "selection.topk=7: too odd", "abacus", "torch 9.9",
        "git c0ffee, with uncommitted changes", "digest beef", "python analysis/report.py it", "git checkout c0ffee",
        "EXTRAPOLATION", "3 documents were measured", "Teacher-forced", "roofline", "all: nothing to average", "80",
        str(folder),
    ):  # fmt: skip
        assert said in text, said
    assert not re.search(r"\bnan\b", text)
    assert "None" not in text


def test_numbers_are_those_of_the_tables(page, folder):
    frame = many().frame(())
    row = frame[(frame["scorer"] == "quest") & (frame["topk"] == 16) & (frame["compress_ratio"] == 1)].iloc[0]
    text = Tags(page).text
    shown = f"{row['coverage']:.3f} [{row['coverage_low']:.3f}\u2013{row['coverage_high']:.3f}]"
    assert shown in text
    answer = text.split("recommended")[1]
    assert "ratio" in answer


def test_it_is_one_file_for_everybody(page):
    found = Tags(page)
    assert found.all("html") == [{"lang": "en"}]
    assert len(found.all("h1")) == len(found.all("main")) == len(found.all("title")) == 1
    assert all(th.get("scope") in ("col", "row") for th in found.all("th"))
    assert found.all("caption")
    images = found.all("img")
    assert len(images) >= 5
    assert all(image["alt"] and "tiny on lines" in image["alt"] for image in images)
    assert all(image["src"].startswith("data:image/svg+xml;base64,") for image in images)
    assert not [s for s in found.all("script") if "src" in s]
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    addresses = [a.get(key) for _, a in found.tags for key in ("src", "href") if a.get(key)]
    assert not [a for a in addresses if not a.startswith(("#", "data:"))]
    policy = next(m["content"] for m in found.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_the_same_folder_gives_the_same_page(folder):
    assert page_of(folder) == page_of(folder)


def test_names_are_only_text(tmp_path):
    results = many(model=NASTY, data=NASTY)
    failed = [{"scorer": NASTY, "reason": NASTY}]
    where = saved(tmp_path / "x", results, failed_cells=failed, device=NASTY, versions={NASTY: NASTY})
    nasty = Tags(page_of(where))
    plain = Tags(page_of(saved(tmp_path / "y", many(), failed_cells=[{"scorer": "a", "reason": "b"}])))
    for tag in ("script", "img", "title"):
        assert len(nasty.all(tag)) == len(plain.all(tag))
    assert NASTY in nasty.text
    assert not [a for _, a in nasty.tags if "onerror" in a]


def test_several_folders_merge_or_stand_apart(tmp_path, folder):
    shard = saved(tmp_path / "shard", many(documents=4))
    merged = Tags(page_of(folder, shard))
    assert "4 documents of 64 tokens" in merged.text
    other = saved(tmp_path / "other", many(length=128))
    apart = Tags(page_of(folder, other))
    assert "Headline: tiny on lines, 64 tokens" in apart.text
    assert "Headline: tiny on lines, 128 tokens" in apart.text
    ids = [a["id"] for _, a in apart.tags if "id" in a]
    assert len(ids) == len(set(ids))


def test_nothing_qualifies(folder):
    text = Tags(page_of(folder, wish=Wish(0.999))).text
    assert "nothing qualifies" in text
    assert "nearest configuration" in text


@pytest.mark.parametrize(("results", "said"), [
    (tiny_results(), "do not tell the model's shape"),
    (shaped(tiny_results([])), "is a bound"),
    (shaped(tiny_results(documents=1)), "one document, so no interval"),
    (shaped(tiny_results(saturated={(r, k): 10 for r in (1, 4) for k in (16, 32, 64)})), "every row is saturated"),
])  # fmt: skip
def test_results_that_lack_something(tmp_path, results, said):
    text = Tags(page_of(saved(tmp_path / "x", results))).text
    assert said in text
    assert "What was measured" in text
    assert not re.search(r"\bnan\b", text)


def test_unfinished_and_unreadable_folders_are_named(tmp_path, folder, monkeypatch):
    partial = saved(tmp_path / "partial", many(length=128), status="failed: the lights went out")
    old, foreign = tmp_path / "old", tmp_path / "foreign"
    for where, text in ((old, '{"schema": 0, "cells": {}}'), (foreign, '["of", "another", "program"]')):
        where.mkdir()
        (where / "manifest.json").write_text(text)
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    (damaged / "tallies.parquet").write_bytes(b"PAR1 no")
    everything = [folder, partial, old, foreign, damaged, tmp_path / "nowhere"]
    monkeypatch.setattr(study, "pictures", lambda drawings: [])
    page, troubles = report.build(everything, SETTING, Wish(0.6), title="T", command="c")
    text = Tags(page).text
    for said in ("the lights went out", "schema=0", "not a manifest", "damaged or not a parquet", "no results here"):
        assert said in text, said
        assert any(said in trouble for trouble in troubles)
    with pytest.raises(ResultsError, match="schema=0"):
        report.build([old], SETTING, Wish(), title=None, command="c")


def test_script(tmp_path, folder, capsys, monkeypatch):
    monkeypatch.setattr(study, "pictures", lambda drawings: [])
    out = tmp_path / "deep" / "report.html"
    wish = ["--coverage", 0.6, "--device", "laptop_cpu"]
    assert script("report", folder, tmp_path / "nowhere", "-o", out, "--title", "Mine & yours", *wish) == 0
    told = capsys.readouterr()
    assert told.out.strip() == str(out)
    assert "no results here" in told.err
    found = Tags(out.read_text(encoding="utf-8"))
    assert "Mine & yours" in found.text
    assert f"python analysis/report.py {folder}" in found.text
    before = out.read_bytes()
    assert script("report", tmp_path / "nowhere", "-o", out) == 2
    assert script("report", folder, "-o", out, "--device", "toaster") == 2
    assert out.read_bytes() == before
    err = capsys.readouterr().err
    assert err.count("\n") == 2
    assert "Traceback" not in err


def test_commands_are_those_that_were_typed(tmp_path):
    words = ["dry_run=true", f"results_dir={tmp_path}/results", "data.length=64", "experiment='odd name'"]
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "odd name.yaml").write_text("# @package _global_\nmeasure: {seed: 5}\n")
    assert cli.run(tmp_path, *words, flags=["--config-dir", f"{tmp_path}/conf"]).code == 0
    sweep = [*words[:-1], "measure.seed=5", "selection.topk=2,3"]
    assert cli.run(tmp_path, *sweep, flags=["-m"]).code == 0
    found = [shlex.split(line) for line in commands(tmp_path / "results" / "recall" / "smollm2-pydoc-64")]
    start = ["python", "experiments/recall.py"]
    assert found == [[*start, "--config-dir", f"{tmp_path}/conf", *words], [*start, "-m", *sweep]]
    assert commands(tmp_path / "nowhere") == []


def test_sweep_of_make_report():
    """`make report` measures ratios, k, pools and reuse, none of which is impossible for the default model."""
    job = read_job(composed("experiment=report"))
    selections = [cell.selection for cell in job.cells]
    assert not job.failed
    assert {s.compress_ratio for s in selections} == {1, 2, 4}
    assert len({s.topk for s in selections}) >= 4
    assert len({s.candidate for s in selections}) >= 4
    assert any(s.index_source_layers for s in selections)
    layers = 30
    assert all(s.candidate is None or s.candidate.source_layer < layers for s in selections)
    steps = subprocess.run(["make", "-n", "report"], cwd=cli.ROOT, capture_output=True, text=True).stdout
    order = ["experiment=report", "plot_coverage.py", "plot_cost.py", "report.py"]
    places = [steps.index(step) for step in order]
    assert places == sorted(places)
    assert str(job.folder) in steps


@pytest.mark.parametrize("name", ["recommend", "report", "plot_cost"])
def test_scripts_answer_to_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        script(name, "--help")
    assert stop.value.code == 0
    assert "--context" in capsys.readouterr().out


def test_plot_cost(tmp_path, folder, capsys):
    assert script("plot_cost", folder, "--coverage", 0.6, "--out", tmp_path) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert {path.suffix for path in paths} == {".png", ".svg", ".pdf", ".csv"}
    found = pd.read_csv(next(path for path in paths if path.suffix == ".csv"))
    assert {"label", "microseconds", "kept", "dominated", "recommended"} <= set(found)
    assert found["recommended"].sum() == 1


def test_damaged_hydra_files_are_passed_over(tmp_path):
    place = tmp_path / "jobs" / "single" / ".hydra"
    place.mkdir(parents=True)
    for text in ("[", "hydra: 3", "hydra: {overrides: 3}", ""):
        (place / "hydra.yaml").write_text(text)
        assert commands(tmp_path) == []


def test_values():
    assert number(None) == number(float("nan")) == Value("\u2013")
    assert number(0.12345) == Value("0.123", 0.12345)
    assert number(0.5, low=0.4, high=0.6).text == "0.500 [0.400\u20130.600]"
    assert number(0.5, low=float("nan"), high=float("nan")).text == "0.500"


def test_long_tables_say_that_they_are_cut():
    made = table("All", ["a", "b"], [[word(i), number(i)] for i in range(MOST_ROWS + 5)])
    assert len(made.rows) == MOST_ROWS
    assert "the first 1,000 of 1,005" in made.caption
    assert made.numeric == [False, True]


def test_figures_that_cannot_be_drawn_are_named():
    def fail():
        raise ValueError("no pools\nat all")

    made = pictures([("One", fail)])
    assert made[0].summary == "Figures that these results do not allow"
    assert made[0].lines == ["One: no pools at all."]


def test_package_ships_the_page(folder):
    shipped = tomllib.loads((cli.ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    here = cli.ROOT / "sparsity_lab" / "report"
    assert {f"report/{p.name}" for p in here.iterdir() if p.suffix in (".html", ".css", ".js")} <= set(
        shipped["sparsity_lab"]
    )
