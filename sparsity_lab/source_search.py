"""Search for index sources and a candidate source over an ablation's results: what is best, what it costs, what it
measures, and files that the experiments take as they are.

    placements.csv                      a row a method, number of sources, k, with and without a pool
    topologies.json                     name -> selection and `Topology.describe()`
    experiment/<name>.yaml              for recall.py:  --config-dir FOLDER experiment=<name>
    experiment/distill/<name>.yaml      for distill.py: --config-dir FOLDER experiment=distill/<name>
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from sparsity_lab import cost
from sparsity_lab.ablation_run import AblationResults
from sparsity_lab.ablation_table import choose, layers_of, matrix, reuse_means, source_means
from sparsity_lab.cells import Candidate, Cell, Selection
from sparsity_lab.lightning import IndexerConfig
from sparsity_lab.placement import placements
from sparsity_lab.results import Results, write_table, write_text
from sparsity_lab.topology import Topology

INDEX_PARTS = ("index_projection", "index_scan", "block_level")


def coverage_matrix(results: AblationResults, topk: int) -> np.ndarray:
    """C[a, l], the mean coverage of layer l with what layer a selected, float64 [L, L], NaN where l < a.

    Raises:
        ValueError: layers that were not measured: each needs to be served.
    """
    layers = layers_of(results)
    if layers != list(range(len(layers))):
        raise ValueError(f"results: measured layers {layers} only; a search needs all of them, from 0 on")
    table = choose(reuse_means(results), topk=topk)
    return matrix(table, "coverage").reindex(index=layers, columns=layers).to_numpy(dtype=float)


def pool_factor(results: AblationResults, topk: int, block_size: int, pool_positions: int) -> np.ndarray:
    """factor[c, a], what the pool of layer c leaves of layer a's own single-level coverage, float64 [L, L]."""
    layers = layers_of(results)
    table = choose(source_means(results), topk=topk, block_size=block_size, pool_positions=pool_positions)
    kept, single = (
        matrix(table, name).reindex(index=layers, columns=layers) for name in ("coverage", "single_coverage")
    )
    return (kept / single).to_numpy(dtype=float)


def search(
    results: AblationResults, numbers: Sequence[int], *, topk: Sequence[int], pool: tuple[int, int] | None,
    latest_candidate: int | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Every method's placements: `name`, method, num_sources, topk, index_source_layers (0,4,8), candidate_*,
    predicted (mean coverage over layers).

    Args:
        pool: (pool_positions, block_size), one that was measured; None = single-level only.
        latest_candidate: no candidate source behind this layer. Late ones lose less coverage and save less cost.
    """
    rows = []
    for k in topk:
        coverage = coverage_matrix(results, k)
        factor = None if pool is None else pool_factor(results, k, block_size=pool[1], pool_positions=pool[0])
        for number in numbers:
            for (method, pooled), found in placements(coverage, factor, number, latest_candidate).items():
                size = pool[1] if pool is not None and pooled else None
                rows.append(
                    {
                        "name": f"{method.replace('_', '-')}-n{number}-k{k}" + ("-pool" if pooled else ""),
                        "method": method,
                        "num_sources": number,
                        "topk": k,
                        "index_source_layers": ",".join(map(str, found.sources)),
                        "candidate_source_layer": found.candidate,
                        "candidate_topk_blocks": pool[0] // size if pool is not None and size is not None else None,
                        "candidate_block_size": size,
                        "predicted": found.value,
                    }
                )
    pools = ["candidate_source_layer", "candidate_topk_blocks", "candidate_block_size"]
    return pd.DataFrame(rows).astype(dict.fromkeys(pools, "Int64"))


def selection_of(row: Any, results: AblationResults) -> Selection:
    """The selection of a row of `search`."""
    a = results.ablation
    pool = None
    if not pd.isna(row.candidate_source_layer):
        fields = (row.candidate_source_layer, row.candidate_topk_blocks, row.candidate_block_size)
        pool = Candidate(*(int(value) for value in fields))
    sources = tuple(int(layer) for layer in row.index_source_layers.split(","))
    return Selection(a.compress_ratio, int(row.topk), a.window, a.share, candidate=pool, index_source_layers=sources)


def topology_of(selection: Selection, num_layers: int) -> Topology:
    """Its layers' roles."""
    pool = selection.candidate
    return Topology.attached(
        num_layers, selection.compress_ratio, selection.index_source_layers, None if pool is None else pool.source_layer
    )


def index_costs(
    selections: Sequence[Selection], indexer: IndexerConfig, context_tokens: int, *, num_layers: int, hidden_size: int,
    heads: int, kv_heads: int, head_dim: int,
) -> pd.DataFrame:  # fmt: skip
    """`index_flops` and `index_bytes` of indexing for one decoded token, and `attention_bytes`, a row a selection (see
    `cost` for what is counted)."""
    rows = []
    for selection in selections:
        pool = selection.candidate
        model = cost.attached(
            "placement", topology_of(selection, num_layers), indexer, hidden_size=hidden_size, heads=heads,
            kv_heads=kv_heads, head_dim=head_dim, topk=selection.topk, window=selection.window,
            topk_blocks=None if pool is None else pool.topk_blocks,
            block_size=None if pool is None else pool.block_size,
        )  # fmt: skip
        parts = cost.decode_costs(model, context_tokens)
        index = [part for part in parts if part.part in INDEX_PARTS]
        rows.append(
            {
                "index_flops": sum(part.flops for part in index),
                "index_bytes": sum(part.bytes for part in index),
                "attention_bytes": sum(part.bytes for part in parts if part.part == "attention"),
            }
        )
    return pd.DataFrame(rows)


def cells_of(table: pd.DataFrame, results: AblationResults, label: str) -> list[Cell]:
    """The cells that measure the rows, each once."""
    return list(dict.fromkeys(Cell(label, selection_of(row, results)) for row in table.itertuples()))


def with_measured(table: pd.DataFrame, found: Results) -> pd.DataFrame:
    """The rows with `measured` (mean coverage over layers, then documents), its 95 % interval, and `error`, predicted -
    measured."""
    keys = ["topk", "index_source_layers", "candidate_source_layer", "candidate_topk_blocks", "candidate_block_size"]
    frame = found.frame(())[[*keys, "coverage", "coverage_low", "coverage_high"]]
    frame.columns = pd.Index([*keys, "measured", "measured_low", "measured_high"])
    out = table.merge(frame, on=keys, how="left", validate="many_to_one")
    return out.assign(error=out["predicted"] - out["measured"])


def write(folder: Path, table: pd.DataFrame, results: AblationResults) -> None:
    """All files of a search."""
    layers, told = len(layers_of(results)), {}
    for row in table.itertuples():
        selection, name = selection_of(row, results), str(row.name)
        told[name] = {
            "topk": selection.topk,
            "candidate_topk_blocks": selection.candidate and selection.candidate.topk_blocks,
            "candidate_block_size": selection.candidate and selection.candidate.block_size,
            "topology": topology_of(selection, layers).describe(),
        }
        write_text(folder / "experiment" / f"{name}.yaml", _recall_yaml(name, selection, row))
        write_text(folder / "experiment" / "distill" / f"{name}.yaml", _distill_yaml(name, selection))
    write_text(folder / "topologies.json", json.dumps(told, indent=1) + "\n")
    write_table(table, folder / "placements.csv")


def _recall_yaml(name: str, selection: Selection, row: Any) -> str:
    pool = selection.candidate
    fields = {
        "experiment_name": name,
        "selection": {
            "compress_ratio": selection.compress_ratio,
            "topk": selection.topk,
            "window": selection.window,
            "share": selection.share,
            "index_source_layers": list(selection.index_source_layers or ()),
            "candidate": {
                "source_layer": pool and pool.source_layer,
                "topk_blocks": pool and pool.topk_blocks,
                "block_size": pool and pool.block_size,
            },
        },
    }
    head = f"# @package _global_\n# Found by experiments/search_sources.py; predicted coverage {row.predicted:.4f}\n"
    return head + yaml.safe_dump(fields, sort_keys=False, default_flow_style=None)


def _distill_yaml(name: str, selection: Selection) -> str:
    sources = list(selection.index_source_layers or ())
    recipe = {"ratios": [selection.compress_ratio], "topk": [selection.topk], "index_source_layers": sources}
    head = (
        "# @package _global_\n# Train the indexers that this placement needs; found by experiments/search_sources.py\n"
    )
    return head + yaml.safe_dump({"experiment_name": name, "recipe": recipe}, sort_keys=False, default_flow_style=None)
