"""What the README tells people to type works: command lines compose, scripts know their options, the notebook runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import matplotlib.figure
import pytest
import scripts
from test_config import composed
from tiny_models import make

import sparsity_lab as sl
from sparsity_lab.config import read_job, resolve

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?:^    .*\n|^\n(?=    ))+", README, flags=re.MULTILINE)
LINES = [line.split("  #")[0].strip() for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
LINES = [re.sub(r"^torchrun --nproc-per-node \d+ ", "python ", line) for line in LINES]
COMMANDS = [line for line in LINES if line.startswith("python ")]
LAUNCHERS = ("hydra/launcher=",)


def test_commands_were_found():
    assert len(COMMANDS) > 8
    assert "make recall" in [line.split("  ")[0] for line in LINES]
    assert "make test" in [line.split("  ")[0] for line in LINES]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python experiments/")])
def test_experiment_command(command, sparse_models):
    family = "deepseek_v41" if "model=deepseek_v41" in command else "deepseek_v32"
    path = str(sparse_models[family]) if "native" in command else "some/model"
    _, script, *words = shlex.split(command)
    words = [re.sub(r"\b(PATH_OR_HUB_NAME|FOLDER)$", path, word) for word in words]
    assert (ROOT / script).is_file()
    overrides = [
        w for w in words if not w.startswith("-") and not w.startswith(LAUNCHERS) and "hydra.launcher" not in w
    ]
    if "recorded" in command or "--config-dir" in words:  # made and composed by test_record and test_recommend
        return
    sweeps = [o.split("=", 1) for o in overrides]
    first = [f"{key}={value if value.startswith(('[', '{')) else value.split(',')[0]}" for key, value in sweeps]
    values = composed(*first, name=Path(script).stem)
    if script.endswith("recall.py"):
        assert read_job(values).cells
    else:
        assert resolve(values)


@pytest.fixture(scope="module")
def sparse_models(tmp_path_factory):
    """Tiny models whose selection is read from their configuration when a command is composed."""
    from sparsity_lab.models.deepseek_v41 import SIZES
    from sparsity_lab.models.deepseek_v41.checkpoint import save_checkpoint
    from sparsity_lab.models.deepseek_v41.init import random_model

    folder = tmp_path_factory.mktemp("models")
    save_checkpoint(random_model(SIZES["tiny"]), folder / "deepseek_v41")
    make("deepseek_v32", folder / "deepseek_v32")
    return {family: folder / family for family in ("deepseek_v41", "deepseek_v32")}


@pytest.mark.parametrize("script", sorted({shlex.split(c)[1] for c in COMMANDS if "analysis/" in c}))
def test_analysis_script_answers_to_help(script):
    done = scripts.run(Path(script).name, "--help")
    assert done.returncode == 0
    assert "usage" in done.stdout


def test_notebook_block(tmp_path, monkeypatch):
    block = next(b for b in BLOCKS if "sl.load_model" in b and "SparseModel" not in b)
    code = "\n".join(line[4:] for line in block.splitlines())
    for there, here in (
        ("length=2048", "length=96"),
        ("source_layer=8", "source_layer=1"),
        ("[16, 64, 256]", "[4, 8]"),
    ):
        assert there in code
        code = code.replace(there, here)
    code = code.replace('load_model("smollm2")', f"load_model({str(make('llama', tmp_path))!r})")
    space: dict = {}
    exec(code, space)
    assert space["results"].frame()["coverage"].notna().any()
    assert isinstance(sl.plot.coverage(space["results"]), matplotlib.figure.Figure)
    assert callable(sl.measure)


def test_sparse_block(tmp_path):
    block = next(b for b in BLOCKS if "SparseModel" in b)
    code = "\n".join(line[4:] for line in block.splitlines())
    code = code.replace('load_model("smollm2")', f"load_model({str(make('llama', tmp_path))!r})")
    for there, here in (("length=256", "length=48"), ("topk=32", "topk=4"), ("tokens, 50)", "tokens, 3)")):
        assert there in code
        code = code.replace(there, here)
    space: dict = {}
    exec(code, space)
    assert space["logits"].isfinite().all()
    assert space["text"].shape == (1, 51)


def test_cost_block():
    block = next(b for b in BLOCKS if "sl.cost" in b)
    space: dict = {}
    exec("\n".join(line[4:] for line in block.splitlines()), space)
    assert space["costs"]


def test_every_module_in_the_architecture_exists():
    listed = re.findall(r"^    ((?:[\w/]+\.py(?:, )?)+)", README, flags=re.MULTILINE)
    files = {name for group in listed for name in group.split(", ")}
    assert len(files) > 10
    for name in files:
        assert (ROOT / "sparsity_lab" / name).is_file() or (ROOT / name).is_file(), name
