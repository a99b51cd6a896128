"""Checkpoints of DeepSeek V4.1 models: a folder with config.json, safetensors shards and their index.

Two layouts. `published`: DeepSeek's own names (`layers.0.attn.wq_a.weight`), with `.scale` tensors beside fp8 and
packed fp4 weights (see `storage.py`). `unquantised`: the same names behind `model.`, the head as `lm_head`, plain
tensors. Tensors of the parts that a text model has no use for (vision, draft layers) are passed over.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sparsity_lab.models.deepseek_v41.config import DeepseekV41Config
from sparsity_lab.models.deepseek_v41.engram import compressed_token_map
from sparsity_lab.models.deepseek_v41.layout import Slot, build, slots
from sparsity_lab.models.deepseek_v41.model import DeepseekV41Model
from sparsity_lab.models.deepseek_v41.parallel import SINGLE, Shard
from sparsity_lab.models.deepseek_v41.storage import BLOCK, dequantise, quantise_fp4, quantise_fp8

Layout = Literal["published", "unquantised"]
SHIPPED = Path(__file__).parents[2] / "weights" / "v41_mini"
log = logging.getLogger("sparsity_lab")
_FOREIGN = ("vision.", "aligner.", "mtp.", "image_start", "image_end", "image_newline")
_INDEX = "model.safetensors.index.json"
_PACKED = ("I8", "U8")  # safetensors' names of the types that fp4 is packed into
_LOW_PRECISION = ("F8_E4M3", *_PACKED)
_NAMED = 12  # names an error lists of each kind
# what the published layout stores in fp8; routed experts are fp4, the rest bfloat16 or float32
_FP8 = ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "indexer.wq_b", "engram.wkv", "engram.embed")


def located(folder: str | os.PathLike[str]) -> Path:
    """The folder of a checkpoint; "shipped" is the one that comes with sparsity_lab.

    Raises:
        ValueError: it is not there.
    """
    if str(folder) != "shipped":
        return Path(folder)
    if not (SHIPPED / "config.json").is_file():
        raise ValueError("model.path=shipped: this installation of sparsity_lab comes without weights/v41_mini")
    return SHIPPED


def read_config(folder: str | os.PathLike[str], *, engram: bool = False) -> DeepseekV41Config:
    """The configuration in a checkpoint's config.json.

    Args:
        engram: keep its n-gram tables; without, they are left out (and the model is not quite the published one).
    Raises:
        ValueError: no readable config.json, or not one of a DeepSeek V4.1 model.
    """
    path = located(folder) / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path={folder}: has no readable config.json ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"model.path={folder}: config.json holds no object")
    try:
        config = DeepseekV41Config.from_dict(fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"model.path={folder}: config.json: {error}") from error
    if config.engram is not None and not engram:
        log.warning("%s: its n-gram tables (engram) are left out; model.engram=true uses them", folder)
        config = dataclasses.replace(config, engram=None)
    return config


def load_checkpoint(
    folder: str | os.PathLike[str],
    config: DeepseekV41Config | None = None,
    *,
    shard: Shard = SINGLE,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    tokenizer: Any = None,
) -> DeepseekV41Model:
    """Load either layout, tensor by tensor, straight into parameters of `dtype` on `device`.

    Each process reads only the experts it holds. Headers are compared with the configuration before anything is read.

    Args:
        tokenizer: only needed with n-gram tables, whose ids are normalised tokens.
    Raises:
        ValueError: all unknown, missing and misshapen tensors, in one message; or files that cannot be read.
    """
    config = read_config(folder) if config is None else config
    token_map = None if config.engram is None else compressed_token_map(tokenizer, config)
    model = build(config, shard=shard, device=device, dtype=dtype, token_map=token_map)
    with ExitStack() as stack:
        stored = _Stored(located(folder), stack)
        wanted = {stored.translate(slot.name): slot for slot in slots(model)}
        stored.check(wanted, _elsewhere(config, shard, stored), engram=config.engram is not None)
        for name, slot in wanted.items():
            slot.fill(stored.read(name, device), shard)
    return model


class _Stored:
    """The tensors of a folder, opened but not read."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        self.files: dict[str, Any] = {}  # tensor -> the open file that holds it
        paths = self._paths()
        for path in paths:
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"model.path={folder}: {path.name} is missing or damaged ({error})") from error
            for name in handle.keys():  # noqa: SIM118
                if name in self.files:
                    raise ValueError(f"model.path={folder}: {name} is in two files")
                self.files[name] = handle
        self.published = "embed.weight" in self.files

    def _paths(self) -> list[Path]:
        index = self.folder / _INDEX
        if not index.is_file():
            paths = sorted(self.folder.glob("*.safetensors"))
            if not paths:
                raise ValueError(f"model.path={self.folder}: holds neither {_INDEX} nor any *.safetensors")
            return paths
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"model.path={self.folder}: {_INDEX} is damaged ({error!r})") from error
        return [self.folder / name for name in sorted(names)]

    def translate(self, name: str) -> str:
        """A slot's name in this folder's layout."""
        return published_name(name) if self.published else name

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor once dequantised."""
        part = self.files[name].get_slice(name)
        shape = list(part.get_shape())
        return [*shape[:-1], shape[-1] * 2] if part.get_dtype() in _PACKED else shape

    def scale_of(self, name: str) -> str | None:
        """Name of the scale tensor that belongs beside a low-precision weight, None where it is stored plain."""
        low = self.files[name].get_slice(name).get_dtype() in _LOW_PRECISION
        return name.removesuffix(".weight") + ".scale" if low else None

    def check(self, wanted: Mapping[str, Slot], elsewhere: set[str], *, engram: bool) -> None:
        """Raise ValueError unless the folder holds exactly what is wanted here or in other processes."""
        there = [name for name in wanted if name in self.files]
        scales = dict.fromkeys(scale for name in there if (scale := self.scale_of(name)))
        missing = [name for name in [*wanted, *scales] if name not in self.files]
        misshapen = [
            f"{name} is {self.shape(name)}, must be {list(wanted[name].shape)}"
            for name in there
            if self.shape(name) != list(wanted[name].shape)
        ]
        unknown = [
            name
            for name in self.files
            if name not in wanted and name not in scales and name.removesuffix(".scale") + ".weight" not in elsewhere
            and name not in elsewhere and not name.startswith(_FOREIGN) and (engram or ".engram." not in name)
        ]  # fmt: skip
        kinds = {"missing": missing, "unknown": unknown, "misshapen": misshapen}
        told = [f"{kind} ({len(names)}): {_some(names)}" for kind, names in kinds.items() if names]
        if told:
            raise ValueError(f"model.path={self.folder}: does not fit its config.json. {'; '.join(told)}")

    def read(self, name: str, device: torch.device | str) -> Tensor:
        """A whole tensor on the device, dequantised."""
        values = self.files[name].get_tensor(name).to(device)
        scale = self.scale_of(name)
        if scale is None:
            return values
        try:
            return dequantise(values, self.files[scale].get_tensor(scale).to(device))
        except ValueError as error:
            raise ValueError(f"model.path={self.folder}: {name}: {error}") from error


def published_name(name: str) -> str:
    """Name in the published layout."""
    return "head.weight" if name == "lm_head.weight" else name.removeprefix("model.")


def _elsewhere(config: DeepseekV41Config, shard: Shard, stored: _Stored) -> set[str]:
    """Tensors that other processes hold: routed experts that are not this one's."""
    if shard.world == 1:
        return set()
    return {
        stored.translate(f"model.layers.{layer}.ffn.experts.{expert}.{part}.weight")
        for layer in range(config.num_hidden_layers)
        for expert in range(config.n_routed_experts)
        if expert // shard.part(config.n_routed_experts, "n_routed_experts") != shard.rank
        for part in ("w1", "w2", "w3")
    }


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (" ..." if len(names) > _NAMED else "")


def save_checkpoint(
    model: DeepseekV41Model,
    folder: str | os.PathLike[str],
    *,
    layout: Layout = "unquantised",
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Write a checkpoint folder, shard by shard; it appears whole or not at all.

    Args:
        layout: "unquantised" keeps every value; "published" rounds weights to fp8 and routed experts to fp4.
        max_shard_bytes: a shard is closed before it would exceed this.
    Raises:
        ValueError: an unknown layout, a folder that exists, or a model spread over processes.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"layout={layout!r}: must be one of {get_args(Layout)}")
    if model.shard.world > 1:
        raise ValueError("a model spread over processes cannot be saved; load it in one process")
    target = Path(folder)
    if target.exists():
        raise ValueError(f"{target}: exists already; name a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write(model, temporary, layout, max_shard_bytes)
        temporary.chmod(0o777 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _umask() -> int:
    """What new folders leave out; mkdtemp makes private ones."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write(model: DeepseekV41Model, folder: Path, layout: Layout, limit: int) -> None:
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(_shards(_stored_tensors(model, layout), limit), start=1):
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(model.config.to_published(), indent=1), encoding="utf-8")


def _stored_tensors(model: DeepseekV41Model, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as written, made one after the other."""
    for slot in slots(model):
        value = slot.target.detach()
        if layout == "unquantised":
            yield slot.name, value.contiguous()
            continue
        name = published_name(slot.name)
        stem = name.removesuffix(".weight")
        if ".experts." in name:
            values, scale = quantise_fp4(value)
        elif stem.endswith(_FP8) or ".shared_experts." in name:
            values, scale = quantise_fp8(value, rows=1 if stem.endswith("embed") else BLOCK)
        else:
            yield name, (value if value.dtype == torch.float32 and _stays_float32(name) else value.bfloat16()).clone()
            continue
        yield name, values
        yield f"{stem}.scale", scale


def _stays_float32(name: str) -> bool:
    return "hc_" in name or name.endswith(("attn_sink", "gate.bias", "gate.bias_vl"))


def _shards(tensors: Iterator[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.cpu()
        size += tensor.nbytes
    yield shard
