"""The way from a composed configuration to a `Job`. With `schemas` and the launcher the only Hydra-aware module:
everything else takes explicit values.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, InterpolationToMissingValueError

from sparsity_lab.applied import SPARSE, settled
from sparsity_lab.cells import Cell, expand
from sparsity_lab.lightning import IndexerConfig
from sparsity_lab.metrics import METRICS


def _basename(path: str) -> str:
    """Last part of a hub name or path, without .gguf: `Qwen/Qwen2.5-0.5B` is Qwen2.5-0.5B."""
    return Path(path).expanduser().resolve().name.removesuffix(".gguf")


def _recorded(what: str, *, _root_: DictConfig) -> Any:
    """`${recorded:model}`, `:data` and `:length` of the recording at model.path, so that its results go by the names of
    live ones. Where it cannot be read there are stand-ins: the job fails a moment later and says why."""
    from sparsity_lab.models.recorded import RecordingError, read_recording

    path = OmegaConf.select(_root_, "model.path")
    try:
        manifest = read_recording(path) if path else None
    except RecordingError:
        manifest = None
    if manifest is None:
        return 0 if what == "length" else "recorded"
    return manifest["data"]["length"] if what == "length" else manifest[what]["name"]


def _applied(*, _root_: DictConfig) -> str:
    """`${applied:}`, what tells the results of a run with a selection applied from others; nothing without one."""
    if OmegaConf.select(_root_, "model.attention") != SPARSE or "applied" not in _root_.model:
        return ""
    nodes = {"applied": _root_.model.applied, "scorer": _root_.get("scorer")}
    plain: Any = OmegaConf.to_container(OmegaConf.create(nodes), resolve=True)
    told = json.dumps(settled({"attention": SPARSE, "applied": plain["applied"]}, plain["scorer"]), sort_keys=True)
    return f"-sparse-{hashlib.sha256(told.encode()).hexdigest()[:6]}"


def _native(what: str, *, _root_: DictConfig) -> Any:
    """`${native:topk}`, `:window` and `:zipped` of the model's own sparse attention, from its configuration alone."""
    from sparsity_lab.models import native_selection
    from sparsity_lab.native import native_cells

    settings: Any = OmegaConf.to_container(_root_.model, resolve=True)
    native = native_selection(settings)
    if native is None:
        raise ValueError(f"selection=native: model {settings['name']} has no sparse attention of its own; v41_mini has")
    return native_cells(native) if what == "zipped" else getattr(native, what)


# at import, not in schemas.register(): the processes of joblib, submitit and Ray import this module and no entry point
OmegaConf.register_new_resolver("basename", _basename, replace=True)
OmegaConf.register_new_resolver("recorded", _recorded, replace=True)
OmegaConf.register_new_resolver("applied", _applied, replace=True)
OmegaConf.register_new_resolver("native", _native, replace=True)


@dataclass(frozen=True)
class Job:
    """One resolved configuration as plain values."""

    config: dict[str, Any]  # the whole resolved configuration
    model: dict[str, Any]
    data: dict[str, Any]
    scorer: dict[str, Any]
    scorer_label: str
    measure: dict[str, Any]
    cells: tuple[Cell, ...]
    failed: tuple[dict[str, Any], ...]
    folder: Path
    objective: str
    dry_run: bool

    @property
    def pass_key(self) -> str:
        """Jobs with the same key share one pass: same model, data, rows and results folder."""
        options = [self.measure, self.config.get("evaluation")]
        return json.dumps([self.model, self.data, options, str(self.folder)], sort_keys=True)


def resolve(config: DictConfig) -> dict[str, Any]:
    """A composed configuration as plain values.

    Raises:
        ValueError: missing mandatory values (named), or only one of model and data taken from a recording.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ValueError(f"{', '.join(missing)}: mandatory, but no value given")
        plain: Any = OmegaConf.to_container(config, resolve=True)
    except InterpolationToMissingValueError as error:
        key = str(error).splitlines()[0].rpartition(": ")[2]
        raise ValueError(f"{key}: mandatory, but no value given") from None
    except InterpolationResolutionError as error:  # what a resolver of ours says is clear by itself
        raise ValueError(str(error).splitlines()[0].partition("interpolation: ")[2] or str(error)) from error
    if "model" in plain:
        plain["model"] = settled(plain["model"], plain.get("scorer"))
        if (applied := plain["model"].get("applied")) is not None:
            applied["scorer"] = chosen_scorer(applied["scorer"], plain["model"])
    replayed = {name: plain.get(name, {}).get("kind") == "recorded" for name in ("model", "data")}
    if replayed["model"] and not replayed["data"]:
        raise ValueError("model=recorded: has only the documents that were recorded; add data=recorded")
    if replayed["data"] and not replayed["model"]:
        raise ValueError("data=recorded: takes the documents of a recording; add model=recorded model.path=FOLDER")
    return plain


def read_job(config: DictConfig, objectives: Sequence[str] = METRICS) -> Job:
    """Check a composed configuration and turn it into a `Job`.

    Raises:
        ValueError: what `resolve` raises, a value out of range, or no valid cell at all.
    """
    values = resolve(config)
    if values["objective"] not in objectives:
        raise ValueError(f"objective={values['objective']}: must be one of {', '.join(objectives)}")
    for key in ("experiment_name", "name"):
        if not values[key].strip("./"):
            raise ValueError(f"{key}={values[key]!r}: must name a folder of its own below results_dir")
    selection = dict(values["selection"])
    pool = selection.pop("candidate")
    if any(value is not None for value in pool.values()):
        selection["candidate"] = _pools(pool)
    values["scorer"] = chosen_scorer(values["scorer"], values["model"])
    label = scorer_label(values["scorer"])
    cells, failed = expand(label, **selection)
    if not cells:
        raise ValueError(failed[0]["reason"])
    return Job(
        config=values,
        model=values["model"],
        data=values["data"],
        scorer=values["scorer"],
        scorer_label=label,
        measure=values["measure"],
        cells=tuple(cells),
        failed=tuple(failed),
        folder=Path(values["results_dir"]) / values["experiment_name"] / values["name"],
        objective=values["objective"],
        dry_run=values["dry_run"],
    )


def _pools(pool: dict[str, Any]) -> list[dict[str, Any] | None]:
    """A `source_layer` of null (alone or in a list) means single-level; the other fields then do not matter."""
    sources = pool["source_layer"] if isinstance(pool["source_layer"], list) else [pool["source_layer"]]
    for key, value in pool.items():
        if value is None and (key != "source_layer" or sources == [None]):
            given = {k: v for k, v in pool.items() if v is not None}
            raise ValueError(f"selection.candidate.{key}: needed for a two-level selection, given {given}")
    single: list[dict[str, Any] | None] = [None] if None in sources else []
    return [*single, {**pool, "source_layer": [s for s in sources if s is not None]}]


def chosen_scorer(scorer: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """What `scorer=auto` stands for: the indexers that come with sparsity_lab for the default model, the model's own
    where it is a DeepSeek V4.1, else quest."""
    if scorer["name"] != "auto":
        return scorer
    if "size" in model:
        return {"name": "native"}
    if model["name"] == "smollm2" and "path" not in model:
        return {"name": "lightning", "weights": "shipped"}
    return {"name": "quest", "head_reduction": "softmax"}


def scorer_label(scorer: dict[str, Any]) -> str:
    """Name of a scorer in results: its own, and in brackets the options that are not the defaults. `learned` is the
    lightning indexer with the shipped weights."""
    if scorer.get("weights") == "shipped":
        scorer = {**scorer, "name": "learned", "weights": None}
    defaults: dict[str, Any] = {"head_reduction": "softmax", "weights": None, "seed": 0}
    defaults |= dataclasses.asdict(IndexerConfig())
    changed = [f"{k}={v}" for k, v in scorer.items() if k != "name" and v != defaults.get(k)]
    return scorer["name"] + (f"[{', '.join(changed)}]" if changed else "")
