"""Time and memory of sweeps, side by side in one run.

python experiments/bench.py
python experiments/bench.py lengths=[] cases=[forward,cells_1]
python experiments/bench.py device=cuda
"""

from __future__ import annotations

import datetime
import sys
import tempfile
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from sparsity_lab import benchmark, benchmark_gpu, config, console, schemas
from sparsity_lab.job import machine

schemas.register()


@hydra.main(version_base="1.3", config_path="../conf", config_name="bench")
def main(cfg: DictConfig) -> None:
    job = config.resolve(cfg)
    if job["device"] == "cuda":
        rows = benchmark_gpu.run(job["gpu"])
        return _record(job, rows, benchmark_gpu.ratios(rows), "llama_8b_shape-cuda")
    if job["device"] != "cpu":
        raise ValueError(f"device={job['device']}: must be cpu or cuda")
    rows = []
    length = job["data"]["length"]
    runs = [(case, length) for case in job["cases"]]
    runs += [(c, n) for n in job["lengths"] for c in ("forward", "cells_1", "cells_200") if (c, n) not in runs]
    for case, tokens in runs:
        print(f"{case}, {tokens} tokens", file=sys.stderr)
        if case.startswith("jobs_"):
            with tempfile.TemporaryDirectory() as folder:
                row = benchmark.run_jobs(case.removeprefix("jobs_"), job, Path(folder))
        else:
            row = benchmark.run_case(case, job, tokens)
        print("   ", {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, file=sys.stderr)
        rows.append(row)
    return _record(job, rows, benchmark.ratios(rows, length), f"{job['model']['name']}-{job['model']['device']}")


def _record(job: dict[str, Any], rows: list[dict[str, Any]], summary: dict[str, float], name: str) -> None:
    for name, value in summary.items():
        print(f"{value:8.2f}  {name}")
    if job["record"]:
        about = {"command": " ".join(["python", "experiments/bench.py", *sys.argv[1:]]), **machine()}
        about |= {"date": datetime.date.today().isoformat(), "config": job}
        path = f"benchmarks/bench-{name}.json" if job["record"] == "auto" else job["record"]
        benchmark.write_record(Path(path), rows, summary, about)


if __name__ == "__main__":
    console.plain_errors()
    main()
