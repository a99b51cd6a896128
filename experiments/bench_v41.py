"""Forward of a DeepSeek V4.1 model against the usual eager structure (expert loop, materialised bias), on the CPU.

python experiments/bench_v41.py
python experiments/bench_v41.py size=tiny length=256 record=null
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from sparsity_lab import config, console, schemas
from sparsity_lab.benchmark import write_record
from sparsity_lab.benchmark_v41 import compare
from sparsity_lab.job import machine

schemas.register()


@hydra.main(version_base="1.3", config_path="../conf", config_name="bench_v41")
def main(cfg: DictConfig) -> None:
    job = config.resolve(cfg)
    row = compare(job["size"], job["length"], job["repeats"], job["seed"])
    for name, value in row.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    if job["record"]:
        about = {"command": " ".join(["python", "experiments/bench_v41.py", *sys.argv[1:]]), **machine()}
        about |= {"date": datetime.date.today().isoformat(), "config": job}
        write_record(Path(job["record"]), [row], {"eager / ours, CPU time": row["eager / ours"]}, about)


if __name__ == "__main__":
    console.plain_errors()
    main()
