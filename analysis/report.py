"""Write one self-contained page about results: what was measured, headline numbers, figures, tables, a recommendation,
provenance, and how to make it again.

    python analysis/report.py results/recall/smollm2-pydoc-2048 -o report.html

Exit code: 0, 2 when nothing could be shown.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import _cost

from sparsity_lab import report


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="results folder; or several")
    parser.add_argument("-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="(%(default)s)")
    parser.add_argument("--title", metavar="TEXT", help="of the page (default: model and data)")
    _cost.add(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    command = shlex.join(["python", "analysis/report.py", *(sys.argv[1:] if argv is None else argv)])
    try:
        troubles = report.write(
            options.results, options.out, _cost.setting(options), _cost.wish(options), title=options.title,
            command=command,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        print(f"report.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    for trouble in troubles:
        print(f"report.py: {trouble}", file=sys.stderr)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
