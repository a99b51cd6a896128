"""Timing of sweeps against their alternatives. Every case runs in a process of its own, so peaks do not mix."""

from __future__ import annotations

import json
import multiprocessing
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsity_lab.cells import Cell, grid

TOPK = [16, 32, 64, 128, 256]
RATIOS = [1, 4]


def bench_cells(count: int) -> list[Cell]:
    """1, 20 or 200 two-level cells: 5 k x 2 ratios x (4 pool sizes x 3 source layers + 4 x 2 of another block size)."""
    if count == 1:
        return grid("quest", topk=64, compress_ratio=1, candidate=_pools([8], [64], 8))
    if count == 20:
        return grid("quest", topk=TOPK, compress_ratio=RATIOS, candidate=_pools([8], [64, 96], 8))
    if count == 200:
        pools = [_pools([4, 8, 12], [40, 64, 96, 128], 8), _pools([4, 12], [20, 32, 48, 64], 16)]
        return grid("quest", topk=TOPK, compress_ratio=RATIOS, candidate=pools)
    raise ValueError(f"cells={count}: the benchmark has grids of 1, 20 and 200 cells")


def _pools(sources: list[int], blocks: list[int], size: int) -> dict[str, Any]:
    return {"source_layer": sources, "topk_blocks": blocks, "block_size": size}


def timed(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of the fastest of `repeats` runs."""
    best = float("inf")
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_case(case: str, job: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Run one case in a fresh process.

    Returns:
        seconds; peak_mib of the process (and device_peak_mib on a GPU), model included; cells.
    """
    pool = multiprocessing.get_context("spawn").Pool(1)
    try:
        return pool.apply(_case, (case, dict(job), length))
    finally:
        pool.close()
        pool.join()


def _case(case: str, job: dict[str, Any], length: int) -> dict[str, Any]:
    from sparsity_lab import data
    from sparsity_lab.job import Workspace

    model: Any = Workspace().model(job["model"])
    options = {**job["data"], "length": length}
    documents = data.load(options.pop("name"), model.tokenizer, **options)
    model.observe(documents[0].tokens[None, :64], lambda acts: None, [])  # warm up
    cells: list[Cell] = []
    if case == "forward":
        run: Callable[[], object] = lambda: _forward(model, documents)  # noqa: E731
    elif case == "eager_script":
        cells = bench_cells(20)
        run = lambda: eager_script(model.model, [d.tokens for d in documents], cells)  # noqa: E731
    else:
        kind, count = case.rsplit("_", 1)
        cells = bench_cells(int(count))
        how = {**job["measure"], "checks": kind != "unchecked"}
        run = lambda: _measure(model, documents, cells, how)  # noqa: E731
    once = case == "eager_script" or length != job["data"]["length"]
    seconds = timed(run, 1 if once else job["repeats"], model.device)
    out = {"case": case, "length": length, "documents": len(documents), "cells": len(cells), "seconds": seconds}
    out["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if model.device.type == "cuda":
        out["device_peak_mib"] = torch.cuda.max_memory_allocated(model.device) / 2**20
    return out


@torch.inference_mode()
def _forward(model: Any, documents: Sequence[Any]) -> None:
    for document in documents:
        model.model(input_ids=document.tokens.unsqueeze(0).to(model.device), use_cache=False)


def _measure(model: Any, documents: Any, cells: list[Cell], options: Mapping[str, Any]) -> None:
    from sparsity_lab.measurement import measure

    measure(model, documents, cells, **options)


@torch.inference_mode()
def eager_script(model: Any, documents: Sequence[Tensor], cells: Sequence[Cell]) -> list[dict[str, float]]:
    """What a plain script does: attention weights of every layer at once, then recall and coverage cell by cell.

    Single-level, recency scores, all rows; no pools, no other metric, no intervals.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    out = []
    try:
        for tokens in documents:
            weights = model(input_ids=tokens.unsqueeze(0).to(model.device), use_cache=False, output_attentions=True)
            for cell in cells:
                for attention in weights.attentions:
                    out.append(_plain_cell(attention[0].mean(0), cell.selection.compress_ratio, cell.selection.topk))
    finally:
        model.set_attn_implementation(before)
    return out


def _plain_cell(mass: Tensor, ratio: int, topk: int) -> dict[str, float]:
    n = mass.shape[-1] // ratio
    grouped = mass[:, : n * ratio].unflatten(-1, (n, ratio)).sum(-1)
    rows = torch.arange(mass.shape[0], device=mass.device)
    visible = ((rows + 1) // ratio).unsqueeze(-1)
    hidden = torch.arange(n, device=mass.device) >= visible
    grouped = grouped.masked_fill(hidden, -1.0)
    scores = torch.arange(n, device=mass.device).expand_as(hidden).masked_fill(hidden, -1)
    best, picked = grouped.topk(min(topk, n)).indices, scores.topk(min(topk, n)).indices
    oracle = torch.zeros_like(hidden).scatter_(1, best, True)
    chosen = torch.zeros_like(hidden).scatter_(1, picked, True)
    useful = visible.squeeze(-1) > topk
    recall = (oracle & chosen).sum(-1)[useful] / topk
    kept = (grouped * chosen).sum(-1)[useful] / grouped.clamp(min=0).sum(-1)[useful]
    return {"recall": float(recall.mean()), "coverage": float(kept.mean())}


def data_needs_a_path(job: Mapping[str, Any]) -> bool:
    """Whether the job's data is not one of those that ship with Python."""
    return job["data"]["name"] not in ("pydoc", "stdlib")


def run_jobs(launcher: str, job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The real command line: a sweep of `job["jobs"]` one-cell jobs; seconds of wall time, start and load included."""
    if job["model"]["name"] != "smollm2" or data_needs_a_path(job):
        raise ValueError(f"cases=jobs_{launcher}: only for model=smollm2 on data=pydoc or stdlib; leave it out")
    topk = ",".join(str(16 * (i + 1)) for i in range(job["jobs"]))
    data, measure = job["data"], job["measure"]
    command = [
        sys.executable,
        str(Path(__file__).resolve().parents[1] / "experiments" / "recall.py"),
        "-m",
        f"hydra/launcher={launcher}",
        f"results_dir={folder}",
        f"model.device={job['model']['device']}",
        f"data={data['name']}",
        f"data.num_documents={data['num_documents']}",
        f"data.length={data['length']}",
        f"measure.detail_rows={measure['detail_rows']}",
        "selection.compress_ratio=1",
        f"selection.topk={topk}",
        "selection.candidate.source_layer=8",
        "selection.candidate.topk_blocks=64",
        "selection.candidate.block_size=8",
    ]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    seconds = time.perf_counter() - start
    return {"case": f"jobs_{launcher}", "jobs": job["jobs"], "seconds": seconds, "length": data["length"]}


def ratios(rows: Sequence[Mapping[str, Any]], length: int) -> dict[str, float]:
    """The figures that the README quotes, from one run."""
    at = {row["case"]: row for row in rows if row["length"] == length}
    out: dict[str, float] = {}

    def put(name: str, top: tuple[str, str], bottom: tuple[str, str], factor: float = 1.0) -> None:
        if top[0] in at and bottom[0] in at:
            out[name] = factor * at[top[0]][top[1]] / at[bottom[0]][bottom[1]]

    put("1 cell / plain forward, time", ("cells_1", "seconds"), ("forward", "seconds"))
    put("20 cells / 1 cell, time", ("cells_20", "seconds"), ("cells_1", "seconds"))
    put("200 cells / 1 cell, time", ("cells_200", "seconds"), ("cells_1", "seconds"))
    put("200 cells / 1 cell, peak memory", ("cells_200", "peak_mib"), ("cells_1", "peak_mib"))
    put("200 cells with / without run-time checks, time", ("cells_200", "seconds"), ("unchecked_200", "seconds"))
    if "jobs_basic" in at:
        one_by_one = 200 / at["jobs_basic"]["jobs"]
        put(
            "200 one-cell jobs (extrapolated) / 200 cells, time",
            ("jobs_basic", "seconds"),
            ("cells_200", "seconds"),
            one_by_one,
        )
    put("one job at a time / fused launcher, time", ("jobs_basic", "seconds"), ("jobs_fused", "seconds"))
    put("eager script with 20 cells / 20 cells, time", ("eager_script", "seconds"), ("cells_20", "seconds"))
    put("eager script with 20 cells / 20 cells, peak memory", ("eager_script", "peak_mib"), ("cells_20", "peak_mib"))
    return out


def write_record(
    path: Path, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, float], about: Mapping[str, Any]
) -> None:
    """Commit-ready JSON: figures, ratios, machine, versions, date, command."""
    from sparsity_lab.results import write_text

    text = json.dumps({**about, "ratios": dict(summary), "cases": [dict(row) for row in rows]}, indent=1)
    write_text(path, text + "\n")
