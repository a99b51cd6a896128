"""The card of a trained model as Markdown, from the record of its training and the figures of `pretrain_card`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

CURVE_POINTS = 12  # rows of the loss curve


def card(name: str, record: Mapping[str, Any], figures: Mapping[str, Any], curve: pd.DataFrame) -> str:
    """A README.md.

    Args:
        record: `record.json` of the training; figures: what experiments/mini_card.py found; curve: training.csv.
    """
    training, corpus = record["training"], record["corpus"]
    parts = [
        f"# {name}",
        f"A DeepSeek V4.1 of {record['parameters'] / 1e6:.1f} M parameters, trained from random weights by "
        f"`experiments/pretrain.py` for the study of sparse attention: {training['steps']:,} steps, "
        f"{training['tokens'] / 1e6:.0f} M tokens, {training['seconds'] / 60:.1f} minutes on {record['device']}. "
        "All figures are of the weights as shipped, with sparse attention on unless they say dense.",
        "## What it can do",
        _abilities(figures),
        "## Sparse against dense",
        _held_out(figures["held_out"]),
        "Coverage of its own selection relative to the best selection of the same size, by layer: "
        + ", ".join(f"{layer}: {share:.3f}" for layer, share in figures["coverage"]["layers"].items())
        + f" (mean {figures['coverage']['mean']:.3f}, worst {figures['coverage']['worst']:.3f}).",
        "## Training",
        _table(_thinned(curve), "{:.4g}"),
        "Losses are in nats a token, `bits` in bits a byte of held-out text; `index_loss` is the indexers' mean KL.",
        "## Data",
        _data(corpus, record["config"]["data"]["shares"]),
        "## Limits",
        "It knows little: it completes code and documentation locally and copies from its context. It is no assistant, "
        "has seen no other natural language than the English of documentation, and its context ends at "
        f"{record['config']['recipe']['length']:,} tokens. Repeated random spans were part of its training, so what it "
        "does on such text is learned from them.",
    ]
    return "\n\n".join(parts) + "\n"


def read_card(name: str, folder: Path, figures: Mapping[str, Any]) -> str:
    """`card` of a training's folder.

    Raises:
        ValueError: it holds no finished training.
    """
    try:
        record = json.loads((folder / "model" / "record.json").read_text(encoding="utf-8"))
        return card(name, record, figures, pd.read_csv(folder / "training.csv"))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"training={folder}: no training that can be read ({error!r})") from error


def _abilities(figures: Mapping[str, Any]) -> str:
    rows = []
    for key, found in figures.items():
        if key.startswith("induction_"):
            nats = f"{found['nats_first']:.2f} and {found['nats_second']:.2f} nats"
            rows.append(
                {
                    "test": f"random tokens repeated after {found['distance']}: right at the first and second coming",
                    "control": found["accuracy_first"],
                    "found": found["accuracy_second"],
                    "note": f"{nats}; chance {found['chance']:.5f}",
                }
            )
        if key.startswith("copying_"):
            rows.append(
                {
                    "test": f"made-up identifier named again after more than {found['distance']} tokens: tokens right",
                    "control": found["control"],
                    "found": found["copied"],
                    "note": f"{found['identifiers']} identifiers; control: another one was assigned",
                }
            )
    return _table(pd.DataFrame(rows), "{:.3f}")


def _held_out(found: Mapping[str, Any]) -> str:
    rows = [
        {"text": kind, "sequences": about["sequences"]}
        | {f"bits a byte, {mode}": about[f"bits_per_byte_{mode}"] for mode in ("sparse", "dense")}
        for kind, about in found.items()
        if isinstance(about, Mapping)
    ]
    ratio = 100 * (found["sparse_over_dense"] - 1)
    return _table(pd.DataFrame(rows), "{:.4f}") + f"\n\nThe sparse loss is {ratio:+.2f} % from the dense one."


def _data(corpus: Mapping[str, Any], shares: Mapping[str, float]) -> str:
    tokens = ", ".join(f"{count / 1e6:.1f} M tokens of {kind}" for kind, count in corpus["tokens"].items())
    mix = ", ".join(f"{100 * share:.0f} % {kind}" for kind, share in shares.items())
    rows = [{"package": name, **about} for name, about in corpus["packages"].items()]
    table = pd.DataFrame(rows).sort_values("bytes", ascending=False)
    return (
        f"{tokens}, from the training machine's own Python: packages whose metadata names permissive licences only. "
        f"Sequences: {mix}; `repeats` is code into which random token spans are written twice. Held out: "
        f"{corpus['settings']['held_out_percent']} % of the files, by the hash of their content.\n\n"
        + _table(table[["package", "version", "licence", "files", "bytes"]], "{:.0f}")
    )


def _thinned(curve: pd.DataFrame) -> pd.DataFrame:
    """Rows evenly spread, the last among them; the columns that a reader needs."""
    wanted = ["step", "tokens", "stage", "loss", "index_loss", "bits_dense", "bits_sparse", "bits_pool", "imbalance"]
    places = sorted({round(i * (len(curve) - 1) / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)})
    return curve.iloc[places][[name for name in wanted if name in curve]]


def _table(table: pd.DataFrame, number: str) -> str:
    def text(value: Any) -> str:
        if isinstance(value, float):
            return "" if value != value else number.format(value)
        return str(value)

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    rows = [line([text(value) for value in row]) for row in table.itertuples(index=False)]
    return "\n".join([line(list(table.columns)), line(["---"] * len(table.columns)), *rows])
