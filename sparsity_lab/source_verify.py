"""Placements measured for real, on documents that the ablation has not seen, with the cost of each beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from sparsity_lab import source_search
from sparsity_lab.ablation_run import AblationResults
from sparsity_lab.activations import ObservableModel
from sparsity_lab.config import chosen_scorer, scorer_label
from sparsity_lab.estimate import model_size
from sparsity_lab.job import ProgressFactory, Workspace, build_scorer, machine
from sparsity_lab.lightning import IndexerConfig, Lightning
from sparsity_lab.measurement import measure
from sparsity_lab.results import Store
from sparsity_lab.scorers import Scorer


def verified(
    table: pd.DataFrame,
    results: AblationResults,
    settings: Mapping[str, Any],
    folder: Path,
    progress: ProgressFactory,
    say: Callable[[str], None],
) -> pd.DataFrame:
    """The table of a search with costs and measured coverage, whose results go to `folder`/measured.

    Model, scorer and rows are the ablation's; settings: those of experiments/search_sources.py.
    Raises:
        ValueError: a source of documents without further ones.
    """
    told = results.manifest["config"]
    chosen, workspace = chosen_scorer(told["scorer"], told["model"]), Workspace.current()
    model, label = workspace.model(told["model"]), scorer_label(chosen)
    data = following(told["data"], **settings["verify"])
    documents = workspace.documents(data, model, json.dumps(told["model"], sort_keys=True))
    scorer = build_scorer(chosen, model)
    table = with_costs(table, results, model, scorer, settings["search"]["context_tokens"])
    cells = source_search.cells_of(table, results, label)
    store = Store(folder / "measured", {"config": settings, "model": {"name": model.name}, **machine()})
    with progress(f"{model.name}, {len(cells)} placements") as advance:
        found = measure(
            model, documents, cells, scorers={label: scorer}, envelope=False, detail_rows=0, store=store,
            progress=advance, say=say, **told["measure"],
        )  # fmt: skip
    return source_search.with_measured(table, found)


def following(data: Mapping[str, Any], *, skip: int | None, num_documents: int | None) -> dict[str, Any]:
    """Data settings for the documents behind those that were used, or from `skip` on."""
    if "skip" not in data:
        raise ValueError(
            f"verify: data={data['name']} has no documents beyond those of the ablation; set verify.num_documents=0"
        )
    count = data["num_documents"]
    start = data["skip"] + count if skip is None else skip
    return {**data, "skip": start, "num_documents": count if num_documents is None else num_documents}


def with_costs(
    table: pd.DataFrame, results: AblationResults, model: ObservableModel, scorer: Scorer, context_tokens: int
) -> pd.DataFrame:
    """The table with the costs of each placement, for learned indexers of their own shape and for other scorers as if
    they were indexers of the default shape; as it is, where the model's shape is not at hand."""
    size = model_size(results.manifest["config"]["model"])
    if size is None:
        return table
    files = scorer.files if isinstance(scorer, Lightning) else {}
    shape = files[results.ablation.compress_ratio].config if files else getattr(scorer, "config", IndexerConfig())
    costs = source_search.index_costs(
        [source_search.selection_of(row, results) for row in table.itertuples()], shape, context_tokens,
        num_layers=model.num_layers, hidden_size=model.hidden_size, heads=model.num_heads,
        kv_heads=model.num_kv_heads, head_dim=size.head_dim,
    )  # fmt: skip
    return pd.concat([table, costs], axis=1)
