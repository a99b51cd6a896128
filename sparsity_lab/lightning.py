"""The lightning indexer attached to the layers of any dense model, as a scorer; and its weight files.

A weight file is a safetensors file with the indexers of one compress ratio: tensors `layers.<i>.<name>` (names as in
`AttachedIndexer`; bfloat16, float16 or float32, used as float32), and under the metadata key `sparsity_lab_indexer` a
JSON object. Files without the first seven fields are refused; the rest say where the weights come from.

    schema              1
    model               name of the model the indexers were made for
    model_fingerprint   its `fingerprint`: of the weights' content, not of where they lie
    hidden_size         width of the attention blocks' input
    compress_ratio      tokens a compressed position
    layers              layers that have an indexer
    config              the fields of `IndexerConfig`
    topology            the fields of `Topology`
    recipe              the fields of `distill.Recipe`
    data                length, and the `train` and `held_out` sources: what was asked for, and the text's digest
    git, versions       of the code that trained them
    steps, tokens       optimiser steps made and training tokens seen
    held_out            the last evaluation: layer -> metric -> value
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsity_lab.activations import ObservableModel
from sparsity_lab.compressor import Compressor
from sparsity_lab.dense import RowTile
from sparsity_lab.float32_linear import Float32Linear
from sparsity_lab.indexer import Indexer, KeyNorm, index_scores
from sparsity_lab.norm import RMSNorm
from sparsity_lab.quant import QuantFormat
from sparsity_lab.rope import Layout, Place, precompute_freqs_cis
from sparsity_lab.scorers import group_keys

SCHEMA = 1
METADATA_KEY = "sparsity_lab_indexer"
log = logging.getLogger("sparsity_lab")


@dataclass(frozen=True)
class IndexerConfig:
    """Shape and conventions of attached indexers; the defaults follow V4.1's, at a small model's size.

    head_dim: width of the compressor's latent; q_lora_rank: width of the query latent, None = x itself; the other
    fields are those of `Indexer`.
    """

    index_n_heads: int = 8
    index_head_dim: int = 32
    rope_head_dim: int = 16
    head_dim: int = 64
    q_lora_rank: int | None = None
    rope_theta: float = 10000.0
    rope_layout: Layout = "adjacent"
    rope_place: Place = "last"
    relu: bool = True
    hadamard: bool = False
    quant: QuantFormat = "none"
    key_norm: KeyNorm = "rms"
    norm_eps: float = 1e-6


class AttachedIndexer(nn.Module):
    """Compressor and indexer of one layer of a dense model, float32; its input is the attention block's input x, of any
    dtype."""

    def __init__(self, config: IndexerConfig, dim: int, ratio: int) -> None:
        super().__init__()
        c = config
        rank = c.q_lora_rank
        self.wq_a = None if rank is None else Float32Linear(dim, rank)
        self.q_norm = None if rank is None else RMSNorm(rank, c.norm_eps)
        self.compressor = Compressor(dim, c.head_dim, ratio, c.norm_eps, Float32Linear)
        self.indexer = Indexer(
            dim, c.index_n_heads, c.index_head_dim, c.rope_head_dim, rank or dim, c.head_dim, c.norm_eps,
            rope_layout=c.rope_layout, rope_place=c.rope_place, relu=c.relu, hadamard=c.hadamard, quant=c.quant,
            key_norm=c.key_norm, linear=Float32Linear,
        )  # fmt: skip
        self.ratio = ratio

    def keys(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        """Index keys of every complete group: x [b, t, dim], freqs_cis [t, rope/2] -> [b, n, d]."""
        latent = self.compressor(x)
        if latent is None:
            return x.new_zeros(x.shape[0], 0, self.indexer.index_head_dim, dtype=torch.float32)
        return self.indexer.keys(latent, freqs_cis[:: self.ratio][: latent.shape[1]])

    def scores(self, x: Tensor, keys: Tensor, freqs_cis: Tensor, visible: Tensor | None = None) -> Tensor:
        """Index scores of some rows: x [b, R, dim], freqs_cis [R, rope/2], keys [b, n, d], visible as `index_scores`
        takes it -> float32 [b, R, n]."""
        qr = x if self.wq_a is None or self.q_norm is None else self.q_norm(self.wq_a(x))
        q, w = self.indexer.queries(qr, freqs_cis), self.indexer.head_weights(x)
        return index_scores(q, keys, w, self.indexer.relu, visible=visible)


def index_freqs(config: IndexerConfig, length: int) -> Tensor:
    """RoPE table of attached indexers, complex64 [length, rope/2] on the CPU."""
    return precompute_freqs_cis(config.rope_head_dim, length, 0, config.rope_theta, 1.0, 32, 1)


def untrained(config: IndexerConfig, dim: int, layer: int, ratio: int, seed: int) -> AttachedIndexer:
    """An indexer with weights drawn from (seed, layer, ratio) alone; the global generator stays as it was."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed((seed * 1_000_003 + layer) * 1009 + ratio)
        return AttachedIndexer(config, dim, ratio)


class Lightning:
    """Scorer: one attached indexer a layer and ratio, with given or untrained weights.

    Args:
        model: the model they are attached to (its width; and its identity, which weight files must match).
        config: shape of untrained indexers; a weight file brings its own.
        weights: a weight file, or a folder with one per ratio; "shipped" = those that come with sparsity_lab; None =
            untrained, drawn from `seed`.
    Raises:
        ValueError: weights made for another model or width, or that lack a layer or ratio asked for.
    """

    name = "lightning"

    def __init__(
        self,
        model: ObservableModel,
        config: IndexerConfig | None = None,
        *,
        weights: str | os.PathLike[str] | None = None,
        seed: int = 0,
    ) -> None:
        self.dim, self.device, self.seed = model.hidden_size, model.device, seed
        self.config = config or IndexerConfig()
        self.asked = None if weights is None else str(weights)
        self.weights = shipped_folder(model) if weights == "shipped" else weights
        self.files = {} if self.weights is None else read_weights(self.weights, model)
        self._modules: dict[tuple[int, int], AttachedIndexer] = {}
        self._tables: dict[int, Tensor] = {}
        self._warned = False

    def describe(self) -> dict[str, Any]:
        if self.files:
            return {"name": self.name, "weights": {ratio: f.digest for ratio, f in sorted(self.files.items())}}
        return {"name": self.name, "untrained_seed": self.seed, **dataclasses.asdict(self.config)}

    def scores(self, tile: RowTile, ratio: int, share: str) -> Tensor:
        module, (keys,) = self.module(tile.acts.layer, ratio), group_keys(self, tile, ratio)
        x = tile.acts.input_rows(tile.rows)
        freqs = self._freqs(ratio, tile.length)[tile.rows]
        return module.scores(x, keys, freqs, tile.visible(ratio))

    def group_keys(self, layer: int, x: Tensor, k: Tensor, ratio: int, first: int) -> tuple[Tensor, ...]:
        """Index keys: see `scorers.GroupKeys`."""
        start = first * ratio
        return (self.module(layer, ratio).keys(x, self._freqs(ratio, start + x.shape[1])[start:]),)

    def _freqs(self, ratio: int, length: int) -> Tensor:
        """RoPE table of at least `length` rows."""
        self._warn(ratio, length)
        table = self._tables.get(ratio)
        if table is None or len(table) < length:
            config = self.files[ratio].config if self.files else self.config
            grown = length if table is None else max(length, 2 * len(table))  # a token more at a time, when decoding
            table = self._tables[ratio] = index_freqs(config, grown).to(self.device)
        return table

    def _warn(self, ratio: int, length: int) -> None:
        """Say once that a sequence is longer than the documents that the weights were distilled on."""
        trained = self.distilled_lengths.get(ratio, length)
        if length > trained and not self._warned:
            self._warned = True
            log.warning("%s", beyond_distillation(str(self.asked), trained, length))

    @property
    def distilled_lengths(self) -> dict[int, int]:
        """Compress ratio -> tokens of the documents that its weights were distilled on, where their file tells."""
        told = {ratio: (file.about.get("data") or {}).get("length") for ratio, file in self.files.items()}
        return {ratio: length for ratio, length in told.items() if length is not None}

    def check(self, layers: Iterable[int], ratio: int) -> None:
        """Raise ValueError where there is no indexer for one of the layers at this ratio."""
        for layer in layers:
            self.module(layer, ratio)

    def module(self, layer: int, ratio: int) -> AttachedIndexer:
        """The indexer of a layer at a ratio, float32 on the model's device."""
        if (layer, ratio) not in self._modules:
            made = self._load(layer, ratio) if self.files else untrained(self.config, self.dim, layer, ratio, self.seed)
            self._modules[layer, ratio] = made.to(self.device).requires_grad_(False)
        return self._modules[layer, ratio]

    def _load(self, layer: int, ratio: int) -> AttachedIndexer:
        if ratio not in self.files:
            raise ValueError(
                f"scorer.weights={self.weights}: made for compress_ratio {sorted(self.files)}, "
                f"not for selection.compress_ratio={ratio}"
            )
        file = self.files[ratio]
        prefix = f"layers.{layer}."
        state = {name.removeprefix(prefix): t.float() for name, t in file.tensors.items() if name.startswith(prefix)}
        if not state:
            raise ValueError(f"scorer.weights={self.weights}: has no indexer for layer {layer} (layers {file.layers})")
        with torch.inference_mode(False):
            module = AttachedIndexer(file.config, self.dim, ratio)
            module.load_state_dict(state)
        return module


def beyond_distillation(weights: str, trained: int, length: int) -> str:
    """What to know of weights that serve longer sequences than they were distilled on."""
    return (
        f"scorer.weights={weights}: distilled on documents of {trained:,} tokens, used on {length:,}: what they select "
        f"beyond {trained:,} was never trained and can be far worse; distil on longer documents "
        f"(experiments/distill.py data.length={length}) or compare with scorer=quest"
    )


SHIPPED = Path(__file__).with_name("indexers")  # a folder a model, with a card that says how they were made


def shipped_folder(model: ObservableModel) -> Path:
    """The folder of the indexers that come with sparsity_lab for a model.

    Raises:
        ValueError: there are none.
    """
    folder = SHIPPED / model.name
    if not folder.is_dir():
        there = ", ".join(sorted(f.name for f in SHIPPED.iterdir() if f.is_dir()))
        raise ValueError(
            f"scorer.weights=shipped: indexers come with sparsity_lab for {there} only, not for {model.name}; train "
            "some with experiments/distill.py, or take scorer=quest"
        )
    return folder


@dataclass(frozen=True)
class WeightFile:
    """A read weight file."""

    config: IndexerConfig
    layers: list[int]
    tensors: Mapping[str, Tensor]
    digest: str  # of its bytes
    about: Mapping[str, Any]  # the whole description


def read_weights(path: str | os.PathLike[str], model: ObservableModel) -> dict[int, WeightFile]:
    """Read a weight file, or every *.safetensors of a folder; ratio -> file.

    Raises:
        ValueError: nothing there, not such a file, made for another model, or two of one ratio.
    """
    from safetensors import SafetensorError, safe_open

    where = Path(path)
    files = sorted(where.glob("*.safetensors")) if where.is_dir() else [where]
    if not files or not all(f.is_file() for f in files):
        raise ValueError(f"scorer.weights={path}: no such file, or a folder without *.safetensors")
    out: dict[int, WeightFile] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                about = json.loads((handle.metadata() or {})[METADATA_KEY])
                tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
            if about["schema"] != SCHEMA:
                raise KeyError(f"schema {about['schema']}")
            config = IndexerConfig(**about["config"])
            made_for, width, ratio = about["model_fingerprint"], about["hidden_size"], about["compress_ratio"]
        except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"scorer.weights={file}: not an indexer weight file of this version ({error})") from error
        if made_for != model.fingerprint or width != model.hidden_size:
            raise ValueError(
                f"scorer.weights={file}: made for {about.get('model')} ({made_for}, hidden size {width}), "
                f"not for {model.name} ({model.fingerprint}, hidden size {model.hidden_size})"
            )
        if ratio in out:
            raise ValueError(f"scorer.weights={path}: two files for compress_ratio={ratio}, the second is {file.name}")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        out[ratio] = WeightFile(config, about["layers"], tensors, digest, about)
    return out


def save_weights(
    path: str | os.PathLike[str],
    modules: Mapping[int, AttachedIndexer],
    config: IndexerConfig,
    model: ObservableModel,
    *,
    dtype: torch.dtype = torch.float32,
    **about: Any,
) -> None:
    """Write the indexers (layer -> module, all of one ratio) of a model to a weight file, atomically.

    Args:
        about: what the description says beside the fields every file has.
    Raises:
        ValueError: modules of several ratios.
    """
    from safetensors.torch import save_file

    from sparsity_lab.results import write_atomically

    ratios = {module.ratio for module in modules.values()}
    if len(ratios) != 1:
        raise ValueError(f"compress_ratio={sorted(ratios)}: a weight file holds the indexers of one ratio")
    states = {i: module.state_dict() for i, module in modules.items()}
    tensors = {
        f"layers.{i}.{k}": t.to("cpu", dtype).contiguous() for i, state in states.items() for k, t in state.items()
    }
    description = {
        **about,
        "schema": SCHEMA,
        "model": model.name,
        "model_fingerprint": model.fingerprint,
        "hidden_size": model.hidden_size,
        "compress_ratio": ratios.pop(),
        "layers": sorted(modules),
        "config": dataclasses.asdict(config),
    }
    metadata = {METADATA_KEY: json.dumps(description, sort_keys=True)}
    write_atomically(Path(path), lambda temporary: save_file(tensors, temporary, metadata=metadata))
