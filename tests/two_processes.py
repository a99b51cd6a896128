"""Two processes of torchrun, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

CPU = {"CUDA_VISIBLE_DEVICES": ""}


def torchrun(worker: ModuleType, out: Path, devices: dict[str, str]) -> list[dict[str, Any]]:
    """What the two processes of a worker, run as `python WORKER OUT`, left in OUT/RANK.pt; `devices`: in their
    environment."""
    tests = Path(__file__).parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", worker.__file__]
    path = os.pathsep.join([str(tests), str(tests.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **devices}
    done = subprocess.run([*command, out], env=environment, capture_output=True, text=True, timeout=300)
    first = [line for line in done.stderr.splitlines() if "[rank0]" in line]  # far above what the others say of it
    assert done.returncode == 0, "\n".join(first)[-3000:] + done.stderr[-4000:]
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]
