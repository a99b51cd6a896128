"""dry_run=true: passes, cells, time and memory, without a model's weights."""

from __future__ import annotations

import re

import pytest
from cli import shell
from test_config import composed
from tiny_models import make

from sparsity_lab import estimate
from sparsity_lab.config import read_job


@pytest.fixture
def weightless(tmp_path):
    """A model folder that can be described but not loaded."""
    folder = make("llama", tmp_path / "model")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    return folder


def job(folder, *overrides):
    return read_job(composed("model=hf", f"model.path={folder}", "model.device=cpu", "data.length=64", *overrides))


def test_size_is_read_without_weights(weightless):
    size = estimate.model_size(job(weightless).model)
    assert (size.layers, size.heads, size.head_dim) == (3, 6, 8)
    assert size.weights_bytes > 4 * size.parameters > 0
    assert estimate.model_size({**job(weightless).model, "path": str(weightless / "absent")}) is None


def test_passes_and_cells_are_counted(weightless):
    jobs = [job(weightless, f"selection.topk={k}", "selection.compress_ratio=1") for k in (4, 8)]
    jobs += [job(weightless, "selection.topk=[0,4]", "selection.compress_ratio=1", "measure.seed=1")]
    lines = estimate.describe(jobs).splitlines()
    assert len(lines) == 3
    assert "2 documents x 64 tokens; 2 cells, 8 with their envelope; about" in lines[0]
    assert "1 cells, 4 with their envelope, 1 impossible" in lines[1]
    assert lines[2].startswith("3 jobs, 2 passes, about ")


def test_longer_documents_cost_more(weightless):
    def cost(length: int) -> float:
        return estimate._pass([job(weightless, f"data.length={length}", "data.num_documents=64")])[1]

    assert cost(256) > 2 * cost(64)


@pytest.mark.parametrize("sweep", [[], ["-m"]])
def test_command_line_stops_before_anything(weightless, tmp_path, sweep):
    values = "4,8" if sweep else "[4,8]"
    done = shell(
        *sweep, "model=hf", f"model.path={weightless}", "model.device=cpu", "data.length=64", "dry_run=true",
        f"selection.topk={values}", f"results_dir={tmp_path / 'out'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(rf"{2 if sweep else 1} jobs, 1 passes, about .*nothing was measured", done.stdout)
    assert not list((tmp_path / "out").rglob("manifest.json"))
