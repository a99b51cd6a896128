"""Averages of an ablation: rankings of candidate sources, the smallest pool that is enough, matrices between layers.

Rows are averaged within a document, consumers within a document, then documents; intervals are 95 % by bootstrap over
documents. A source's `kept` is the coverage that its consumers keep with its pool as a share of what the same scores
keep without one.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from sparsity_lab.ablation import REUSE_KEYS, REUSE_METRICS, SOURCE_KEYS, SOURCE_METRICS
from sparsity_lab.ablation_joint import JOINT_KEYS, JOINT_METRICS
from sparsity_lab.ablation_run import AblationResults
from sparsity_lab.results import bootstrap_interval, mean_of_defined


def _averages(tallies: pd.DataFrame, keys: Sequence[str], names: Sequence[str]) -> pd.DataFrame:
    """Means over rows, a row a document."""
    out = tallies[["document", *keys]].copy()
    for name in names:
        count = tallies[f"{name}_n"]
        out[name] = tallies[f"{name}_sum"] / count.where(count > 0)
    return out


def source_means(results: AblationResults) -> pd.DataFrame:
    """SOURCE_METRICS and `loss` (single-level coverage - coverage) by document and SOURCE_KEYS."""
    table = _averages(results.source, SOURCE_KEYS, SOURCE_METRICS)
    return table.assign(loss=table["single_coverage"] - table["coverage"])


def reuse_means(results: AblationResults) -> pd.DataFrame:
    """REUSE_METRICS by document and REUSE_KEYS."""
    return _averages(results.reuse, REUSE_KEYS, REUSE_METRICS)


def joint_means(results: AblationResults) -> pd.DataFrame:
    """JOINT_METRICS by document and JOINT_KEYS."""
    return _averages(results.joint, JOINT_KEYS, JOINT_METRICS)


def matrix(table: pd.DataFrame, value: str) -> pd.DataFrame:
    """Mean over documents, sources down, consumers across."""
    return table.groupby(["source", "consumer"])[value].mean().unstack()


def layers_of(results: AblationResults) -> list[int]:
    """The layers that were compared."""
    return sorted(int(layer) for layer in results.reuse["consumer"].unique())


def choose(
    table: pd.DataFrame, *, topk: int | None = None, block_size: int | None = None, pool_positions: int | None = None
) -> pd.DataFrame:
    """The rows of one budget, block size and pool size, where given.

    Raises:
        ValueError: a value that was not measured, by its key.
    """
    for name, value in (("topk", topk), ("block_size", block_size), ("pool_positions", pool_positions)):
        if value is None:
            continue
        if value not in set(table[name]):
            raise ValueError(f"{name}={value}: not measured; there are {sorted(int(v) for v in table[name].unique())}")
        table = table[table[name] == value]
    return table


def compared_sources(layers: Sequence[int], sources: Sequence[int] | None = None) -> list[int]:
    """The sources to rank: by default the first two thirds of the layers, so that a third can serve as consumers.

    Raises:
        ValueError: sources that were not measured, or none after which a layer comes.
    """
    chosen = sorted(set(sources)) if sources is not None else list(layers[: max(1, 2 * len(layers) // 3)])
    unknown = [layer for layer in chosen if layer not in layers]
    if unknown or not chosen or chosen[-1] >= layers[-1]:
        raise ValueError(f"sources={chosen}: must be measured layers with one of {list(layers)} after the last")
    return chosen


def over_consumers(results: AblationResults, sources: Sequence[int], *, common: bool = True) -> pd.DataFrame:
    """Means over consumers by document, source, block size, pool size and k, with `kept`, `loss` and `consumers`.

    common: only consumers behind all `sources`. Otherwise each source's own, which flatters late sources: they have
    fewer and nearer consumers.
    """
    table = source_means(results)
    table = table[table["source"].isin(list(sources))]
    if common:
        table = table[table["consumer"] > max(sources)]
    groups = table.groupby(["document", "source", "block_size", "pool_positions", "topk"], sort=True)
    out = groups[[*SOURCE_METRICS, "loss"]].mean()
    out["kept"] = out["coverage"] / out["single_coverage"]
    out["consumers"] = groups["consumer"].nunique()
    return out.reset_index()


def ranking(
    results: AblationResults, sources: Sequence[int], *, topk: int, block_size: int, pool_positions: int,
    common: bool = True,
) -> pd.DataFrame:  # fmt: skip
    """Sources by falling `kept`, with `kept_low`, `kept_high`, `loss`, `pool_recall`, `consumers`, `documents`."""
    chosen = {"topk": topk, "block_size": block_size, "pool_positions": pool_positions}
    table = choose(over_consumers(results, sources, common=common), **chosen)
    wide = table.pivot(index="source", columns="document", values="kept")
    low, high = bootstrap_interval(wide.to_numpy(dtype=float))
    out = table.groupby("source")[["loss", "pool_recall", "consumers"]].mean()
    out["kept"], out["kept_low"], out["kept_high"] = mean_of_defined(wide.to_numpy(dtype=float)), low, high
    out["documents"] = wide.notna().sum(axis=1)
    return out.reset_index().sort_values("kept", ascending=False, kind="stable", ignore_index=True)


def smallest_pools(
    results: AblationResults, sources: Sequence[int], *, keep: float = 0.99, common: bool = True
) -> pd.DataFrame:
    """The smallest pool measured whose mean `kept` is at least `keep`, by source, block size and k; null where none is.

    Raises:
        ValueError: keep is no share.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep}: must be a share, above 0 and at most 1")
    keys = ["source", "block_size", "topk"]
    table = over_consumers(results, sources, common=common)
    table = table.groupby([*keys, "pool_positions"], sort=True)["kept"].mean().reset_index()
    enough = table[table["kept"] >= keep].groupby(keys, sort=True).first()
    every = table[keys].drop_duplicates().set_index(keys)
    return every.join(enough).reset_index().astype({"pool_positions": "Int64"})
