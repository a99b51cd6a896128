"""The project's own files: Makefile, constraints, CI, hooks, licence."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent


def targets() -> set[str]:
    return set(re.findall(r"^([a-z.]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return match[0].lower().replace("_", "-")


def test_makefile_has_its_targets() -> None:
    assert {".venv", "recall", "figures", "report", "test", "lint", "clean", "help"} <= targets()


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize("target", ["recall", "figures", "report", "test", "lint"])
def test_targets_set_themselves_up(target: str, tmp_path: Path) -> None:
    """In a clone without .venv, a dry run begins by making it; nothing is run."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    run = subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.index("-m venv .venv") < run.stdout.index("install $pins -e '.[dev]'") < run.stdout.index("touch")


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_help_lists_every_public_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert targets() <= set(shown.split())


def test_constraints_pin_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {})
    direct = [*project["dependencies"], *extras.get("gguf", []), *extras["dev"]]
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pinned = [line for line in lines if line]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in pinned)
    assert {name_of(d) for d in direct} - {"sparsity-lab"} <= {name_of(line) for line in pinned}


def test_ci_runs_what_people_run() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert "set -euo pipefail" in text
    assert "make lint" in text
    assert "make test" in text
    assert text.index("install_browser\n") < text.index("make test")  # in which tests open the report
    assert "export CI" in text


def test_hooks_need_no_network() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    assert [hook["id"] for hook in config["repos"][0]["hooks"]] == ["ruff", "ruff-format", "mypy"]


def test_licence() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"] == "Apache-2.0"
