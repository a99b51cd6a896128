"""Figures from distillations: loss and held-out relative coverage by step and, of an ablation, by the ablated value.

`table_of_runs` also knows pretrainings, whose figure is in `pretraining`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sparsity_lab.distill_folder import SCHEMA
from sparsity_lab.figures.look import CURVE_COLOURS, MARKERS, STYLE, WIDTH, Chart, wrap
from sparsity_lab.figures.pretraining import draw_pretraining, is_pretraining, pretraining_table
from sparsity_lab.figures.table import plural
from sparsity_lab.folders import Tables

MAX_RUNS = len(CURVE_COLOURS)
NEEDED = {"step", "layer", "compress_ratio", "loss", "held_out", "relative_coverage"}
IGNORED = ("data.", "schedule.")  # never what an ablation is about
HEIGHT = 2.8  # inches a panel


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The trainings at or below the folders, in order of name.

    Raises:
        ValueError: none there.
    """
    logs = [log.parent for folder in folders for log in Path(folder).rglob("training.csv")]
    found = sorted({run for run in logs if run.name != "figures"})  # which holds the table of this figure
    if not found:
        raise ValueError(f"{', '.join(map(str, folders))}: no distillation or pretraining here (no training.csv)")
    return found


def table_of_runs(runs: Sequence[Path]) -> tuple[pd.DataFrame, Callable[[pd.DataFrame], Figure]]:
    """The runs' table and what draws it: of distillations, or of one pretraining.

    Raises:
        ValueError: pretrainings among several runs; see also `training_table` and `pretraining_table`.
    """
    pretrainings = [run for run in runs if is_pretraining(run)]
    if not pretrainings:
        return training_table(runs), draw_training
    if len(runs) > 1:
        raise ValueError(
            f"{len(runs)} trainings, {pretrainings[0]} among them: pretrainings are drawn one by one, name one folder"
        )
    return pretraining_table(runs[0]), draw_pretraining


def training_table(runs: Sequence[Path]) -> pd.DataFrame:
    """Their training logs in one table (columns: see `distill_run.LOG_COLUMNS`), with `run`, a column for every setting
    in which the runs differ (`recipe.lr`), and these columns' names in `attrs["differ"]`; `attrs["about"]`: model and
    data in words.

    Raises:
        ValueError: a damaged log or manifest, by its path.
    """
    frames, settings, about = [], [], []
    for run in runs:
        try:
            frame = pd.read_csv(run / "training.csv").assign(run=run.name)
            manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
            identity, schema = manifest["identity"], manifest.get("schema", SCHEMA)
            about.append(described(identity))
            settings.append(flat(identity))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{run}: not a distillation that can be read ({error!r})") from error
        if schema != SCHEMA:
            raise ValueError(f"{run}: schema={schema}: this version reads schema {SCHEMA}")
        if lacking := sorted(NEEDED - set(frame)):
            raise ValueError(f"{run}: not a distillation that can be read (training.csv lacks {', '.join(lacking)})")
        if frame.empty:
            raise ValueError(f"{run}: no evaluation yet, so nothing to show")
        frames.append(frame)
    keys = [key for key in settings[0] if not key.startswith(IGNORED)]
    differ = [key for key in keys if len({repr(one.get(key)) for one in settings}) > 1]
    for frame, one in zip(frames, settings, strict=True):
        for key in differ:
            value = one.get(key)
            frame[key] = [", ".join(map(str, value)) if isinstance(value, list) else value] * len(frame)
    table = pd.concat(frames, ignore_index=True)
    table.attrs |= {"differ": differ, "about": list(dict.fromkeys(about))}
    return table


def described(identity: Mapping[str, Any]) -> str:
    """Model, and documents held out."""
    held_out = identity["data"].get("held_out", {})
    sources = [f"{about['num_documents']} of {name}" for name, about in held_out.items()]
    length = identity["data"].get("length")
    told = f", held out: {' and '.join(sources)} documents" + (f" x {length:,} tokens" if length else "")
    return str(identity.get("model", "")) + (told if sources else "")


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dotted names."""
    out: dict[str, Any] = {}
    for key, value in settings.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def draw_training(runs: pd.DataFrame | Tables) -> Figure:
    """Loss and held-out relative coverage by step, means over layers and held-out sources: a curve a run and, in a
    single run, a ratio. Several runs get a third panel: the last figures by the setting that differs.

    runs: `training_table` of several, or what `folders.load` gives of one.
    Raises:
        ValueError: more runs than can be told apart.
    """
    table = runs if isinstance(runs, pd.DataFrame) else runs.frame("training")
    count = table["run"].nunique()
    several = count > 1
    if count > MAX_RUNS:
        raise ValueError(f"{count} runs, more than {MAX_RUNS} can be told apart; name fewer folders")
    by = "run" if several else "compress_ratio"
    with mpl.rc_context(STYLE):
        figure = Chart(figsize=(WIDTH[2 + several], HEIGHT + 1.0), layout="constrained")
        figure.suptitle(_title(table, several))
        axes = list(figure.subplots(1, 2 + several))
        for axis, column, label in (
            (axes[0], "loss", "loss: KL to the dense mass (nats)"),
            (axes[1], "relative_coverage", "held-out relative coverage"),
        ):
            _curves(axis, table, column, by)
            axis.set(xlabel="optimiser steps", ylabel=label)
        names = axes[1].get_legend_handles_labels()
        title = "run" if several else "compress ratio"
        figure.legend(*names, title=title, loc="outside lower center", ncols=min(len(names[0]), 4))
        if several:
            _finals(axes[2], table)
    figure.table = table
    return figure


def _curves(axis: Axes, table: pd.DataFrame, column: str, by: str) -> None:
    for i, (name, rows) in enumerate(table.groupby(by, sort=False)):
        curve = rows.groupby("step")[column].mean().dropna()
        style: dict[str, Any] = {"color": CURVE_COLOURS[i], "marker": MARKERS[i], "markersize": 3, "linewidth": 1.2}
        axis.plot(curve.index, curve, label=str(name), **style)


def finals(table: pd.DataFrame) -> pd.DataFrame:
    """The last figures of every run: `run`, the settings that differ, `step`, `relative_coverage` (mean over layers,
    ratios and held-out sources) and `worst` (of the layers)."""
    last = table[table["step"] == table.groupby("run")["step"].transform("max")]
    keys = ["run", *table.attrs["differ"], "step"]
    layers = last.groupby([*keys, "layer"], sort=False, dropna=False)["relative_coverage"].mean()
    out = layers.groupby(keys, sort=False, dropna=False).agg(["mean", "min"]).reset_index()
    return out.rename(columns={"mean": "relative_coverage", "min": "worst"})


def _finals(axis: Axes, table: pd.DataFrame) -> None:
    last, differ = finals(table), table.attrs["differ"]
    name = differ[0] if len(differ) == 1 else "run"
    last = last.sort_values(name, kind="stable")
    places = range(len(last))
    axis.plot(places, last["relative_coverage"], color=CURVE_COLOURS[0], marker="o", label="mean over layers")
    axis.plot(places, last["worst"], color=CURVE_COLOURS[4], marker="v", linestyle=":", label="worst layer")
    axis.set_xticks(list(places), [str(value) for value in last[name]], rotation=0 if len(last) < 7 else 45)
    axis.set(xlabel=name.rpartition(".")[2].replace("_", " "), ylabel="at the end of training")
    axis.legend()


def _title(table: pd.DataFrame, several: bool) -> str:
    what = "Distilled indexers" if several else f"Distilled indexers: {table['run'].iloc[0]}"
    about = [text for text in table.attrs.get("about", ()) if text]
    facts = [
        *(about if len(about) == 1 else ()),
        f"mean of {plural(table['layer'].nunique(), 'layer')}",
        "no intervals",
    ]
    return "\n".join([what, *wrap(facts, WIDTH[2 + several])])
