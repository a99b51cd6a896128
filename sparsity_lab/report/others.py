"""What a report says of ablations, distillations and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from sparsity_lab import plot
from sparsity_lab.ablation_run import AblationResults
from sparsity_lab.ablation_table import compared_sources, layers_of, ranking
from sparsity_lab.evaluation.plot import draw_evaluation
from sparsity_lab.evaluation.summary import METRICS, EvaluationResults
from sparsity_lab.figures.choice import draw_loss
from sparsity_lab.figures.training import training_table
from sparsity_lab.folders import Tables
from sparsity_lab.pareto import priced_loss
from sparsity_lab.pricing import Setting, cell_of
from sparsity_lab.report.blocks import Section, Text, number, pictures, table, word
from sparsity_lab.report.drawings import Drawing
from sparsity_lab.report.folders import Folder


def sections(folders: Sequence[Folder], setting: Setting) -> list[Section]:
    """A section for every folder that holds something else than measured cells."""
    out = []
    for i, folder in enumerate(folders):
        for kind, (title, tell) in _KINDS.items():
            if isinstance(folder.found, kind):
                out.append(Section(f"other-{i}", f"{title}: {folder.path.name}", tell(folder, setting)))
    return out


def _ablation(folder: Folder, setting: Setting) -> list[Any]:
    found: AblationResults = folder.found
    drawings: list[Drawing] = [
        ("Candidate sources, best first", lambda: plot.source_ranking(found)),
        ("What each consumer loses by each source's pool", lambda: plot.sources(found)),
        ("What the pool costs, by its size", lambda: plot.pool_sizes(found)),
        ("One layer's selection used by another", lambda: plot.reuse(found)),
        ("Where coverage is lost", lambda: plot.attribution(found)),
    ]
    return [*pictures(drawings), *_ranking(found)]


def _ranking(found: AblationResults) -> list[Any]:
    a = found.ablation
    cell = {
        "topk": a.topk[-1],
        "block_size": a.block_sizes[len(a.block_sizes) // 2],
        "pool_positions": a.pool_positions[len(a.pool_positions) // 2],
    }
    best = ranking(found, compared_sources(layers_of(found), None), common=True, **cell)
    rows = [
        [number(int(row["source"]), "{:d}"), number(row["kept"], low=row["kept_low"], high=row["kept_high"])]
        for _, row in best.iterrows()
    ]
    told = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in cell.items())
    caption = f"Candidate sources: share of single-level coverage kept with their pool ({told}), 95 % intervals"
    return [table(caption, ["source layer", "kept"], rows)]


def _distillation(folder: Folder, setting: Setting) -> list[Any]:
    tables: Tables = folder.found
    if "training" not in tables.tables:
        return [_plain(name, each) for name, each in tables.tables.items()]
    log = tables.frame("training")
    last = log[log["step"] == log["step"].max()]
    return [
        *pictures([("Training of the indexers", lambda: plot.training(training_table([folder.path])))]),
        _plain(f"Last evaluation, step {int(log['step'].max()):,}", last.drop(columns=["run"], errors="ignore")),
    ]


def _plain(caption: str, frame: pd.DataFrame) -> Any:
    """A frame as it is."""
    rows = [
        [number(value, "{:.6g}") if isinstance(value, int | float) else word(value) for value in row]
        for row in frame.astype(object).itertuples(index=False)
    ]
    return table(caption, [str(column).replace("_", " ") for column in frame], rows)


def _evaluation(folder: Folder, setting: Setting) -> list[Any]:
    found: EvaluationResults = folder.found
    frame = priced_loss([found], setting)
    names = [name for name in METRICS if name in frame and frame[name].notna().any()]
    rows = [
        [
            word(cell_of(found.cells[row["cell_id"]]).label()),
            word("no price" if row["dominated"] is None else "dominated" if row["dominated"] else "worth its price"),
            *(number(row[name], low=row.get(f"{name}_low"), high=row.get(f"{name}_high")) for name in names),
            number(row["relative_cost"]),
        ]
        for _, row in frame.iterrows()
    ]
    columns = ["configuration", "role", *(name.replace("_", " ") for name in names), "time of dense"]
    return [
        Text("Here the selection was applied while the model ran; differences are to the dense model, paired."),
        *pictures(
            [
                ("Cost against loss", lambda: draw_loss(frame, setting)),
                ("What selections cost the model's output", lambda: draw_evaluation(found)),
            ]
        ),
        table("Cells: means over documents with 95 % intervals", columns, rows),
    ]


_KINDS: dict[type, tuple[str, Callable[[Folder, Setting], list[Any]]]] = {
    AblationResults: ("Sources", _ablation),
    Tables: ("Indexers", _distillation),
    EvaluationResults: ("Applied to the running model", _evaluation),
}
