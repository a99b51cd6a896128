"""Teacher-forced against free-running: the same measurement with every layer dense, and with a selection really applied
(`model.attention=sparse`), so that later layers see what sparse earlier ones made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sparsity_lab.ablation_run import AblationResults
from sparsity_lab.ablation_table import compared_sources, layers_of, over_consumers
from sparsity_lab.compare import against
from sparsity_lab.results import Results, bootstrap_interval, mean_of_defined

SIDES = ("teacher", "free")
CELL = ["topk", "block_size", "pool_positions"]


def compared_rankings(
    teacher: AblationResults, free: AblationResults, sources: Sequence[int] | None = None, *, common: bool = True
) -> pd.DataFrame:
    """Both rankings of candidate sources, a row a budget, block size, pool size and source, over the documents that
    both have: `kept_teacher`, `kept_free` with `_low` and `_high`, `rank_teacher`, `rank_free` (1 = best), `documents`.

    sources, common: see `ablation_table.compared_sources` and `over_consumers`.
    Raises:
        ValueError: two ablations that differ in more than the attention, or nothing in common.
    """
    _check(teacher.manifest["identity"], free.manifest["identity"])
    shared = set(teacher.source["document"]) & set(free.source["document"])
    if not shared:
        raise ValueError("no document in common, so nothing can be paired")
    sides = []
    for side, results in zip(SIDES, (teacher, free), strict=True):
        some = dataclasses.replace(results, source=results.source[results.source["document"].isin(shared)])
        chosen = compared_sources(layers_of(teacher), sources)
        wide = over_consumers(some, chosen, common=common).pivot(
            index=[*CELL, "source"], columns="document", values="kept"
        )
        values = wide.to_numpy(dtype=float)
        low, high = bootstrap_interval(values)
        kept = pd.DataFrame(
            {f"kept_{side}": mean_of_defined(values), f"kept_{side}_low": low, f"kept_{side}_high": high}, wide.index
        )
        kept[f"rank_{side}"] = kept.groupby(CELL)[f"kept_{side}"].rank(ascending=False, method="min").astype("Int64")
        sides.append(kept)
    table = sides[0].join(sides[1], how="inner")
    return table.assign(documents=len(shared)).reset_index()


def rank_agreement(table: pd.DataFrame) -> pd.DataFrame:
    """A row a budget, block size and pool size of `compared_rankings`: `rank_correlation` (Spearman's, over sources;
    null where they do not differ), the `best_teacher` and `best_free` source, and `regret`, what free-running loses of
    `kept` when the teacher-forced best is taken instead of its own."""
    rows: list[dict[str, Any]] = []
    for cell, some in table.groupby(CELL, sort=True):
        best = {side: some.iloc[int(some[f"kept_{side}"].to_numpy().argmax())] for side in SIDES}
        rows.append(
            {
                **dict(zip(CELL, cell, strict=True)),
                "rank_correlation": some["kept_teacher"].rank().corr(some["kept_free"].rank()),
                "best_teacher": int(best["teacher"]["source"]),
                "best_free": int(best["free"]["source"]),
                "regret": float(best["free"]["kept_free"] - best["teacher"]["kept_free"]),
                "sources": len(some),
                "documents": int(some["documents"].iloc[0]),
            }
        )
    return pd.DataFrame(rows)


def _check(teacher: Mapping[str, Any], free: Mapping[str, Any]) -> None:
    differ = {key for key in {*teacher, *free} if teacher.get(key) != free.get(key)}
    if differ - {"attention"}:
        raise ValueError(f"two ablations with different settings ({', '.join(sorted(differ - {'attention'}))})")
    if not differ:
        raise ValueError("both were run with the same attention; make one with model.attention=sparse")


def applied_of(manifest: Mapping[str, Any]) -> str | None:
    """What a run applied, in a few words, from its manifest; None where nothing was."""
    applied = manifest.get("config", {}).get("model", {}).get("applied")
    if applied is None:
        return None
    return f"{applied['scorer']['name']} ratio {applied['compress_ratio']} top-{applied['topk']}"


def compared_coverage(teacher: Results, free: Results, metric: str = "coverage") -> pd.DataFrame:
    """A metric of both runs by layer, a row a cell under test and layer, over the documents that both have.

    Beside the fields of the cells: `<metric>_teacher`, `<metric>_free` and `difference` (free - teacher, paired by
    document), each with `_low` and `_high`; `documents`.

    Raises:
        ValueError: nothing to pair, or the second run applied no selection.
    """
    if applied_of(free.manifest) is None or applied_of(teacher.manifest) is not None:
        raise ValueError("the first run must be of the dense model, the second with model.attention=sparse")
    paired = against(free, teacher, "free", "teacher")
    documents = set(free.tallies["document"]) & set(teacher.tallies["document"])
    frames = {
        "free": free.only(paired.pairs, documents),
        "teacher": teacher.only(paired.pairs.values(), documents),
        "difference": paired,
    }
    back = {theirs: ours for ours, theirs in paired.pairs.items()}
    table = None
    for name, results in frames.items():
        frame = results.frame(("layer",), intervals=[metric])
        column = name if name == "difference" else f"{metric}_{name}"
        values = frame[["cell_id", "layer", metric, f"{metric}_low", f"{metric}_high"]]
        values = values.set_axis(["cell_id", "layer", column, f"{column}_low", f"{column}_high"], axis=1)
        if name == "teacher":
            values = values.assign(cell_id=values["cell_id"].map(back))
        table = values if table is None else table.merge(values, on=["cell_id", "layer"])
    assert table is not None
    return free.only(paired.pairs).cell_frame().merge(table, on="cell_id").assign(documents=len(documents))
