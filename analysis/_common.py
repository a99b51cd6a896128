"""What the plotting scripts share: their arguments, reading results, writing figures, errors."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import matplotlib as mpl

from sparsity_lab import plot
from sparsity_lab.plot_table import curve_table, facts
from sparsity_lab.results import Results, load, merge_results, write_table

mpl.use("Agg")


def parser(description: str, metrics: Sequence[str]) -> argparse.ArgumentParser:
    """The arguments of a script that draws one of `metrics`, the first by default."""
    out = argparse.ArgumentParser(description=description)
    out.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="results folder; several are merged")
    out.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder to write to (default: RESULTS/figures, or figures/ in the folder that holds all RESULTS)",
    )
    out.add_argument("--layer", type=int, metavar="N", help="one layer (default: mean over layers)")
    out.add_argument("--by-layer", action="store_true", help="a heat map of layer x k instead of curves")
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
    else:
        out.set_defaults(metric=metrics[0])
    return out


def main(description: str, metrics: Sequence[str], argv: Sequence[str] | None = None) -> int:
    """Draw, write PNG, SVG and CSV, print their paths. Returns the exit code: 0, or 2 with one line on stderr."""
    arguments = parser(description, metrics)
    options = arguments.parse_args(argv)
    if options.by_layer and options.layer is not None:
        arguments.error("--layer and --by-layer exclude each other")
    return report(arguments.prog, lambda: draw(merge_results([load(folder) for folder in options.results]), options))


def report(prog: str, write: Callable[[], Iterable[Path]]) -> int:
    """Print what is written. Returns the exit code: 0, or 2 with one line on stderr."""
    try:
        for path in write():
            print(path)
    except (ValueError, OSError) as error:
        print(f"{prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def draw(results: Results, options: argparse.Namespace) -> list[Path]:
    """Write the figure that the options describe and the table behind it."""
    by = ("layer",) if options.by_layer else ()
    choice = {"scorer": options.scorer, "ratio": options.ratio, "where": options.where}
    table = curve_table(results, options.metric, layer=options.layer, by=by, **choice)
    drawer = plot.draw_by_layer if options.by_layer else plot.draw_curves
    figure = drawer(table, options.metric, facts(results, table, options.layer))
    path = folder(options) / f"{stem(options)}.csv"
    written = plot.save(figure, path.with_suffix(""))
    write_table(table, path)
    return [*written, path]


def folder(options: argparse.Namespace) -> Path:
    """Where to write."""
    if options.out is not None:
        return options.out
    return Path(os.path.commonpath([path.resolve() for path in options.results])) / "figures"


def stem(options: argparse.Namespace) -> str:
    """File name: the metric, and what was chosen, so that one choice never overwrites another."""
    parts = [options.metric]
    parts += ["by-layer"] if options.by_layer else []
    parts += [f"layer{options.layer}"] if options.layer is not None else []
    parts += options.scorer or []
    parts += [f"ratio{ratio}" for ratio in options.ratio or []]
    parts += [f"where-{hashlib.sha256(options.where.encode()).hexdigest()[:6]}"] if options.where else []
    return "-".join(parts)
