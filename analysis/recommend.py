"""Name the cheapest measured configuration that keeps enough of dense attention, and write it as an experiment.

    python analysis/recommend.py results/recall/smollm2-pydoc-2048 --coverage 0.95 --layers 0.9 --device h200 \
        --context 131072
    python experiments/recall.py --config-dir results/recall/smollm2-pydoc-2048/recommended experiment=recommended

Exit code: 0, 1 when nothing qualifies, 2 when the question cannot be answered.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import _cost

from sparsity_lab.folders import load_kind
from sparsity_lab.recommend import recommend, text, write_experiment


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="results folder; several are merged")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where the experiment goes (default: RESULTS/recommended, or that of the folder that holds all RESULTS)",
    )
    _cost.add(parser)
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> int:
    parts = [load_kind(folder, "measurement") for folder in options.results]
    answer = recommend(parts, _cost.setting(options), _cost.wish(options), options.where)
    print(text(answer, parts))
    if answer.chosen is None:
        return 1
    out = options.out or Path(os.path.commonpath([path.resolve() for path in options.results])) / "recommended"
    path = write_experiment(out, answer, parts)
    print(f"measure it again: python experiments/recall.py --config-dir {shlex.quote(str(out))} experiment={path.stem}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        return run(options)
    except (ValueError, OSError) as error:
        print(f"recommend.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
