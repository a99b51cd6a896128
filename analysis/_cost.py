"""What the scripts share that price cells: where the selection is to run, and what is asked of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sparsity_lab.cost import load_devices
from sparsity_lab.cost.roofline import DEVICES
from sparsity_lab.pareto import RISING
from sparsity_lab.pricing import BUDGETS, Setting
from sparsity_lab.recommend import Wish


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `setting` and `wish` read."""
    where = parser.add_argument_group("where the selection is to run")
    where.add_argument("--device", default="h200", metavar="NAME", help="device of the roofline (default: %(default)s)")
    where.add_argument("--devices", type=Path, default=DEVICES, metavar="FILE", help="YAML file with more devices")
    where.add_argument("--context", type=int, default=131072, metavar="N", help="tokens of context (%(default)s)")
    where.add_argument("--batch", type=int, default=1, metavar="N", help="sequences decoded together (%(default)s)")
    where.add_argument(
        "--budget",
        choices=BUDGETS,
        default="scaled",
        help="at another context than was measured: scale k and pools with it, so that the share selected stays, or "
        "leave them fixed (default: %(default)s)",
    )
    asked = parser.add_argument_group("what it has to keep")
    asked.add_argument("--coverage", type=float, default=0.95, metavar="X", help="at least this share (%(default)s)")
    asked.add_argument("--layers", type=float, default=0.9, metavar="Y", help="in this share of layers (%(default)s)")
    asked.add_argument("--metric", choices=RISING, default=RISING[0], help="of what (default: %(default)s)")
    asked.add_argument("--sure", action="store_true", help="ask it of the lower end of the 95 %% interval too")
    asked.add_argument(
        "--where",
        metavar="QUERY",
        help="choose among the cells that meet this pandas query, as in 'compress_ratio == 4 and topk <= 64'",
    )


def setting(options: argparse.Namespace) -> Setting:
    """Where it runs.

    Raises:
        ValueError: an unknown device, a context or batch below 1.
    """
    try:
        devices = load_devices(options.devices)
    except OSError as error:
        raise ValueError(f"--devices {options.devices}: {error.strerror}") from error
    return Setting(devices[options.device], options.context, options.batch, options.budget)


def wish(options: argparse.Namespace) -> Wish:
    """What it has to keep.

    Raises:
        ValueError: a share outside (0, 1].
    """
    fields: dict[str, Any] = {name: getattr(options, name) for name in ("coverage", "layers", "metric", "sure")}
    return Wish(**fields)
