"""What a folder tells of the trainings behind a pretrained model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_record(folder: Path) -> dict[str, Any] | None:
    """record.json of a model's folder, or of the model in a training's folder; None where there is none.

    Raises:
        ValueError: damaged, by its path.
    """
    path = next((path for path in (folder / "record.json", folder / "model" / "record.json") if path.is_file()), None)
    if path is None:
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error})") from error
    if not isinstance(record, dict) or "training" not in record:
        raise ValueError(f"{path}: not the record of a training")
    return record


def trainings(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The records of all trainings, one starting from the other's weights, the first in front."""
    earlier = record.get("start")
    return [*(trainings(earlier) if earlier else ()), record]


def of_indexers(record: Mapping[str, Any]) -> bool:
    """Whether that training moved the indexers alone."""
    return record["config"]["recipe"].get("train") == "indexers"
