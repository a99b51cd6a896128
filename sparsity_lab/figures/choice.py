"""Cost against what is kept, as a recommendation sees it."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from sparsity_lab.figures.pareto import draw_cost_coverage
from sparsity_lab.figures.table import plural
from sparsity_lab.pricing import Setting
from sparsity_lab.recommend import Answer, wished

COST_LABEL = "attention and indexing of a decoded token (µs, roofline)"


def draw_choice(answer: Answer) -> Figure:
    """`draw_cost_coverage` of the configurations that a recommendation chose from, over the time of a decoded token."""
    wish = answer.wish
    kept = f"{wish.metric.replace('_', ' ')} that {wished(wish.layers)} of the layers keep"
    table = _priced(answer.table)
    return draw_cost_coverage(
        table, cost="microseconds", metric="kept", title="Cost against coverage", facts=_facts(table, answer.setting),
        threshold=wish.coverage, cost_label=COST_LABEL, metric_label=kept,
    )  # fmt: skip


def draw_loss(table: pd.DataFrame, setting: Setting) -> Figure:
    """The same of `pareto.priced_loss`: what a selection costs the running model's output."""
    table = _priced(table)
    return draw_cost_coverage(
        table, cost="microseconds", metric="perplexity_difference", title="Cost against loss",
        facts=_facts(table, setting), cost_label=COST_LABEL, metric_label="perplexity, difference to dense",
    )  # fmt: skip


def _priced(table: pd.DataFrame) -> pd.DataFrame:
    found = table[table["unpriced"].isna()]
    if found.empty:
        raise ValueError(f"no cell has a price: {'; '.join(table['unpriced'].drop_duplicates())}")
    return found.assign(microseconds=1e6 * found["seconds"])


def _facts(table: pd.DataFrame, setting: Setting) -> list[str]:
    first, documents = table.iloc[0], int(table["documents"].max())
    return [
        f"{first['model']} on {first['data']}",
        f"{plural(documents, 'document')} x {first['length']:,} tokens",
        f"{setting.device.name}, {setting.context_tokens:,} tokens of context, batch {setting.batch}",
        f"k and pools {setting.budget}" if setting.context_tokens != first["length"] else "at the measured length",
        "lines: 95 % interval over documents" if documents > 1 else "one document, so no interval",
    ]
