"""What a report says of the cells of one model, data and length."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pandas as pd

from sparsity_lab.figures.table import plural
from sparsity_lab.measurement import ENVELOPE
from sparsity_lab.pareto import GROUP, pareto
from sparsity_lab.pricing import Setting
from sparsity_lab.recommend import UNITS, Answer, Wish, interval, percent, quantity, recommend, sentences, wished
from sparsity_lab.report.blocks import Facts, Notes, Section, Text, Tiles, number, pictures, table, word
from sparsity_lab.report.drawings import drawings
from sparsity_lab.report.tables import tables
from sparsity_lab.results import Results, merge_results

MOST_HEADLINES = 8


@dataclasses.dataclass(frozen=True)
class Study:
    """Results of one model, data and length, one part a folder, with what is asked of them."""

    parts: Sequence[Results]
    setting: Setting
    wish: Wish

    @property
    def results(self) -> Results:
        return merge_results(self.parts)


def split(parts: Sequence[Results], setting: Setting, wish: Wish) -> list[tuple[str, Study]]:
    """A study and its name for each model, data and length."""
    groups: dict[tuple[Any, ...], list[Results]] = {}
    for part in parts:
        frame = part.cell_frame()
        for keys, rows in frame.groupby(GROUP, sort=True):
            groups.setdefault(tuple(keys), []).append(part.only(rows["cell_id"]))
    return [
        (f"{model} on {data}, {length:,} tokens", Study(found, setting, wish))
        for (model, data, length), found in groups.items()
    ]


def sections(study: Study, key: str, suffix: str) -> list[Section]:
    """All that there is to say of a study; `suffix` tells it from others on the page."""
    results, frame = study.results, study.results.frame(())
    answer, refusal = _answer(study)
    cells = _unchosen(study) if answer is None else answer.table
    found = [
        ("headline", "Headline", headline(study, cells, answer, refusal)),
        ("recommendation", "Recommendation", recommendation(study, answer, refusal)),
        ("measured", "What was measured", [Facts(measured(results, frame))]),
        ("figures", "Figures", pictures(drawings(results, cells, answer))),
        ("tables", "Tables", tables(results, cells, answer, study.wish)),
        ("saturated", "Saturated cells", saturated(frame)),
    ]
    return [Section(f"{name}{key}", f"{title}{suffix}", blocks) for name, title, blocks in found if blocks]


def _answer(study: Study) -> tuple[Answer | None, str]:
    """The recommendation, or why there is none."""
    try:
        return recommend(study.parts, study.setting, study.wish), ""
    except ValueError as error:
        return None, str(error)


def _unchosen(study: Study) -> pd.DataFrame:
    """The cells, where none can be recommended; empty where all rows are saturated."""
    try:
        return pareto(study.parts, study.setting, metric=study.wish.metric, layers=study.wish.layers)
    except ValueError:
        return pd.DataFrame()


def headline(study: Study, cells: pd.DataFrame, answer: Answer | None, refusal: str) -> list[Any]:
    """Tiles of the configuration that is told about, and what each scorer keeps at one k."""
    if cells.empty:
        return [Text(f"Nothing to average: {refusal}.")]
    blocks: list[Any] = []
    if answer is not None:
        row, kind = answer.shown, "nearest" if answer.chosen is None else "recommended"
        blocks.append(
            Tiles(
                [
                    (f"{kind} configuration", row["label"], f"{int(row['topk'])} positions a query"),
                    (
                        f"{study.wish.metric} that {wished(study.wish.layers)} of layers keep",
                        percent(row["kept"]),
                        _span(row, "kept"),
                    ),
                    ("mean over layers", percent(row["mean"]), _span(row, "mean")),
                    (
                        f"decoding time against dense, {study.setting.device.name}",
                        percent(row["relative_cost"]),
                        f"{quantity(row['seconds'], UNITS)} of attention and indexing a token at "
                        f"{study.setting.context_tokens:,} tokens, batch {study.setting.batch}",
                    ),
                ]
            )
        )
    return [*blocks, Notes(_at_one_k(cells, answer, study.wish.metric))]


def _span(row: Any, name: str) -> str:
    if pd.isna(row[f"{name}_low"]):
        return "one document, so no interval"
    return f"95\u00a0% interval {percent(row[f'{name}_low'])} to {percent(row[f'{name}_high'])}"


def _at_one_k(cells: pd.DataFrame, answer: Answer | None, metric: str) -> list[str]:
    """A sentence a ratio: what the scorers keep without a pool, next to their bounds."""
    plain = cells[cells["candidate_source_layer"].isna()]
    if "index_source_layers" in plain:
        plain = plain[plain["index_source_layers"].isna()]
    if plain.empty:
        return []
    budgets = sorted(set(plain["topk"]))
    wanted = budgets[len(budgets) // 2] if answer is None else answer.shown["topk"]
    k = min(budgets, key=lambda each: abs(each - wanted))
    told = []
    for ratio, rows in plain[plain["topk"] == k].groupby("compress_ratio"):
        rows = rows.drop_duplicates("scorer").sort_values("mean", ascending=False)
        tested, bounds = (rows[rows["scorer"].isin(ENVELOPE) == bound] for bound in (False, True))
        kept = "; ".join(f"{row['scorer']} {interval(row, 'mean')}" for _, row in tested.iterrows())
        framed = ", ".join(f"{row['scorer']} {percent(row['mean'])}" for _, row in bounds.iterrows())
        ends = f" (bounds: {framed})" if framed and kept else framed
        told.append(f"Ratio {ratio}, k = {k}, {metric}, mean over layers: {kept}{ends}.")
    return told[:MOST_HEADLINES]


def recommendation(study: Study, answer: Answer | None, refusal: str) -> list[Any]:
    """The answer in words, or why there is none; then its caveats."""
    if answer is None:
        return [Text(f"No recommendation: {refusal}.")]
    told = [(head, words) for head, words in sentences(answer, study.parts)]
    return [Facts(told), Notes(answer.warnings, warning=True), Text(_selected(answer))]


def _selected(answer: Answer) -> str:
    count = int(answer.table["unpriced"].isna().sum())
    return (
        f"It was chosen among {plural(count, 'configuration')} by the same documents that its figures come from, which "
        "flatters it a little: measure it again on documents that follow (data.skip) before relying on it."
    )


def measured(results: Results, frame: pd.DataFrame) -> list[tuple[str, str]]:
    """Model, data, rows, layers, and the values that the cells span."""
    layers = sorted(set(results.tallies["layer"]))
    documents = results.tallies["document"].nunique()
    rows = ["all" if pd.isna(value) else f"{int(value)}" for value in frame["sampled_rows"].unique()]
    named = {
        "scorers": "scorer",
        "compress ratios": "compress_ratio",
        "k": "topk",
        "windows": "window",
        "one selection a": "share",
        "computed on": "device",
        "in": "dtype",
    }
    out = [
        ("model", str(frame["model"].iloc[0])),
        ("data", f"{frame['data'].iloc[0]}: {plural(documents, 'document')} of {frame['length'].iloc[0]:,} tokens"),
        ("query rows", f"{', '.join(rows)} a document"),
        ("layers", f"{len(layers)}, from {layers[0]} to {layers[-1]}"),
        ("cells", f"{len(results.cells)}, bounds included"),
    ]
    out += [(name, _values(frame[column])) for name, column in named.items() if column in frame]
    pools = frame.dropna(subset=["candidate_source_layer"])
    if len(pools):
        names = ["candidate_topk_blocks", "candidate_block_size", "candidate_source_layer"]
        pairs = pools[names].drop_duplicates().sort_values(names[::-1]).astype(int).itertuples(index=False)
        out.append(("pools", "; ".join(f"{blocks} blocks of {size}, layer {layer}" for blocks, size, layer in pairs)))
    if "index_source_layers" in frame and frame["index_source_layers"].notna().any():
        out.append(("index sources", "; ".join(sorted(set(frame["index_source_layers"].dropna())))))
    return out


def _values(column: pd.Series) -> str:
    values = sorted(set(column.dropna()), key=lambda value: (str(type(value)), value))
    return ", ".join(map(str, values))


def saturated(frame: pd.DataFrame) -> list[Any]:
    """Cells most of whose rows select everything they see."""
    share = frame["saturated"] / (frame["rows"] + frame["saturated"]).clip(lower=1)
    found = frame.assign(share=share)[share > 0.5]
    if found.empty:
        return []
    rows = [
        [
            word(f"{row['scorer']} ratio {row['compress_ratio']} top-{row['topk']}"),
            number(100 * row["share"], "{:.0f}\u00a0%"),
            word("all: nothing to average" if not row["rows"] else "averages are over the few others"),
        ]
        for _, row in found.drop_duplicates(["scorer", "compress_ratio", "topk"]).iterrows()
    ]
    return [
        Text("A row that sees no more than k positions selects them all. Such rows are counted and left out."),
        table("Cells with more than half of their rows saturated", ["cell", "saturated rows", "what is left"], rows),
    ]
