"""Roofline times on named devices, and everything as a tidy frame."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from omegaconf import OmegaConf

from sparsity_lab.cost.parts import PartCost

DEVICES = Path(__file__).with_name("devices.yaml")


@dataclass(frozen=True)
class Device:
    """The two roofs of a device: arithmetic and memory."""

    name: str
    flops_per_second: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        for field in ("flops_per_second", "bytes_per_second"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"device {self.name}: {field}={value!r}: must be a positive number")


class Devices(dict[str, Device]):
    """Devices by name; asking for one that is not there lists those that are."""

    def __missing__(self, name: str) -> Device:
        raise ValueError(f"device={name!r}: must be one of {', '.join(self)}")


def load_devices(path: str | os.PathLike[str] = DEVICES) -> Devices:
    """Devices of a YAML file: name -> flops_per_second, bytes_per_second. Copy the package's file to add your own.

    Raises:
        ValueError: fields that are missing, unknown or not positive numbers.
    """
    content = OmegaConf.to_container(OmegaConf.load(Path(path)))
    names = {field.name for field in dataclasses.fields(Device)} - {"name"}
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path}: must map names of devices to {', '.join(sorted(names))}")
    devices = Devices()
    for name, fields in content.items():
        if not isinstance(fields, dict) or set(fields) != names:
            raise ValueError(f"{path}: device {name!r}: must have exactly {', '.join(sorted(names))}, got {fields}")
        devices[str(name)] = Device(str(name), **{str(key): value for key, value in fields.items()})
    return devices


def part_seconds(cost: PartCost, device: Device) -> float:
    """The longer of its arithmetic and its reading; layers follow each other, so their times add up."""
    return max(cost.flops / device.flops_per_second, cost.bytes / device.bytes_per_second)


def total_seconds(costs: Iterable[PartCost], device: Device) -> float:
    """Parts follow each other: the sum of their times."""
    return sum(part_seconds(cost, device) for cost in costs)


def frame(costs: Iterable[PartCost], device: Device | None = None) -> pd.DataFrame:
    """One row a part, kind of layer and ratio, with the fields of `PartCost`.

    With a device also `seconds` and `bound`: "flops" or "bytes", whichever takes longer.
    """
    costs = list(costs)
    table = pd.DataFrame(
        [dataclasses.asdict(cost) for cost in costs], columns=[field.name for field in dataclasses.fields(PartCost)]
    )
    if device is not None:
        table["seconds"] = [part_seconds(cost, device) for cost in costs]
        by_flops = table["flops"] / device.flops_per_second >= table["bytes"] / device.bytes_per_second
        table["bound"] = by_flops.map({True: "flops", False: "bytes"})
    return table
