"""What a sweep will cost, before a model is loaded: passes, cells, time and peak memory (`dry_run=true`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsity_lab.cells import with_envelope
from sparsity_lab.config import Job
from sparsity_lab.dense import default_tile

MIB = 2**20
PARTS = 12  # arrays of a row tile's size that are alive at once, found by measuring (benchmarks/)


@dataclass(frozen=True)
class Size:
    """Shape of a model, as far as cost depends on it."""

    parameters: int  # without the embedding table, which costs no arithmetic
    layers: int
    heads: int
    head_dim: int
    weights_bytes: int


def model_size(settings: Mapping[str, Any]) -> Size | None:
    """Read a model's shape from its configuration; its weights are neither read nor fetched. None when there is no
    configuration at hand (a hub model that was never fetched, say), or for a model with sparse attention of its own,
    whose cost follows from other things."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from sparsity_lab.models import native_selection

    if "size" in settings:
        return None
    path = settings.get("path")
    if path is None:
        from sparsity_lab.assets import cache_folder

        found = sorted(cache_folder().rglob("config.json")) if cache_folder().is_dir() else []
        if not found:
            return None
        path = str(found[0].parent)
    options = {"gguf_file": settings["gguf_file"]} if settings.get("gguf_file") else {}
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=not Path(path).is_dir(), **options)
        if native_selection(settings) is not None:
            return None
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError):
        return None
    text = config.get_text_config()
    everything = sum(p.numel() for p in model.parameters())
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    on_cpu = settings["device"] == "cpu" or not torch.cuda.is_available()
    each = 4 if settings["dtype"] in ("float32", "auto") and on_cpu else 2
    inner = everything - text.vocab_size * text.hidden_size
    return Size(inner, text.num_hidden_layers, text.num_attention_heads, width, everything * each)


def flops_per_second(device: str) -> float:
    """A quick look at how fast this machine multiplies float32 matrices (bfloat16 on a GPU)."""
    import torch

    from sparsity_lab.models.loading import resolve_device

    where = resolve_device(device)
    size, dtype = (4096, torch.bfloat16) if where.type == "cuda" else (1024, torch.float32)
    a = torch.randn(size, size, device=where, dtype=dtype)
    a @ a
    if where.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(4):
        b = a @ a
    float(b[0, 0])  # waits for a GPU
    return 4 * 2 * size**3 / (time.perf_counter() - start)


def describe(jobs: Sequence[Job]) -> str:
    """Lines to print: a pass each, then the whole."""
    lines, known = by_pass(jobs, _pass)
    return "\n".join([*lines, f"{len(jobs)} jobs, {len(lines)} passes{known} (nothing was measured: dry_run=true)"])


def by_pass(jobs: Sequence[Job], price: Callable[[Sequence[Job]], tuple[str, float | None]]) -> tuple[list[str], str]:
    """A line for the jobs of every pass, and the time of all of them in words; nothing where none is known.

    price: of the jobs of one pass, its line and its seconds, None = unknown.
    """
    passes: dict[str, list[Job]] = {}
    for job in jobs:
        passes.setdefault(job.pass_key, []).append(job)
    priced = [price(group) for group in passes.values()]
    seconds = sum(cost or 0.0 for _, cost in priced)
    return [line for line, _ in priced], f", about {minutes(seconds)} in all" if seconds else ""


def _pass(jobs: Sequence[Job]) -> tuple[str, float | None]:
    first = jobs[0]
    own = dict.fromkeys(cell for job in jobs for cell in job.cells)
    cells = with_envelope(own) if first.measure["envelope"] else list(own)
    failed = sum(len(job.failed) for job in jobs)
    data, length = first.data, first.data["length"]
    documents = -(-data["num_documents"] // data.get("num_shards", 1)) if data["num_documents"] else None
    head = (
        f"pass: {first.model['name']} on {data['name']}, {documents or 'all'} documents x {length} tokens; "
        f"{len(own)} cells, {len(cells)} with their envelope" + (f", {failed} impossible" if failed else "")
    )
    size = model_size(first.model) if first.model.get("kind") != "recorded" else None
    if size is None or documents is None:
        return f"{head}; time and memory unknown (no model configuration at hand, or sparse attention)", None
    rows = min(first.measure["rows"] or length, length)
    tile = min(first.measure["row_tile"] or default_tile(size.heads, length), rows)
    attention = 2 * size.layers * size.heads * size.head_dim * length**2  # causal half of q.k and p.v
    sampled = 2 * size.layers * size.heads * size.head_dim * rows * length
    walks = 40 * size.layers * rows * length * (4 + 0.05 * len(cells))  # memory-bound work, as operations
    flops = documents * (2 * size.parameters * length + attention + sampled + walks)
    seconds = flops / (
        0.5 * flops_per_second(first.model["device"])
    )  # whole models reach about half of a plain product
    memory = size.weights_bytes + 4 * tile * length * (size.heads + PARTS) + 16 * length * size.heads * size.head_dim
    return f"{head}; about {minutes(seconds)}, {memory / MIB:,.0f} MiB beside the libraries", seconds


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
