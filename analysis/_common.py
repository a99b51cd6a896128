"""What the plotting scripts share: their arguments, reading results, writing figures, errors."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from sparsity_lab import plot
from sparsity_lab.folders import load_measurements, notes
from sparsity_lab.results import Results

mpl.use("Agg")
METRICS = ["coverage", "relative_coverage", "total_coverage", "recall", "worst_head_coverage", "output_error"]
CHOICES = ("layer", "topk", "scorer", "ratio", "where")


def parser(description: str, metrics: Sequence[str] = (), choices: Sequence[str] = CHOICES) -> argparse.ArgumentParser:
    """The arguments of a script that draws measured cells.

    metrics: what it can draw, the first by default. choices: those of CHOICES that the figure has.
    """
    out = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="results folder; several are merged")
    add_out(out)
    out.add_argument(
        "--against",
        action="append",
        type=Path,
        metavar="B",
        help="draw RESULTS minus the results folder B, paired by document, with the interval of the difference; "
        "again for more folders, which are merged",
    )
    if "layer" in choices:
        out.add_argument("--layer", type=int, metavar="N", help="one layer (default: mean over layers)")
    if "topk" in choices:
        out.add_argument("--topk", type=int, metavar="K", help="one k")
    out.add_argument("--scorer", nargs="+", metavar="NAME", help="only these scorers, with their bounds")
    out.add_argument("--ratio", nargs="+", type=int, metavar="N", help="only these compress ratios")
    out.add_argument(
        "--where",
        metavar="QUERY",
        help="only cells under test that meet this pandas query over the results' columns, for example "
        "'candidate_topk_blocks == 32' or 'candidate_source_layer.isnull() and topk <= 64'",
    )
    if len(metrics) > 1:
        out.add_argument("--metric", choices=metrics, default=metrics[0], help="what to draw (default: %(default)s)")
    elif metrics:
        out.set_defaults(metric=metrics[0])
    return out


def add_out(arguments: argparse.ArgumentParser) -> None:
    """Where to write."""
    arguments.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder to write to (default: RESULTS/figures, or figures/ in the folder that holds all RESULTS)",
    )


def main(
    arguments: argparse.ArgumentParser,
    draw: Callable[..., Figure],
    stem: str = "{metric}",
    argv: Sequence[str] | None = None,
) -> int:
    """Draw, write PNG, SVG, PDF and CSV, print their paths. Returns the exit code: 0, or 2 with one line on stderr.

    draw: takes the results and what was chosen on the command line, by name. stem: file name, of the options' values.
    """
    options = arguments.parse_args(argv)
    kept = {"results", "out", "against"}
    chosen = {key: value for key, value in vars(options).items() if key not in kept}

    def write() -> Iterable[Path]:
        figure = draw(read(options.results, options.against), **chosen)
        path = folder(options) / "-".join([stem.format(**chosen), *chosen_parts(options)])
        return plot.save(figure, path)

    return report(arguments.prog, write, [*options.results, *(options.against or ())])


def read(folders: Sequence[Path], against: Sequence[Path] | None) -> Results:
    """The folders' cells, or their difference to those of the others."""
    results = load_measurements(folders)
    if not against:
        return results
    return plot.against(results, load_measurements(against), *names(folders, against))


def names(one: Sequence[Path], other: Sequence[Path]) -> tuple[str, str]:
    """What to call both sides in a figure: the ends of their paths, as long as it takes to tell them apart."""
    for parts in range(1, 5):
        a, b = (" + ".join("/".join(path.resolve().parts[-parts:]) for path in side) for side in (one, other))
        if a != b:
            return a, b
    return a, b


def report(prog: str, write: Callable[[], Iterable[Path]], folders: Sequence[Path] = ()) -> int:
    """Print what is written and, on stderr, what to know of the folders. Returns the exit code: 0, or 2 with one line
    on stderr."""
    try:
        for path in write():
            print(path)
        for note in [note for path in dict.fromkeys(folders) for note in notes(path)]:
            print(f"{prog}: note: {' '.join(note.split())}", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"{prog}: {' '.join(str(error).split()) or repr(error)}", file=sys.stderr)
        return 2
    return 0


def folder(options: argparse.Namespace) -> Path:
    """Where to write."""
    if options.out is not None:
        return options.out
    return Path(os.path.commonpath([path.resolve() for path in options.results])) / "figures"


def chosen_parts(options: argparse.Namespace) -> list[str]:
    """Ends of a file name that say what was chosen, so that one choice never overwrites another."""
    given: dict[str, Any] = {"layer": None, "topk": None, **vars(options)}
    parts = [f"layer{given['layer']}"] if given["layer"] is not None else []
    parts += [f"k{given['topk']}"] if given["topk"] is not None else []
    parts += options.scorer or []
    parts += [f"ratio{ratio}" for ratio in options.ratio or []]
    parts += [f"where-{_hash(options.where)}"] if options.where else []
    if options.against:
        parts.append(f"against-{options.against[0].name}-{_hash(str([p.resolve() for p in options.against]))}")
    return parts


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]
