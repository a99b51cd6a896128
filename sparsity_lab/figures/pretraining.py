"""The figure of a pretraining: training loss, held-out bits a byte and its indexers' coverage, by tokens."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from sparsity_lab.figures.look import CURVE_COLOURS, MARKERS, STYLE, WIDTH, Chart, wrap
from sparsity_lab.folders import Tables
from sparsity_lab.pretrain_record import of_indexers, read_record, trainings
from sparsity_lab.results import write_atomically

NEEDED = {"step", "tokens", "stage", "loss", "loss_dense", "bits_dense"}
MODES = ("dense", "sparse", "pool")  # of attention, each with held-out figures of its own
SHADES = {"dense": "#ffffff", "sparse": "#ececec", "pool": "#dadada", "indexers": "#f7ecd2"}
OTHER_SHADE = "#e3eef7"
HEIGHT = 1.6  # inches a panel
CARD_DPI, CARD_COLOURS = 110, 48


def is_pretraining(run: Path) -> bool:
    """Whether the folder's training.csv is that of a pretraining."""
    try:
        return set(pd.read_csv(run / "training.csv", nrows=0)) >= {"stage", "tokens"}
    except (OSError, ValueError):
        return False


def pretraining_table(run: Path) -> pd.DataFrame:
    """Its training.csv (a row an evaluation), in which the stage of a training of the indexers alone is "indexers";
    `attrs["name"]`: the folder's; `attrs["losses"]`: step, tokens and loss of every step, where the folder tells them.

    Raises:
        ValueError: a damaged log or record, by its path.
    """
    try:
        table = pd.read_csv(run / "training.csv")
        losses = pd.read_csv(run / "losses.csv") if (run / "losses.csv").is_file() else None
    except (OSError, ValueError) as error:
        raise ValueError(f"{run}: not a pretraining that can be read ({error!r})") from error
    if lacking := sorted(NEEDED - set(table)):
        raise ValueError(f"{run}: not a pretraining that can be read (training.csv lacks {', '.join(lacking)})")
    if table.empty:
        raise ValueError(f"{run}: no evaluation yet, so nothing to show")
    if not all(table[name].is_monotonic_increasing for name in ("step", "tokens")):
        raise ValueError(f"{run}: not a pretraining that can be read (steps or tokens of training.csv do not count on)")
    table["stage"] = _stages(run, table)
    table.attrs |= {"name": run.name, "losses": _every_step(table, losses)}
    return table


def _stages(run: Path, table: pd.DataFrame) -> pd.Series:
    """The stages, with "indexers" where the record of the trainings, one after the other, says so."""
    record, stages, last = read_record(run), table["stage"].astype(str), table["step"].iloc[-1]
    try:
        parts = [] if record is None else _told(trainings(record), last)
        alone = np.array([of_indexers(part) for part in parts])
        ends = np.cumsum([part["training"]["steps"] for part in parts])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{run}: not the record of a training ({error!r})") from error
    return stages.mask(alone[np.searchsorted(ends, table["step"])], "indexers") if parts else stages


def _told(parts: list[Mapping[str, Any]], steps: int) -> list[Mapping[str, Any]]:
    """Those of the trainings that a log of so many steps tells of: all, the last alone, or the first few."""
    spread = [parts, parts[-1:], *(parts[:count] for count in range(1, len(parts)))]
    return next((some for some in spread if sum(part["training"]["steps"] for part in some) == steps), [])


def _every_step(table: pd.DataFrame, losses: pd.DataFrame | None) -> pd.DataFrame | None:
    """step, tokens and loss of every step, if these are the steps of the table."""
    if losses is None or not {"step", "loss"} <= set(losses) or len(losses) != table["step"].iloc[-1]:
        return None
    done = losses["step"] + 1
    tokens = np.interp(done, [0, *table["step"]], [0, *table["tokens"]])
    return pd.DataFrame({"step": done, "tokens": tokens, "loss": losses["loss"]})


def spans(table: pd.DataFrame) -> list[tuple[str, float, float]]:
    """(stage, first and last tokens) of each stage, as seen by the evaluations."""
    found: list[tuple[str, float, float]] = []
    before = 0.0
    for stage, tokens in zip(table["stage"], table["tokens"], strict=True):
        if found and found[-1][0] == stage:
            found[-1] = (stage, found[-1][1], float(tokens))
        else:
            found.append((stage, before, float(tokens)))
        before = float(tokens)
    return found


def draw_pretraining(run: pd.DataFrame | Tables, title: str | None = None) -> Figure:
    """Training loss, held-out bits a byte (dense, and as the stage attends) and relative coverage of the index sources,
    over the tokens seen; stages are shaded.

    run: `pretraining_table`, or what `folders.load` gives.
    Raises:
        ValueError: a table without what is drawn.
    """
    table = run if isinstance(run, pd.DataFrame) else run.frame("training")
    if lacking := sorted(NEEDED - set(table)):
        raise ValueError(f"not a pretraining: training.csv lacks {', '.join(lacking)}")
    sources = [str(name) for name in table if str(name).startswith("coverage_")]
    stages = spans(table)
    with mpl.rc_context(STYLE):
        count = 2 + bool(sources)
        figure = Chart(figsize=(WIDTH[1], 0.9 + HEIGHT * count), layout="constrained")
        figure.suptitle(_title(table, title))
        axes = list(figure.subplots(count, 1, sharex=True))
        _loss(axes[0], table)
        _held_out(axes[1], table)
        if sources:
            _coverage(axes[2], table, sources)
        for axis in axes:
            for stage, first, last in stages:
                axis.axvspan(first, last, facecolor=SHADES.get(stage, OTHER_SHADE), edgecolor="none", zorder=-1)
        axes[0].set_xlim(0, 1.01 * float(table["tokens"].iloc[-1]))
        axes[-1].set_xlabel("tokens")
        axes[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
        figure.legend(handles=_patches(stages), title="stage", loc="outside lower center", ncols=5)
    figure.table = table
    return figure


def _patches(stages: list[tuple[str, float, float]]) -> list[Patch]:
    names = dict.fromkeys(stage for stage, _, _ in stages)
    return [Patch(facecolor=SHADES.get(name, OTHER_SHADE), edgecolor="#8e8e8e", label=name) for name in names]


def _line(axis: Axes, table: pd.DataFrame, column: str, label: str, number: int) -> None:
    number %= len(CURVE_COLOURS)
    style: dict[str, Any] = {"color": CURVE_COLOURS[number], "marker": MARKERS[number], "markersize": 2.5}
    axis.plot(table["tokens"], table[column], linewidth=1.2, label=label, **style)


def _loss(axis: Axes, table: pd.DataFrame) -> None:
    losses = table.attrs.get("losses")
    if losses is not None:
        axis.plot(losses["tokens"], losses["loss"], color="#b8b8b8", linewidth=0.5, label="of each step")
    _line(axis, table, "loss", "training", 0)
    _line(axis, table, "loss_dense", "held out, dense", 4)
    axis.set_ylabel("loss (nats a token)")
    axis.legend(ncols=3)


def _held_out(axis: Axes, table: pd.DataFrame) -> None:
    for number, mode in enumerate(MODES):
        if f"bits_{mode}" in table and table[f"bits_{mode}"].notna().any():
            _line(axis, table, f"bits_{mode}", "with pool" if mode == "pool" else mode, number)
    axis.set_ylabel("held-out bits a byte")
    axis.legend(title="attention", ncols=3)


def _coverage(axis: Axes, table: pd.DataFrame, sources: list[str]) -> None:
    for number, name in enumerate(sources):
        _line(axis, table, name, name.removeprefix("coverage_"), number)
    axis.set_ylabel("relative coverage")
    axis.legend(title="index source layer", ncols=4)


def _title(table: pd.DataFrame, title: str | None) -> str:
    name = title or table.attrs.get("name", "")
    facts = [
        f"{int(table['step'].iloc[-1]):,} steps, {table['tokens'].iloc[-1] / 1e6:,.3g} M tokens",
        "no intervals",
        "coverage of dense attention on held-out text",
    ]
    return "\n".join([f"Pretraining: {name}" if name else "Pretraining", *wrap(facts, WIDTH[1])])


def save_small(figure: Figure, path: Path) -> None:
    """Write a PNG for a card, of few colours."""
    from PIL import Image

    def write(temporary: Path) -> None:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=CARD_DPI)
        Image.open(buffer).convert("RGB").quantize(CARD_COLOURS).save(temporary, format="png", optimize=True)

    with mpl.rc_context(STYLE):
        write_atomically(path, write)
