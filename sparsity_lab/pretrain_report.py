"""The card of a trained model as Markdown, from the record of its training and the figures of `pretrain_card`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sparsity_lab.models.deepseek_v41.checkpoint import located
from sparsity_lab.pretrain_card import MODES
from sparsity_lab.pretrain_record import of_indexers, read_record, trainings

CURVE_POINTS = 6  # rows of the table beside the loss curve
CURVE = "loss_curve.png"


def card(name: str, record: Mapping[str, Any], figures: Mapping[str, Any], curve: pd.DataFrame) -> str:
    """A README.md.

    Args:
        record: `record.json` of the (last) training; figures: what experiments/mini_card.py found; curve: training.csv.
    """
    stages = trainings(record)
    corpus, shares = stages[0]["corpus"], stages[0]["config"]["data"]["shares"]
    own, bound = figures["coverage"], figures["shared_bound"]
    parts = [
        f"# {name}",
        f"A DeepSeek V4.1 of {record['parameters'] / 1e6:.1f} M parameters, trained from random weights by "
        f"`experiments/pretrain.py` for the study of sparse attention: {'; then '.join(map(_effort, stages))}. "
        "All figures are of the weights as shipped, with sparse attention on unless they say dense. "
        f"Weights: {figures['fingerprint']}.",
        "## What it can do",
        _abilities(figures),
        "Right: share of the tokens that are predicted, with 95 % intervals. Control: of the same random tokens when "
        "they come first; of an identifier that was never assigned.",
        "## Sparse against dense",
        _held_out(figures["held_out"]),
        "Coverage of its own selection relative to the best selection of the same size, on these texts, by layer: "
        f"{_by_layer(own['layers'])} (mean {own['mean']:.3f}, worst {own['worst']:.3f}).",
        "A layer that reuses a selection shares it with others. The best selection for all layers that an index source "
        "serves together, without a pool, would give "
        f"{_by_layer(bound['layers'])} (mean {bound['mean']:.3f}).",
        *_together(record),
        "## Training",
        f"![Training loss, held-out bits a byte and coverage by the tokens seen]({CURVE})",
        _table(_thinned(curve), "{:.4g}"),
        "Losses are in nats a token, `bits` in bits a byte of held-out text; `index_loss` is the indexers' mean KL."
        + (" Each training drew its own held-out sequences: compare those within it alone." if len(stages) > 1 else ""),
        "## Data",
        _data(corpus, shares),
        *[
            f"Later ({_effort(stage)}) it saw {_tokens(stage['corpus'])} of another machine: see record.json."
            for stage in stages[1:]
            if stage["corpus"]["digest"] != corpus["digest"]
        ],
        "## Limits",
        "It knows little: it completes code and documentation locally and copies from its context, less well from long "
        "ago (see above, and what dense attention does better there). It is no assistant, has seen no other "
        "natural language than the English of documentation, and its context ends at "
        f"{record['config']['recipe']['length']:,} tokens. Repeated random spans were part of its training, so what it "
        "does on such text is learned from them. The standard library and its documentation were part of it too: "
        "`data=held_out` is the text to measure it on.",
    ]
    return "\n\n".join(parts) + "\n"


def read_card(name: str, path: str, figures: Mapping[str, Any]) -> tuple[Path, str]:
    """`card` of a training's folder, or of the "shipped" model, and where it belongs.

    Raises:
        ValueError: it holds no finished training.
    """
    folder = located(path)
    try:
        if (record := read_record(folder)) is None:
            raise ValueError("no record.json")
        return folder / "README.md", card(name, record, figures, pd.read_csv(folder / "training.csv"))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"training={path}: no training that can be read ({error!r})") from error


def write_curve(name: str, path: str) -> Path:
    """Draw the loss curve of the same folder for its card; returns the file.

    Raises:
        ValueError: it holds no training that can be drawn.
    """
    from sparsity_lab.figures.pretraining import draw_pretraining, pretraining_table, save_small

    folder = located(path)
    save_small(draw_pretraining(pretraining_table(folder), name), folder / CURVE)
    return folder / CURVE


def _effort(record: Mapping[str, Any]) -> str:
    training = record["training"]
    what = "the indexers alone, " if of_indexers(record) else ""
    return (
        f"{what}{training['steps']:,} steps, {training['tokens'] / 1e6:.0f} M tokens, "
        f"{training['seconds'] / 60:.1f} minutes on {record['device']}"
    )


def _abilities(figures: Mapping[str, Any]) -> str:
    rows = []
    for key, found in figures.items():
        if key.startswith("induction_"):
            test, main, control = "random tokens repeated after {}", "accuracy_second", "accuracy_first"
            note = "{nats_first:.2f} nats at first, {nats_second:.2f} again"
            count = f"{found['sequences']} sequences, chance {found['chance']:.5f}"
        elif key.startswith("copying_"):
            test, main, control = "made-up identifier named again after more than {}", "copied", "control"
            note, count = "", f"{found['identifiers']} identifiers"
        else:
            continue
        rows += [
            {
                "test": test.format(f"{found['distance']:,} tokens"),
                "attention": mode,
                "right": f"{about[main]:.3f}"
                + (f" [{about['low']:.3f}, {about['high']:.3f}]" if "low" in about else ""),
                "control": about[control],
                "of": "; ".join(filter(None, (count, note.format(**about)))),
            }
            for mode in MODES
            if (about := found[mode])
        ]
    return _table(pd.DataFrame(rows), "{:.3f}")


def _by_layer(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{layer}: {share:.3f}" for layer, share in shares.items())


def _together(record: Mapping[str, Any]) -> list[str]:
    """What the record says of the index sources at the end of training: nothing where none was measured."""
    prefix = "coverage_"
    found = {name.removeprefix(prefix): x for name, x in record["held_out"].items() if name.startswith(prefix)}
    if not found:
        return []
    return [
        "Of what that best selection holds of these layers' mass together, the indexers' own holds (at the end of "
        f"training, dense attention, no pool, {sum(record['corpus']['held_out_sequences'].values())} held-out "
        f"sequences): {_by_layer(found)} (mean {sum(found.values()) / len(found):.3f})."
    ]


def _held_out(found: Mapping[str, Any]) -> str:
    rows = [
        {"text": kind, "sequences": about["sequences"]}
        | {f"bits a byte, {mode}": about[f"bits_per_byte_{mode}"] for mode in ("sparse", "dense")}
        for kind, about in found.items()
        if isinstance(about, Mapping)
    ]
    ratio = 100 * (found["sparse_over_dense"] - 1)
    why = "; a model that learned with sparse attention can do better with it" if ratio < 0 else ""
    return _table(pd.DataFrame(rows), "{:.4f}") + f"\n\nThe sparse loss is {ratio:+.2f} % from the dense one{why}."


def _data(corpus: Mapping[str, Any], shares: Mapping[str, float]) -> str:
    mix = ", ".join(f"{100 * share:.0f} % {kind}" for kind, share in shares.items())
    rows = [{"package": name, **about} for name, about in corpus["packages"].items()]
    table = pd.DataFrame(rows).sort_values("bytes", ascending=False)
    return (
        f"{_tokens(corpus)}, from the training machine's own Python: packages whose metadata names permissive licences "
        f"only. Sequences: {mix}; `repeats` is code into which random token spans are written twice. Held out: "
        f"{corpus['settings']['held_out_percent']} % of the files, by the hash of their content.\n\n"
        + _table(table[["package", "version", "licence", "files", "bytes"]], "{:.0f}")
    )


def _tokens(corpus: Mapping[str, Any]) -> str:
    return ", ".join(f"{count / 1e6:.1f} M tokens of {kind}" for kind, count in corpus["tokens"].items())


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
