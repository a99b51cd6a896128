"""A small made-up Results: known numbers in known places, no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparsity_lab.metrics import METRICS
from sparsity_lab.results import Results, tally_frame

BOUNDS = ("oracle", "recency", "random")
LEVEL = {"oracle": 0.9, "quest": 0.7, "mean_key": 0.6, "recency": 0.4, "random": 0.2}
LAYERS = (0, 1, 2)


def tiny_results(
    scorers: Sequence[str] = ("quest",),
    ratios: Sequence[int] = (1, 4),
    topk: Sequence[int] = (16, 32, 64),
    pools: Sequence[tuple[int, int, int] | None] = (None,),
    documents: int = 3,
    saturated: Mapping[tuple[int, int], int] | None = None,
    undefined: Sequence[str] = (),
    **fields: Any,
) -> Results:
    """Cells of every scorer, ratio, k and pool (source layer, blocks, block size), and bounds for each ratio and k.

    saturated: (ratio, k) -> how many of the 10 rows. undefined: metrics that were not measured. fields: overrides of
    the cells' other fields, which also enter the cells' ids.
    """
    described = {"model": "tiny", "data": "lines", "length": 64, "share": "layer", "window": 8, "sampled_rows": 10}
    described |= fields
    cells: dict[str, dict[str, Any]] = {}
    for name, pool in [*((s, p) for s in scorers for p in pools), *((b, None) for b in BOUNDS)]:
        source, blocks, size = pool or (None, None, None)
        about = {"candidate_source_layer": source, "candidate_topk_blocks": blocks, "candidate_block_size": size}
        about |= {"scorer": name, "scorer_options": {"name": name}, **described}
        tail = "".join(f"-{key}{value}" for key, value in fields.items())
        for ratio in ratios:
            for k in topk:
                key = f"{name}-{pool}-{ratio}-{k}{tail}"
                cells[key] = {**about, "compress_ratio": ratio, "topk": k}
    return Results(_tallies(cells, documents, saturated or {}, undefined), cells, {})


def _tallies(
    cells: Mapping[str, Mapping[str, Any]],
    documents: int,
    saturated: Mapping[tuple[int, int], int],
    undefined: Sequence[str],
) -> Any:
    rows = [(key, document, layer) for key in cells for document in range(documents) for layer in LAYERS]
    out = [saturated.get((cells[key]["compress_ratio"], cells[key]["topk"]), 0) for key, _, _ in rows]
    counted = 10 - np.asarray(out)
    columns: dict[str, Any] = {
        "cell_id": [key for key, _, _ in rows],
        "document": [f"document{document}" for _, document, _ in rows],
        "document_index": [document for _, document, _ in rows],
        "layer": [layer for _, _, layer in rows],
        "bucket": [32] * len(rows),
        "rows": counted,
        "saturated": out,
        "empty": [0] * len(rows),
    }
    value = np.array([level(cells[key]) + 0.01 * document + 0.02 * layer for key, document, layer in rows])
    pooled = np.array([cells[key]["candidate_source_layer"] is not None for key, _, _ in rows])
    for name in METRICS:
        n = counted * (0 if name in undefined else 1) * (pooled if "pool" in name else 1)
        columns[f"{name}_sum"] = value * n
        columns[f"{name}_n"] = n
    return tally_frame(columns)


def level(cell: Mapping[str, Any]) -> float:
    """Grows a little with k and the pool."""
    pool = 0.0 if cell["candidate_source_layer"] is None else -0.05 - 0.001 * cell["candidate_source_layer"]
    return LEVEL[cell["scorer"]] + pool + 0.0002 * cell["topk"]
