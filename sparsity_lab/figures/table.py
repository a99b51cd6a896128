"""The tables behind the figures: which cells to show and what to call them. No drawing here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from sparsity_lab.compare import POOL as POOL_FIELDS
from sparsity_lab.compare import Difference
from sparsity_lab.measurement import ENVELOPE
from sparsity_lab.metrics import METRICS
from sparsity_lab.results import ORDER, Results

POOL = list(POOL_FIELDS)
REUSE = "index_source_layers"
CURVE = ["scorer", "scorer_options", REUSE, *POOL]  # what tells the curves of one panel and ratio apart
TITLES = {"recall": "Recall of dense attention's top-k", "coverage": "Coverage of dense attention"}
COUNTS = ["rows", "saturated", "empty", "documents"]


def curve_table(
    results: Results,
    metric: str | Sequence[str],
    *,
    layer: int | None = None,
    by: Sequence[str] = (),
    scorer: str | Iterable[str] | None = None,
    ratio: int | Iterable[int] | None = None,
    topk: int | Iterable[int] | None = None,
    where: str | None = None,
    strict: bool = True,
) -> pd.DataFrame:
    """Tidy table behind a figure: a row a cell (and `by`), each metric with its `_low` and `_high`.

    Beside `Results.frame`'s columns: `curve` (the label of scorer and pool), `bound` (oracle, recency or random without
    a pool, there to frame the others), `saturated_share` (of the rows with something visible).

    Args:
        layer: one layer; None averages over layers within each document (unless `by` has "layer").
        scorer, ratio, topk: only these. where: pandas query over `Results.frame`. All choose among the cells under
            test; the bounds of what is left (same ratio, k, model, data ...) always come along. A choice that only
            bounds meet shows those.
        strict: refuse what cannot be drawn: cells that look the same, no value defined.
    Raises:
        ValueError: no such metric, layer, scorer or ratio, a query that fails, nothing left, nothing measured, or two
            cells that look the same.
    """
    metrics = [metric] if isinstance(metric, str) else list(metric)
    for name in metrics:
        if name not in METRICS:
            raise ValueError(f"metric={name!r}: must be one of {', '.join(METRICS)}")
    keys = ("layer", *(b for b in by if b != "layer")) if layer is not None else tuple(by)
    every = where is not None and ("_low" in where or "_high" in where)
    table = results.frame(keys, intervals=METRICS if every else metrics)
    if table.empty:
        raise ValueError("nothing measured yet")
    if layer is not None:
        present = sorted(set(results.tallies["layer"]))
        if layer not in present:
            raise ValueError(f"layer={layer}: measured were {_spans(present)}")
        table = table[table["layer"] == layer].copy()
    table["scorer_options"] = table["scorer_options"].map(lambda o: json.dumps(o, sort_keys=True))
    table[POOL] = table[POOL].apply(pd.to_numeric).astype(float)
    table[REUSE] = table.get(REUSE)  # results of before there was reuse
    table["bound"] = table["scorer"].isin(ENVELOPE) & table[[REUSE, *POOL]].isna().all(axis=1)
    table["saturated_share"] = table["saturated"] / (table["rows"] + table["saturated"])
    table = choose(table, where, scorer=scorer, ratio=ratio, topk=topk).astype(dict.fromkeys(POOL, "Int64"))
    if strict:
        _refuse_twins(table, keys)
    if strict and table[metrics].isna().all(axis=None):
        why = "every row is saturated" if not table["rows"].any() else "not measured for these cells"
        raise ValueError(f"{', '.join(metrics)}: nothing to show, {why}")
    table["curve"] = curve_labels(table)
    order = [*(c for c in ORDER if c in table), *(c for c in context_columns(table) if c not in ORDER), *keys]
    table = table.sort_values(order, na_position="first")  # no pool before the pools
    described = [c for c in table if c not in METRICS and not str(c).endswith(("_low", "_high"))]
    values = [f"{name}{end}" for name in metrics for end in ("", "_low", "_high")]
    return table[[*described, *values]].reset_index(drop=True)


def choose(table: pd.DataFrame, where: str | None, **wanted: Any) -> pd.DataFrame:
    """The cells asked for and their bounds; see `curve_table`."""
    kept = table
    for key, value in wanted.items():
        column = "compress_ratio" if key == "ratio" else key
        if value is None:
            continue
        values = [value] if isinstance(value, (str, int)) else list(value)
        unknown = [v for v in values if v not in set(table[column])]
        if unknown:
            present = ", ".join(map(str, sorted(set(table[column]))))
            raise ValueError(f"{key}={unknown[0]}: not in these results, which have {present}")
        kept = kept[kept[column].isin(values)]
    if where is not None:
        kept = kept[_meets(kept, where)]
    if kept.empty:
        raise ValueError("no cell is left: no measured cell has this scorer, ratio, topk and where together")
    tested = kept[~kept["bound"]]
    if tested.empty:
        return kept
    same = [*context_columns(table), "compress_ratio", "topk"]
    framed = pd.MultiIndex.from_frame(table[same]).isin(pd.MultiIndex.from_frame(tested[same]))
    return table[table.index.isin(tested.index) | (table["bound"] & framed)]


def _meets(table: pd.DataFrame, where: str) -> pd.Series:
    try:
        mask = table.eval(where)
    except Exception as error:  # pandas raises whatever the expression's parts raise
        raise ValueError(f"where={where!r}: {(str(error) or repr(error)).splitlines()[0]}") from error
    if not isinstance(mask, pd.Series) or not pd.api.types.is_bool_dtype(mask.dtype):
        raise ValueError(f"where={where!r}: must be true or false for each row, as in 'topk <= 64'")
    return mask.fillna(False).astype(bool)


def context_columns(table: pd.DataFrame) -> list[str]:
    """Columns that describe a cell beside its curve, ratio and k: model, data, length, share, window ..."""
    known = {"cell_id", "topk", "compress_ratio", "layer", "bucket", "bound", "curve", "saturated_share"}
    known |= {*CURVE, *COUNTS, *METRICS}
    columns = [str(c) for c in table if c not in known and not str(c).endswith(("_low", "_high"))]
    return sorted(columns, key=lambda c: (ORDER.index(c) if c in ORDER else len(ORDER), c))


def varying(table: pd.DataFrame, columns: Iterable[str]) -> list[str]:
    """Those of the columns that hold more than one value."""
    return [c for c in columns if len(table[c].drop_duplicates()) > 1]


def _refuse_twins(table: pd.DataFrame, keys: Sequence[str]) -> None:
    same = [*context_columns(table), *CURVE, "compress_ratio", "topk", *keys]
    twins = table[table.duplicated(same, keep=False)]
    if len(twins):
        first, second = twins.sort_values(same)["cell_id"].iloc[:2]
        raise ValueError(
            f"cells {first} and {second} look the same but were measured on other text, rows or layers; "
            "show their results one folder at a time"
        )


def curve_labels(table: pd.DataFrame, leave_out: Sequence[str] = ()) -> pd.Series:
    """Short names of curves: the scorer, its options where one name has several, the layers that select where others
    reuse, and the pool where any has one.

    leave_out: fields of CURVE that the panel's title tells already.
    """
    options = {text: json.loads(text) or {} for text in table["scorer_options"].unique()}
    differing = {
        name: [k for k in sorted(set().union(*found)) if len({json.dumps(o.get(k)) for o in found}) > 1]
        for name, texts in table.groupby("scorer")["scorer_options"].unique().items()
        if (found := [options[text] for text in texts])
    }
    pooled = table[POOL[0]].notna().any()

    def label(row: Any) -> str:
        mine = ", ".join(f"{k}={options[row.scorer_options].get(k)}" for k in differing[row.scorer])
        parts = [] if "scorer" in leave_out else [row.scorer]
        parts += [f"({mine})"] if mine else []
        name = " ".join(parts)
        reuse = "" if pd.isna(row.index_source_layers) else f"selected in layers {row.index_source_layers}"
        return ", ".join(filter(None, (name, reuse, pool_label(row, leave_out) if pooled and not row.bound else "")))

    labels = [label(row) for row in table.itertuples(index=False)]
    return pd.Series(labels, index=table.index, dtype=object)


def pool_label(row: Any, leave_out: Sequence[str] = ()) -> str:
    """How `Cell.label` names a pool: blocks kept x positions a block, and the layer whose scores chose them."""
    if pd.isna(row.candidate_source_layer):
        return "no pool"
    size = "x".join(str(int(getattr(row, f))) for f in POOL[1:] if f not in leave_out)
    layer = "" if POOL[0] in leave_out else f"of layer {int(row.candidate_source_layer)}"
    return " ".join(filter(None, ("pool", size, layer)))


def field_label(field: str, value: Any) -> str:
    """A value with just enough words around it to be understood in a title."""
    if field == "share":
        return f"one selection a {str(value).replace('_', ' ').replace('kv', 'KV')}"
    forms = {
        "model": "{}",
        "data": "{}",
        "scorer": "{}",
        "curve": "{}",
        "dtype": "{}",
        "device": "{}",
        "compress_ratio": "ratio {}",
        "length": "{} tokens",
        "candidate_source_layer": "pools of layer {}",
        "candidate_topk_blocks": "pools of {} blocks",
        "candidate_block_size": "blocks of {}",
        "sampled_rows": "{} rows",
    }
    if field == "sampled_rows" and pd.isna(value):
        return "all rows"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return forms.get(field, field.replace("_", " ") + " {}").format(value)


def percent_range(shares: pd.Series) -> str:
    """One percentage, or the lowest and highest over the k of a curve. The blanks in it do not break."""
    texts = list(dict.fromkeys(f"{100 * share:.0f}" for share in (shares.min(), shares.max())))
    return "\u2013".join(texts) + "\u00a0%"


def _spans(numbers: Sequence[int]) -> str:
    """First to last layer, or the list when there are holes."""
    whole = list(range(numbers[0], numbers[-1] + 1)) == list(numbers)
    if whole and len(numbers) > 2:
        return f"layers {numbers[0]} to {numbers[-1]}"
    return f"layers {', '.join(map(str, numbers))}"


def heading(results: Results, table: pd.DataFrame, metric: str, more: str = "") -> str:
    """Title: the metric, and model and data where all cells share them."""
    if isinstance(results, Difference):
        title = f"Difference in {metric.replace('_', ' ')}{more}, {results.what}"
    else:
        title = TITLES.get(metric, metric.replace("_", " ").capitalize()) + more
    common = [str(table[c].iloc[0]) for c in ("model", "data") if c in table and not varying(table, [c])]
    return f"{title}: {' on '.join(common)}" if common else title


def facts(
    results: Results, table: pd.DataFrame, layer: int | None = None, more: Sequence[str] = (), *, bands: str = "band"
) -> list[str]:
    """What was measured and how the values were averaged: what all cells share, for under the title.

    more: what else to say; bands: what shows the intervals; "" where nothing does.
    """
    changing = varying(table, context_columns(table))
    first = table.iloc[0]
    documents = sorted(set(table["documents"]))
    parts = [f"{documents[0]} to {documents[-1]} documents" if len(documents) > 1 else plural(documents[0], "document")]
    if "length" in table and "length" not in changing:
        parts[0] += f" x {first['length']:,} tokens"
    if "sampled_rows" in table and "sampled_rows" not in changing:
        parts.append(f"{field_label('sampled_rows', first['sampled_rows'])} a document")
    if "share" in table and "share" not in changing:
        parts.append(field_label("share", first["share"]))
    if layer is not None:
        parts.append(f"layer {layer}")
    elif "layer" not in table:
        parts.append(f"mean of {layers_averaged(results)}")
    if bands:
        parts.append(f"{bands}: 95 % interval over documents" if documents[-1] > 1 else "one document, so no interval")
    parts += more
    return [*parts, *results.told] if isinstance(results, Difference) else parts


def behind_sources(results: Results) -> Results:
    """Only the layers behind every candidate source layer: those that search in a pool, the same for all cells.

    Raises:
        ValueError: no pool, or no such layer was measured.
    """
    sources = [cell.get(POOL[0]) for cell in results.cells.values()]
    pooled = [int(source) for source in sources if source is not None]
    if not pooled:
        raise ValueError("no cell of these results has a candidate pool; measure with selection=two_level")
    tallies = results.tallies[results.tallies["layer"] > max(pooled)]
    if tallies.empty:
        raise ValueError(f"no measured layer lies behind candidate source layer {max(pooled)}")
    if isinstance(results, Difference):
        return results.restricted(tallies)
    return Results(tallies, results.cells, results.manifest)


def layers_averaged(results: Results) -> str:
    """How many layers the means are over; a cell may apply to some of the layers only."""
    counts = results.tallies.groupby("cell_id")["layer"].nunique()
    if counts.min() != counts.max():
        return f"each cell's own layers ({counts.min()} to {counts.max()})"
    return plural(int(counts.max()), "layer")


def plural(count: int, noun: str) -> str:
    """1 layer, 2 layers."""
    return f"{count} {noun}" + ("" if count == 1 else "s")
