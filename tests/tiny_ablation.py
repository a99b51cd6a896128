"""A small ablation of the fake model, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fake_model import FakeModel, documents

from sparsity_lab.ablation import Ablation
from sparsity_lab.ablation_run import AblationResults, AblationRun
from sparsity_lab.cells import Candidate
from sparsity_lab.scorers import BASELINES

GRID = Ablation(1, (2, 4), (8, 16, 32), (2, 4), joint_pools=((8, 2),))
ABOUT: dict[str, Any] = {"model": {"name": "fake"}, "scorer": "quest"}


def prepare(model: FakeModel | None = None, count: int = 3, grid: Ablation = GRID, **options: Any) -> AblationRun:
    options = {"candidate": Candidate(1, 4, 2), "index_source_layers": (0, 1, 3), **options}
    return AblationRun(
        model or FakeModel(num_layers=6), documents(count, 47), grid, BASELINES["quest"](), "quest", **options
    )


def make(folder: Path, **options: Any) -> AblationResults:
    return prepare(**options).run(folder, ABOUT)
