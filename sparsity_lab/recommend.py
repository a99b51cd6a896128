"""The cheapest configuration that keeps enough of dense attention: in words, and as an experiment that measures it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from sparsity_lab import cost
from sparsity_lab.pareto import GROUP, kept, needed_layers, pareto
from sparsity_lab.pricing import Setting, architecture, cell_of
from sparsity_lab.results import Results, merge_results, write_text
from sparsity_lab.shape import caveats

FEW_DOCUMENTS = 8
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


@dataclass(frozen=True)
class Wish:
    """At least `coverage` of `metric` in at least the share `layers` of the layers; `sure`: so does the lower end of
    the interval.

    Raises:
        ValueError: a share outside (0, 1].
    """

    coverage: float = 0.95
    layers: float = 0.9
    metric: str = "coverage"
    sure: bool = False

    def __post_init__(self) -> None:
        for name in ("coverage", "layers"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be a share, above 0 and at most 1")

    def words(self) -> str:
        """As a sentence goes on after 'keeps'."""
        sure = ", with the whole interval" if self.sure else ""
        return f"at least {wished(self.coverage)} {self.metric} in at least {wished(self.layers)} of the layers{sure}"


@dataclass(frozen=True)
class Answer:
    """What was found for a wish at a setting.

    table: `pareto`'s, of one group, with `recommended`. chosen: its row, None where nothing qualifies; nearest: the
    priced row that keeps most. warnings: what to know before relying on it.
    """

    wish: Wish
    setting: Setting
    table: pd.DataFrame
    chosen: Mapping[str, Any] | None
    nearest: Mapping[str, Any]
    warnings: tuple[str, ...]

    @property
    def shown(self) -> Mapping[str, Any]:
        """The row that the answer tells about."""
        return self.nearest if self.chosen is None else self.chosen


def recommend(parts: Sequence[Results], setting: Setting, wish: Wish, where: str | None = None) -> Answer:
    """Choose among the measured cells that could be shipped.

    Args:
        parts: results as they were loaded, one a folder. where: pandas query over `pareto`'s columns, to choose from.
    Raises:
        ValueError: cells of several models, data or lengths, or none that can be priced.
    """
    table = pareto(parts, setting, metric=wish.metric, layers=wish.layers)
    if where is not None:
        table = _those(table, where)
    groups = table[GROUP].drop_duplicates()
    if len(groups) > 1:
        told = "; ".join(", ".join(f"{key}={value}" for key, value in row.items()) for _, row in groups.iterrows())
        raise ValueError(f"these results hold {told}: costs compare within one of them only; name one, or use --where")
    priced = table[table["unpriced"].isna()]
    if priced.empty:
        reasons = "; ".join(table["unpriced"].drop_duplicates())
        raise ValueError(f"no cell that could be recommended: {reasons}")
    enough = priced[priced["kept_low" if wish.sure else "kept"] >= wish.coverage]
    chosen = _first(enough.sort_values(["seconds", "kept"], ascending=[True, False]))
    nearest = _first(priced.sort_values(["kept", "seconds"], ascending=[False, True])) or {}
    table["recommended"] = False if chosen is None else table["cell_id"] == chosen["cell_id"]
    shown = chosen or nearest
    part = next(part for part in parts if shown["cell_id"] in part.cells)
    about = caveats(part.manifest, [shown], setting.context_tokens)
    about += _warnings(merge_results(parts), table, shown, setting, wish)
    return Answer(wish, setting, table, chosen, nearest, tuple(about))


def _first(table: pd.DataFrame) -> dict[str, Any] | None:
    return None if table.empty else {str(key): value for key, value in table.iloc[0].items()}


def _those(table: pd.DataFrame, where: str) -> pd.DataFrame:
    try:
        found = table.query(where)
    except Exception as error:  # pandas raises whatever the expression's parts raise
        raise ValueError(f"where={where!r}: {str(error).splitlines()[0]}") from error
    if found.empty:
        raise ValueError(f"where={where!r}: no cell is left")
    return found.reset_index(drop=True)


def _warnings(results: Results, table: pd.DataFrame, row: Mapping[str, Any], setting: Setting, wish: Wish) -> list[str]:
    """What to know before relying on the row's figures, the weightiest first."""
    length, out = int(row["length"]), []
    if setting.context_tokens != length:
        out.append(_extrapolation(row, setting, length))
    out += _late_rows(results, row, wish)
    if row["documents"] == 1:
        out.append("One document was measured, so there is no interval.")
    elif row["documents"] < FEW_DOCUMENTS:
        out.append(f"{row['documents']} documents were measured: intervals over so few are thin.")
    if row["kept_low"] < wish.coverage <= row["kept"]:
        out.append(f"The interval reaches below {wished(wish.coverage)}; --sure asks for its lower end too.")
    if row["saturated_share"] > 0.5:
        out.append(
            f"{percent(row['saturated_share'])} of its rows see no more than k positions and are left out: measure "
            "longer documents."
        )
    shape = (results.manifest.get("model") or {}).get("shape") or {}
    lacking = len(shape.get("attention_layers", ())) - int(row["num_layers"])
    if lacking > 0:
        out.append(f"{lacking} layers were not measured; the cost takes them to be like the others.")
    other = table[table["unpriced"].notna() & ~table["unpriced"].fillna("").str.contains("is a bound")]
    out += [f"{len(rows)} cells have no price: {reason}." for reason, rows in other.groupby("unpriced")]
    out.append(
        "Teacher-forced: the selection was not applied while the model ran, so what a layer misses does not reach the "
        "next one."
    )
    out.append("Times are roofline bounds of attention and indexing alone, to compare with, not forecasts.")
    return out


def _extrapolation(row: Mapping[str, Any], setting: Setting, length: int) -> str:
    k, at = int(row["topk"]), int(row["topk_at_context"])
    beyond = "EXTRAPOLATION: " if setting.context_tokens > length else ""
    told = f"{beyond}measured on documents of {length:,} tokens, priced at {setting.context_tokens:,}. "
    if setting.budget == "fixed":
        return f"{told}k = {k} is taken as it is (--budget fixed), though it covers less of a longer context."
    return told + (
        f"k = {k} is scaled to {at:,} (--budget scaled), pools alike: the share selected stays as measured, and what "
        "is kept is taken to stay with it. Neither was measured there."
    )


def _late_rows(results: Results, row: Mapping[str, Any], wish: Wish) -> list[str]:
    """How the value moves with the position, at the same k."""
    one = results.only([row["cell_id"]])
    one.tallies = one.tallies[one.tallies["rows"] > 0]
    buckets = sorted(set(one.tallies["bucket"]))[-2:]
    values = []
    for bucket in buckets:
        part = Results(one.tallies[one.tallies["bucket"] == bucket], one.cells, one.manifest)
        values.append(kept(part, wish.metric, wish.layers).iloc[0]["kept"])
    if len(values) < 2:
        return []
    (early, late), (first, second) = buckets, values
    told = f"rows {early:,} to {late - 1:,} keep {percent(first)}, rows {late:,} to {int(row['length']) - 1:,} "
    below = second < wish.coverage <= row["kept"]
    return [f"At this k, {told}{percent(second)}" + (": the latest rows alone fall short." if below else ".")]


def percent(share: float) -> str:
    """93.1 %, as measured values are told; the blank does not break."""
    return f"{100 * share:.1f}\u00a0%"


def wished(share: float) -> str:
    """95 %, as somebody asked for it."""
    return f"{100 * share:g}\u00a0%"


def quantity(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Three digits and the unit that fits."""
    size, unit = next((u for u in units if value >= u[0]), units[-1])
    return f"{value / size:.3g}\u00a0{unit}"


def interval(row: Mapping[str, Any], name: str) -> str:
    """95.1 % (95 % interval 94.2 % to 95.8 %)."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    if pd.isna(low):
        return f"{percent(row[name])} (one document, no interval)"
    return f"{percent(row[name])} (95\u00a0% interval {percent(low)} to {percent(high)})"


def sentences(answer: Answer, parts: Sequence[Results]) -> list[tuple[str, str]]:
    """The answer as (heading, text): what it is, what it keeps, what it costs."""
    row, setting, wish = answer.shown, answer.setting, answer.wish
    count = needed_layers(wish.layers, row["num_layers"])
    if answer.chosen is None:
        head = ("nothing qualifies", f"no measured configuration keeps {wish.words()}; nearest: {row['label']}")
    else:
        head = ("recommended", f"{row['label']}, the cheapest of those that keep {wish.words()}")
    dense = f", {row['dense_layers']} of which stay dense" if row["dense_layers"] else ""
    keeps = f"{interval(row, 'kept')} {wish.metric} in at least {count} of {row['num_layers']} layers{dense}; "
    keeps += f"mean over layers {interval(row, 'mean')}"
    where = f"{setting.device.name}, {setting.context_tokens:,} tokens of context, batch {setting.batch}"
    costs = f"{quantity(row['seconds'], UNITS)} of attention and indexing a decoded token ({where}), "
    costs += f"{row['relative_cost']:.3g} of dense attention's {quantity(row['dense_seconds'], UNITS)}"
    reads = f"{quantity(row['read_bytes'], SIZES)} instead of {quantity(row['dense_read_bytes'], SIZES)} a token"
    cache = f"{row['kv_bytes']:,.0f} bytes a token of context, and {row['index_bytes']:,.0f} for index keys"
    return [head, ("keeps", keeps), ("costs", costs), ("reads", reads), ("caches", cache), _prefill(answer, parts)]


def _prefill(answer: Answer, parts: Sequence[Results]) -> tuple[str, str]:
    row, setting = answer.shown, answer.setting
    part = next(part for part in parts if row["cell_id"] in part.cells)
    about = part.cells[row["cell_id"]]
    model = architecture(about, part.manifest, setting.at_context(cell_of(about).selection, int(about["length"])))
    own, dense = (
        cost.total_seconds(cost.prefill_costs(each, setting.context_tokens), setting.device)
        for each in (model, cost.dense_alternative(model))
    )
    return "prefill", f"{quantity(own, UNITS)} instead of {quantity(dense, UNITS)}, the whole context"


def text(answer: Answer, parts: Sequence[Results]) -> str:
    """The answer as a terminal shows it."""
    told = [f"{head}: {words}" for head, words in sentences(answer, parts)]
    lines = "\n".join([*told, *(f"note: {warning}" for warning in answer.warnings)])
    return lines.replace("\u00a0", " ")


def write_experiment(folder: Path, answer: Answer, parts: Sequence[Results], name: str = "recommended") -> Path:
    """Write the chosen cell, as it was measured, to `folder`/experiment/`name`.yaml; returns the file.

    Raises:
        ValueError: results that were not made by experiments/recall.py.
    """
    row = answer.shown
    part = next(part for part in parts if row["cell_id"] in part.cells)
    path = folder / "experiment" / f"{name}.yaml"
    head = ["@package _global_", f"{row['label']}, chosen by analysis/recommend.py."]
    head += [f"keeps: {interval(row, 'kept')}, {answer.wish.metric} in {wished(answer.wish.layers)} of the layers"]
    if answer.setting.budget == "scaled" and row["topk_at_context"] != row["topk"]:
        head.append(f"at {answer.setting.context_tokens} tokens this stands for topk {int(row['topk_at_context'])}")
    comment = "".join(f"# {' '.join(line.split())}\n" for line in head)
    fields = yaml.safe_dump(experiment(part, row["cell_id"], name), sort_keys=False, default_flow_style=None)
    write_text(path, comment + fields)
    return path


def experiment(results: Results, cell_id: str, name: str) -> dict[str, Any]:
    """The fields of a Hydra experiment for recall.py that measures one cell again, on the same model, data and rows."""
    about, config = results.cells[cell_id], results.manifest.get("config") or {}
    cell = cell_of(about)
    scorer = ((results.manifest.get("scorers") or {}).get(cell.scorer) or {}).get("settings")
    if not config or scorer is None:
        raise ValueError("these results do not tell their configuration, as those of experiments/recall.py do")
    model, data = config["model"], {**config["data"], "length": about["length"], "shard": 0, "num_shards": 1}
    option = "recorded" if model.get("kind") == "recorded" else None
    return {
        "defaults": [
            {"override /model": option or _model_option(model)},
            {"override /data": option or data["name"]},
            {"override /selection": "single_level"},
            {"override /scorer": "learned" if set(scorer) == {"name", "weights"} else scorer["name"]},
        ],
        "experiment_name": name,
        "model": model,
        "data": data,
        "scorer": scorer,
        "selection": cell.selection.settings(),
        "measure": {**config["measure"], "rows": about["sampled_rows"], "seed": about["seed"]},
    }


def _model_option(model: Mapping[str, Any]) -> str:
    """The option of conf/model that has these fields."""
    if "size" in model:
        return "deepseek_v41"
    return "hf" if "path" in model else "smollm2"
