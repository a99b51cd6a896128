"""A DeepSeek V4.1 model as an `ObservableModel`, alone or spread over the processes of torchrun.

Spread, the first process measures. Each of its forwards is announced to the others, which compute their part of it and
are otherwise idle (`serve`); when the first one ends, so do they.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsity_lab.activations import LayerActivations, Observer
from sparsity_lab.models.deepseek_v41.config import SIZES, DeepseekV41Config
from sparsity_lab.models.deepseek_v41.init import INIT_VERSION, random_model
from sparsity_lab.models.deepseek_v41.model import DeepseekV41Model
from sparsity_lab.models.deepseek_v41.parallel import launched, own_device
from sparsity_lab.models.loading import fingerprint, resolve_device, resolve_dtype
from sparsity_lab.quant import QuantFormat
from sparsity_lab.topology import NativeSelection

ATTENTIONS = ("native", "dense")


class DeepseekV41:
    """Implements `ObservableModel`.

    Args:
        attention: what later layers see: the model's own sparse outputs ("native"), or those of attending to every
            visible compressed position ("dense").
    Raises:
        ValueError: another value of `attention`.
    """

    def __init__(
        self, model: DeepseekV41Model, tokenizer: Any, *, name: str, fingerprint: str, attention: str = "native"
    ) -> None:
        if attention not in ATTENTIONS:
            raise ValueError(f"model.attention={attention!r}: must be one of {', '.join(ATTENTIONS)}")
        config = model.config
        self.model, self.tokenizer, self.name, self.fingerprint = model.eval(), tokenizer, name, fingerprint
        self.attention = attention
        self.num_layers, self.num_heads, self.num_kv_heads = config.num_hidden_layers, config.num_attention_heads, 1
        self.hidden_size, self.head_dim = config.hidden_size, config.head_dim
        self.max_length: int | None = config.max_position_embeddings
        self.native: NativeSelection | None = config.native_selection

    @property
    def device(self) -> torch.device:
        return self.model.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.lm_head.weight.dtype

    def windows(self) -> dict[int, int | None]:
        """Layer -> its window where it attends to nothing else, None where compressed positions lie behind it."""
        config = self.model.config
        return {i: None if ratio else config.sliding_window for i, ratio in enumerate(config.compress_ratios)}

    def observe(self, tokens: Tensor, observer: Observer, layers: Collection[int]) -> None:
        """Run tokens int64 [1, t]; `observer` is called once for each of `layers`, in order.

        Raises:
            ValueError: tokens that are not one document of this vocabulary, or a layer that does not exist.
        """
        wanted = sorted(set(layers))
        unknown = [layer for layer in wanted if not 0 <= layer < self.num_layers]
        if unknown:
            raise ValueError(f"layers={unknown}: {self.name} has layers 0 to {self.num_layers - 1}")
        if tokens.ndim != 2 or tokens.shape[0] != 1:
            raise ValueError(f"tokens {list(tokens.shape)}: must be [1, t], one document without padding at a time")
        self.model.check_ids(tokens)
        if self.model.shard.world == 1:
            self._run(tokens, observer, wanted)
            return
        self._announce(tokens, wanted)
        errors: list[BaseException] = []

        def until_it_fails(activations: LayerActivations) -> None:
            # the others are within the same forward: it is finished with them before an error goes on
            try:
                if not errors:
                    observer(activations)
            except BaseException as error:
                errors.append(error)

        self._run(tokens, until_it_fails, wanted)
        if errors:
            raise errors[0]

    @torch.inference_mode()
    def _run(self, tokens: Tensor, observer: Observer, layers: list[int]) -> None:
        self.model.hidden(tokens.to(self.device), dense=self.attention == "dense", observer=observer, layers=layers)

    def _announce(self, tokens: Tensor, layers: list[int]) -> None:
        """Tell the other processes what forward comes; an empty token list tells them to end."""
        if self.model.shard.world == 1:
            return
        message = [tokens.flatten().tolist(), layers]
        dist.broadcast_object_list(message, device=self.device)

    @property
    def follows(self) -> bool:
        """Whether this process only computes its part of another one's forwards."""
        return self.model.shard.rank > 0

    def serve(self) -> None:
        """In every process but the first: take part in its forwards until it ends."""
        while True:
            message: list[Any] = [None, None]
            dist.broadcast_object_list(message, device=self.device)
            tokens, layers = message
            if not tokens:
                return
            self._run(torch.tensor([tokens]), lambda activations: None, layers)

    def close(self) -> None:
        """Let the other processes end."""
        self._announce(torch.empty(0), [])


def load(
    size: str | None = "tiny",
    *,
    path: str | None = None,
    name: str = "deepseek_v41",
    seed: int = 0,
    dtype: str = "auto",
    device: str = "auto",
    attention: str = "native",
    window_quant: QuantFormat | None = None,
    kv_quant: QuantFormat | None = None,
    index_quant: QuantFormat | None = None,
    engram: bool = False,
) -> DeepseekV41:
    """A model of a named size with random weights, or a checkpoint.

    Under torchrun each process loads its part; all but the first should then call `serve`.

    Args:
        size: a key of `SIZES`; not used with `path`.
        path: folder of a checkpoint, published or unquantised (see `checkpoint.py`), with its tokenizer if it has one;
            "shipped" = the small trained model that comes with sparsity_lab.
        seed: of random weights.
        dtype: auto (float32 on a CPU, bfloat16 elsewhere), float32, bfloat16 or float16.
        device: auto (cuda if there), or any torch device.
        attention: see `DeepseekV41`.
        window_quant, kv_quant, index_quant: storage format of window KV, compressed KV, and index queries and keys;
            None = the model's own, "none" = full precision.
        engram: use the checkpoint's n-gram tables (98 GB each in the published model).
    Raises:
        ValueError: an option out of range, or a checkpoint that does not fit.
    """
    shard = launched()
    where = resolve_device(own_device(shard, device))
    found = resolve_dtype(dtype, where)
    kind = torch.bfloat16 if found == "auto" else found
    given = {"window_quant": window_quant, "kv_quant": kv_quant, "index_quant": index_quant}
    formats: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if path is None:
        config = dataclasses.replace(size_config(size), **formats)
        model = random_model(config, seed=seed, shard=shard, device=where, dtype=kind)
        identity = _digest(config.describe(), INIT_VERSION, seed, str(kind))
        tokenizer = _byte_tokenizer()
    else:
        from sparsity_lab.models.deepseek_v41.checkpoint import load_checkpoint, located, read_config

        path = str(located(path))
        config = dataclasses.replace(read_config(path, engram=engram), **formats)
        tokenizer = _tokenizer(path)
        model = load_checkpoint(path, config, shard=shard, device=where, dtype=kind, tokenizer=tokenizer)
        identity = _digest(fingerprint(path), config.describe())
    loaded = DeepseekV41(model, tokenizer, name=name, fingerprint=identity, attention=attention)
    if shard.world > 1 and shard.rank == 0:
        atexit.register(loaded.close)
    return loaded


def size_config(size: str | None) -> DeepseekV41Config:
    """Raises ValueError for a size that does not exist."""
    if size not in SIZES:
        raise ValueError(f"model.size={size!r}: must be one of {', '.join(SIZES)}")
    return SIZES[size]


def _digest(*parts: Any) -> str:
    """16 hex digits of everything that makes the model's outputs."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _byte_tokenizer() -> Any:
    """Bytes as tokens, for random weights: needs no files."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


def _tokenizer(path: str) -> Any:
    """The checkpoint's tokenizer, None where it brings none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    about = Path(path) / "tokenizer_config.json"
    if not about.is_file():
        return None
    kind = json.loads(about.read_text(encoding="utf-8")).get("tokenizer_class")
    if kind in ("PreTrainedTokenizerFast", "TokenizersBackend"):  # as trained here; asks for no model of that name
        return PreTrainedTokenizerFast.from_pretrained(path)
    return AutoTokenizer.from_pretrained(path)
