"""Timing on a GPU: the kernels, the whole job on a model of Llama 8B's shape, and its alternatives, side by side.

Everything runs in one process on the same inputs; weights are random, made on the device, since time does not depend on
them. FLOPs are counted over what a causal mask leaves: half of the full rectangle.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsity_lab.cells import Cell, grid
from sparsity_lab.documents import Document, Documents
from sparsity_lab.lightning import IndexerConfig, Lightning
from sparsity_lab.measurement import measure
from sparsity_lab.models.hf import HFModel

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 1 << 20, "rope_theta": 5e5,
}  # fmt: skip
INDEXER = IndexerConfig(index_n_heads=32, index_head_dim=128, rope_head_dim=64, head_dim=128)
TOPK = [128, 256, 512, 1024, 2048]
GIB = 2**30
SOME = 5  # a pass a cell is timed on every fifth cell
LONG = 65536  # tokens from which on nothing runs twice
Say = Callable[[Mapping[str, Any]], None]


def long_cells(count: int) -> list[Cell]:
    """1, 20 or 200 two-level cells for long documents: 5 k x 2 ratios x 20 pools of up to 16,384 positions."""
    if count == 1:
        return grid("lightning", topk=512, compress_ratio=1, candidate=_pools([8], [1024], 8))
    if count == 20:
        return grid("lightning", topk=TOPK, compress_ratio=[1, 4], candidate=_pools([8], [1024, 2048], 8))
    if count == 200:
        pools = [_pools([4, 8, 12], [288, 512, 1024, 2048], 8), _pools([4, 12], [160, 256, 512, 1024], 16)]
        return grid("lightning", topk=TOPK, compress_ratio=[1, 4], candidate=pools)
    raise ValueError(f"cells={count}: the benchmark has grids of 1, 20 and 200 cells")


def _pools(sources: list[int], blocks: list[int], size: int) -> dict[str, Any]:
    return {"source_layer": sources, "topk_blocks": blocks, "block_size": size}


def random_llama(layers: int | None = None, seed: int = 0, device: str = "cuda", **shape: int) -> HFModel:
    """A Llama of 8B's shape (or of `shape`), bfloat16, with weights drawn on the device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**{**LLAMA_8B, **shape, **({} if layers is None else {"num_hidden_layers": layers})})
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return HFModel(model, name="llama_8b_shape", fingerprint=f"random-{seed}-{config.num_hidden_layers}")


def random_documents(count: int, length: int, vocab: int, seed: int = 0) -> Documents:
    generator = torch.Generator().manual_seed(seed)
    items = [Document(i, torch.randint(vocab, (length,), generator=generator), f"random {i}") for i in range(count)]
    return Documents(tuple(items), {"name": "random_tokens", "length": length, "seed": seed})


def measured(run: Callable[[], object], repeats: int = 1, warm_up: bool = True) -> dict[str, float]:
    """Seconds of the fastest of `repeats` runs after one that warms up, and the peak of device memory."""
    if warm_up:
        run()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    best = float("inf")
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(stop) / 1e3)
    return {"seconds": best, "peak_gib": torch.cuda.max_memory_allocated() / GIB}


def job(
    model: HFModel, scorer: Lightning, documents: Documents, cells: Sequence[Cell], rows: int | None, **options: Any
) -> Any:
    """One call of `measure` as the benchmark runs it: no per-head metrics, with envelope and checks."""
    options = {"detail_rows": 0, **options}
    return measure(model, documents, cells, scorers={"lightning": scorer}, rows=rows, **options)


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every part that `options` (conf/bench.yaml, gpu) asks for; a record a case, printed as it comes."""
    rows: list[dict[str, Any]] = []

    def say(row: Mapping[str, Any]) -> None:
        rows.append(dict(row))
        shown = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        print(shown, file=sys.stderr, flush=True)

    parts: dict[str, Callable[[], None]] = {
        "kernels": lambda: kernel_times(options["kernel_tokens"], say),
        "jobs": lambda: jobs(options["lengths"], options["all_rows_up_to"], options["rows"], say),
        "alternatives": lambda: alternatives(options["alternative_tokens"], options["rows"], say),
        "one_layer": lambda: one_layer(options["one_layer_tokens"], options["rows"], say),
    }
    for part in options["parts"]:
        if part not in parts:
            raise ValueError(f"gpu.parts={part}: must be among {', '.join(parts)}")
        parts[part]()
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What a sweep costs beside the plain forward at the same length, in time and in memory."""
    out = {}
    for row in rows:
        if "of_forward" in row:
            out[f"{row['case']} / forward, time, {row['tokens']} tokens"] = row["of_forward"]
            out[f"{row['case']} - forward, peak GiB, {row['tokens']} tokens"] = row["more_gib"]
    return out


def _tried(run: Callable[[], object], warm_up: bool = True) -> dict[str, Any]:
    """`measured`, or that memory did not suffice."""
    try:
        return measured(run, warm_up=warm_up)
    except torch.cuda.OutOfMemoryError:
        return {"failed": "out of device memory"}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _forward(model: HFModel, documents: Documents) -> Callable[[], object]:
    return lambda: model.observe(documents[0].tokens[None], lambda acts: None, [])


def jobs(lengths: Sequence[int], all_rows_up_to: int, rows: int, say: Say) -> None:
    """Plain forward and sweeps at every length."""
    model = random_llama()
    scorer = Lightning(model, INDEXER)
    for length in lengths:
        documents = random_documents(1, length, LLAMA_8B["vocab_size"])
        forward = measured(_forward(model, documents), 3 if length < LONG else 1, warm_up=length < LONG)
        say({"case": "forward", "tokens": length, **forward})
        runs: list[tuple[str, int, int | None]] = [("cells_1", 1, rows), ("cells_200", 200, rows)]
        if length <= all_rows_up_to:
            runs.append(("cells_200_all_rows", 200, None))
        for name, count, some in runs:
            once = some is None or length >= LONG  # kernels are warm by then, and a run takes long
            found = _tried(partial(job, model, scorer, documents, long_cells(count), some), warm_up=not once)
            if "seconds" in found:
                found["of_forward"] = found["seconds"] / forward["seconds"]
                found["more_gib"] = found["peak_gib"] - forward["peak_gib"]
            say({"case": name, "tokens": length, "rows": some or length, **found})


def one_layer(length: int, rows: int, say: Say) -> None:
    """A single layer at a length that a whole model would not be run at."""
    model = random_llama(layers=1)
    scorer = Lightning(model, INDEXER)
    documents = random_documents(1, length, LLAMA_8B["vocab_size"])
    cells = [Cell(c.scorer, replace(c.selection, candidate=None)) for c in long_cells(1)]
    say({"case": "forward, one layer", "tokens": length, **_tried(_forward(model, documents), warm_up=False)})
    found = _tried(partial(job, model, scorer, documents, cells, rows), warm_up=False)
    say({"case": "cells_1, one layer", "tokens": length, "rows": rows, **found})


def alternatives(lengths: Sequence[int], rows: int, say: Say) -> None:
    """The same 20 cells measured by this toolkit, without its kernels, cell by cell, and by a plain eager script (which
    knows all rows only, one scorer and no pools)."""
    from sparsity_lab.benchmark import eager_script

    model = random_llama()
    scorer = Lightning(model, INDEXER)
    for tokens in lengths:
        documents = random_documents(1, tokens, LLAMA_8B["vocab_size"])
        cells = [c for c in long_cells(20) if c.selection.topk <= tokens // 8]
        together = partial(job, model, scorer, documents, cells, rows)
        cases: dict[str, Callable[[], object]] = {
            "this toolkit": together,
            "tiled PyTorch softmax": partial(_without_kernels, together),
            "a pass a cell": partial(_one_by_one, model, scorer, documents, cells[::SOME], rows),
            "eager, output_attentions": partial(eager_script, model.model, [documents[0].tokens], cells),
        }
        for name, run in cases.items():
            some = tokens if name.startswith("eager") else rows
            number = len(cells[::SOME]) if name == "a pass a cell" else len(cells)
            say({"case": name, "tokens": tokens, "cells": number, "rows": some, **_tried(run)})


def _one_by_one(model: HFModel, scorer: Lightning, documents: Documents, cells: Sequence[Cell], rows: int) -> None:
    for cell in cells:
        job(model, scorer, documents, [cell], rows)


def _without_kernels(run: Callable[[], object]) -> object:
    before = os.environ.get("SPARSITY_LAB_KERNELS")
    os.environ["SPARSITY_LAB_KERNELS"] = "0"
    try:
        return run()
    finally:
        if before is None:
            del os.environ["SPARSITY_LAB_KERNELS"]
        else:
            os.environ["SPARSITY_LAB_KERNELS"] = before


def kernel_times(length: int, say: Say) -> None:
    """Throughput of each kernel at `length`, all rows, beside attention's own forward and a plain matrix product."""
    from sparsity_lab.kernels import dense_mass as mass
    from sparsity_lab.kernels import index_scores as scores
    from sparsity_lab.kernels import select

    heads, key_heads, d, device = 32, 8, 128, "cuda"
    q = torch.randn(heads, length, d, device=device, dtype=torch.bfloat16)
    k = torch.randn(key_heads, length, d, device=device, dtype=torch.bfloat16)
    w = torch.randn(heads, length, device=device)
    positions = torch.arange(length, device=device)
    pairs = heads * length * length / 2
    side = 8192
    square = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    lse = mass.row_lse(q, k, positions, d**-0.5)
    attention = lambda: F.scaled_dot_product_attention(q[None], k[None], k[None], is_causal=True, enable_gqa=True)  # noqa: E731
    index = lambda **kw: scores.index_scores(q, k[0], w, positions + 1, **kw)  # noqa: E731
    runs: dict[str, tuple[Callable[[], object], float]] = {
        "matrix product": (lambda: square @ square, 2 * side**3),
        "attention forward (SDPA)": (attention, 4 * d * pairs),
        "row log-sum-exp": (lambda: mass.row_lse(q, k, positions, d**-0.5), 2 * d * pairs),
        "dense mass": (lambda: mass.dense_mass(q, k, positions, d**-0.5, lse=lse), 2 * d * pairs),
        "dense mass, plain Triton": (
            lambda: mass.dense_mass(q, k, positions, d**-0.5, lse=lse, config=mass.Config()),
            2 * d * pairs,
        ),
        "dense mass, ratio 4": (lambda: mass.dense_mass(q, k, positions, d**-0.5, lse=lse, ratio=4), 2 * d * pairs),
        "index scores": (index, 2 * d * pairs),
        "index scores and blocks": (lambda: index(block_size=8), 2 * d * pairs),
        "block maxima alone": (lambda: index(block_size=8, scores=False), 2 * d * pairs),
    }
    for name, (run, flops) in runs.items():
        found = _quick(run)
        say({"kernel": name, "tokens": length, "rows": length, "ms": found, "tflops": flops / found / 1e9})
    rows = positions[length // 64 :: 32]
    some = torch.randn(len(rows), length, device=device)
    say(
        {
            "kernel": "top 512 of a row",
            "tokens": length,
            "rows": len(rows),
            "ms": _quick(lambda: select.top_positions(some, 512)),
        }
    )
    say({"kernel": "stable sort", "tokens": length, "rows": len(rows), "ms": _quick(lambda: some.sort(stable=True))})
    say({"kernel": "dense mass", "tokens": length, "rows": "error", **_mass_error(q, k, rows[::16])})


def _mass_error(q: Tensor, k: Tensor, rows: Tensor) -> dict[str, float]:
    from sparsity_lab.kernels import dense_mass as mass

    ours = mass.dense_mass(q[:, rows].contiguous(), k, rows, q.shape[-1] ** -0.5)
    want = mass.reference(q[:, rows], k, rows, q.shape[-1] ** -0.5)
    return {"relative_error": float((ours - want).norm() / want.norm())}


def _quick(run: Callable[[], object], repeats: int = 10) -> float:
    """Mean milliseconds after a warm-up."""
    for _ in range(3):
        run()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / repeats
