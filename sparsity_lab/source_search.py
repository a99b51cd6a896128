"""Search for index sources and a candidate source over an ablation's results: what is best, what it costs, what it
measures, and files that the experiments take as they are.

    placements.csv                      a row a method, number of sources, k, with and without a pool
    topologies.json                     name -> selection and `Topology.describe()`
    experiment/<name>.yaml              for recall.py and evaluate.py: --config-dir FOLDER experiment=<name>
    experiment/distill/<name>.yaml      for distill.py: --config-dir FOLDER experiment=distill/<name>
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from sparsity_lab import cost
from sparsity_lab.ablation_joint import Pool
from sparsity_lab.ablation_run import AblationResults
from sparsity_lab.ablation_table import choose, joint_means, layers_of, matrix, reuse_means
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
        raise ValueError(
            f"results: measured layers {layers} only; a search needs all of them, from 0 on (a model with an indexer "
            "of its own cannot be searched: its other layers select nothing)"
        )
    table = choose(reuse_means(results), topk=topk)
    return matrix(table, "coverage").reindex(index=layers, columns=layers).to_numpy(dtype=float)


def pooled_coverage(results: AblationResults, topk: int, pool: Pool) -> np.ndarray:
    """J[c, a, l], the mean coverage of layer l with what layer a selected inside the pool of layer c, float64
    [L, L, L], NaN unless c < a <= l.

    Raises:
        ValueError: a pool whose selections were not followed to the layers that reuse them.
    """
    measured = [list(one) for one in results.ablation.joint_pools]
    if list(pool) not in measured:
        raise ValueError(
            f"search.pool_positions={pool[0]}, search.block_size={pool[1]}: the results have ablation.joint_pools="
            f"{measured}; run experiments/ablate_source.py with that pool, or search single-level "
            "(search.pool_positions=null)"
        )
    table = choose(joint_means(results), topk=topk, pool_positions=pool[0], block_size=pool[1])
    means = table.groupby(["candidate", "source", "consumer"])["coverage"].mean()
    out = np.full((len(layers_of(results)),) * 3, np.nan)
    out[tuple(means.index.to_frame().to_numpy(dtype=int).T)] = means
    return out


def search(
    results: AblationResults, numbers: Sequence[int], *, topk: Sequence[int], pool: Pool | None,
    latest_candidate: int | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Every method's placements: `name`, method, num_sources, topk, index_source_layers (0,4,8), candidate_*,
    pooled_sources (index sources that search in the pool), predicted (mean coverage over layers).

    Args:
        pool: one of the results' `joint_pools`; None = single-level only.
        latest_candidate: no candidate source behind this layer. Late ones lose less coverage and save less cost.
    """
    rows = []
    for k in topk:
        coverage = coverage_matrix(results, k)
        inside = None if pool is None else pooled_coverage(results, k, pool)
        for number in numbers:
            for (method, pooled), found in placements(coverage, inside, number, latest_candidate).items():
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
                        "pooled_sources": 0
                        if found.candidate is None
                        else sum(i > found.candidate for i in found.sources),
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
    return replace(a.selection(int(row.topk), pool), index_source_layers=sources)


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


def shown(table: pd.DataFrame, latest_candidate: int | None) -> str:
    """The table as a person reads it."""
    names = ["name", "index_source_layers", "candidate_source_layer", "pooled_sources", "predicted", "measured",
             "index_flops", "index_bytes"]  # fmt: skip
    text = table[[name for name in names if name in table]].to_string(index=False)
    if latest_candidate is None and table["candidate_source_layer"].notna().any():
        text += (
            "\nLate candidate sources predict best, but few index sources are left to search in their pool, so little "
            "is saved; search.latest_candidate=LAYER allows no later one."
        )
    return text


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
        write_text(folder / "experiment" / f"{name}.yaml", _selection_yaml(selection, row))
        write_text(folder / "experiment" / "distill" / f"{name}.yaml", _distill_yaml(name, selection))
    write_text(folder / "topologies.json", json.dumps(told, indent=1) + "\n")
    write_table(table, folder / "placements.csv")


def _selection_yaml(selection: Selection, row: Any) -> str:
    """The selection and nothing else, so that every experiment with one keeps to its own results folder."""
    fields = {"selection": selection.settings()}
    head = f"# @package _global_\n# Found by experiments/search_sources.py; predicted coverage {row.predicted:.4f}\n"
    return head + yaml.safe_dump(fields, sort_keys=False, default_flow_style=None)


def _distill_yaml(name: str, selection: Selection) -> str:
    recipe = {
        "ratios": [selection.compress_ratio],
        "topk": [selection.topk],
        "index_source_layers": list(selection.index_source_layers or ()),
        "window": selection.window,
        "exclude_window": selection.exclude_window,
    }
    head = (
        "# @package _global_\n# Train the indexers that this placement needs; found by experiments/search_sources.py\n"
    )
    return head + yaml.safe_dump({"experiment_name": name, "recipe": recipe}, sort_keys=False, default_flow_style=None)
