"""How the cells of a figure are spread over its axes, so that each stays readable. No drawing here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from sparsity_lab.figures.table import POOL, context_columns, curve_labels, field_label, varying

MAX_CURVES = 7  # in one panel: as many colours as stay apart, also for the colour-blind
MAX_PANELS = 24
MAX_MAPS = 9


@dataclass(frozen=True)
class Panel:
    """One axes: the cells under test in `tested`, their bounds in `bounds`, and what is common to both."""

    title: str
    tested: pd.DataFrame
    bounds: pd.DataFrame


def panels(table: pd.DataFrame, *, split_ratios: bool) -> list[Panel]:
    """Split a table into panels that each hold few enough curves to read.

    Panels differ in what the cells' bounds depend on (model, data, share, window ...); then, while one would hold more
    than MAX_CURVES curves a ratio, in scorer, source layer, pool size and block size, where cells without a pool are
    repeated; then, if asked for, in the ratio.

    Raises:
        ValueError: more than MAX_PANELS panels.
    """
    found = _by_values([((), table)], varying(table, context_columns(table)))
    told: list[str] = []
    for field in varying(table[~table["bound"]], ("scorer", *POOL)):
        if max(_curves(part) for _, part in found) <= MAX_CURVES:
            break
        found = _by_curve_field(found, field)
        told.append(field)
    if split_ratios:
        found = _by_values(found, ["compress_ratio"])
    if len(found) > MAX_PANELS:
        raise ValueError(
            f"{_curves(table)} curves would need {len(found)} panels, more than {MAX_PANELS}; "
            "choose some by scorer, ratio or where"
        )
    if told:
        found = [(titles, part.assign(curve=curve_labels(part, told))) for titles, part in found]
    return [Panel(", ".join(titles), part[~part["bound"]], part[part["bound"]]) for titles, part in found]


Parts = list[tuple[tuple[str, ...], pd.DataFrame]]


def _curves(part: pd.DataFrame) -> int:
    return part.loc[~part["bound"], "curve"].nunique()


def _by_values(found: Parts, fields: Sequence[str]) -> Parts:
    """Every part split into one a value of the fields."""
    if not fields:
        return found
    return [
        ((*titles, *(field_label(f, v) for f, v in zip(fields, values, strict=True))), rows)
        for titles, part in found
        for values, rows in part.groupby(list(fields), dropna=False, sort=False)
    ]


def _by_curve_field(found: Parts, field: str) -> Parts:
    """Every part split by a field that bounds do not have; they, and cells without a pool, go into each."""
    out: Parts = []
    for titles, part in found:
        values = sorted(part.loc[~part["bound"], field].dropna().unique())
        for value in values:
            keep = part["bound"] | part[field].isna() | (part[field] == value).fillna(False)
            out.append(((*titles, field_label(field, value)), part[keep]))
        if not values:
            out.append((titles, part))
    return out


def by_curve(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(title, rows) a curve under test and ratio (bounds, where there is nothing else), for one axes each."""
    tested = table[~table["bound"]]
    tested = table if tested.empty else tested
    fields = [*varying(tested, context_columns(tested)), "curve", "compress_ratio"]
    found = _by_values([((), tested)], fields)
    if len(found) > MAX_MAPS:
        raise ValueError(f"{len(found)} heat maps, more than {MAX_MAPS}; choose some by scorer, ratio or where")
    return [("\n".join(filter(None, (", ".join(t[:-2]), t[-2], t[-1]))), part) for t, part in found]
