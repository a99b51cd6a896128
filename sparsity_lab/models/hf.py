"""Hugging Face causal LMs, observed through transformers' attention interface.

One function is registered per base implementation (sdpa, eager, ...). It calls the model's own attention, hands the
tensors to the observer, and returns the model's output untouched, so nothing is patched per model family. The layer's
input x comes from a forward pre-hook on the attention module.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsity_lab.activations import LayerActivations, Observer

_PREFIX = "observed_"
_HANDLER = "_sparsity_lab_handler"


class HFModel:
    """A `transformers` causal LM that can be observed. Implements `ObservableModel`."""

    def __init__(self, model: Any, tokenizer: Any = None, *, name: str, fingerprint: str) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name
        self.fingerprint = fingerprint
        config = self.model.config.get_text_config()
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.hidden_size: int = config.hidden_size
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        self._attention = _attention_modules(self.model)
        if not self._attention:
            raise ValueError(f"model={name}: no attention layer with a layer_idx found; this family is not supported")

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def windows(self) -> dict[int, int | None]:
        """Layer -> sliding window (None = full causal) for the layers that have softmax attention."""
        return {layer: _static_window(module) for layer, module in self._attention.items()}

    @torch.inference_mode()
    def observe(self, tokens: Tensor, observer: Observer, layers: Collection[int]) -> None:
        """Run tokens int64 [1, t] through the backbone (no head); `observer` is called per layer of `layers`."""
        unknown = sorted(set(layers) - set(self._attention))
        if unknown:
            raise ValueError(f"layers={unknown}: no attention layer of {self.name}; it has {sorted(self._attention)}")
        backbone = getattr(self.model, self.model.base_model_prefix, self.model)
        with _observed(self.model, {i: self._attention[i] for i in layers}, observer):
            backbone(input_ids=tokens.to(self.device), use_cache=False)


def _attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    found = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and "Attention" in type(module).__name__ and hasattr(module, "scaling"):
            found[layer] = module
    return dict(sorted(found.items()))


def _static_window(module: Any) -> int | None:
    # Mistral-like modules keep the window in the config, the others on the module
    holder = module if hasattr(module, "sliding_window") else module.config
    return getattr(holder, "sliding_window", None)


@contextmanager
def _observed(model: Any, modules: dict[int, nn.Module], observer: Observer) -> Iterator[None]:
    """Route attention through the observing function, and put everything back, also after an error."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    inputs: dict[int, Tensor] = {}
    hooks = []
    try:
        for layer, module in modules.items():
            hooks.append(module.register_forward_pre_hook(_keep_input(inputs, layer), with_kwargs=True))
            setattr(module, _HANDLER, _handler(layer, inputs, observer))
        for key, config in configs.items():
            config._attn_implementation = _register(before[key])
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in modules.values():
            if hasattr(module, _HANDLER):
                delattr(module, _HANDLER)
        for key, config in configs.items():
            config._attn_implementation = before[key]


def _keep_input(inputs: dict[int, Tensor], layer: int) -> Callable:
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        inputs[layer] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    return hook


def _handler(layer: int, inputs: dict[int, Tensor], observer: Observer) -> Callable:
    def handle(q: Tensor, k: Tensor, v: Tensor, output: Tensor, kwargs: dict[str, Any]) -> None:
        sink, softcap = kwargs.get("s_aux"), kwargs.get("softcap")
        observer(
            LayerActivations(
                layer=layer,
                q=q,
                k=k,
                v=v,
                x=inputs.pop(layer),
                output=output,
                scale=float(kwargs["scaling"]) if kwargs.get("scaling") is not None else q.shape[-1] ** -0.5,
                softcap=float(softcap) if softcap else None,
                sink=sink,
                window=kwargs.get("sliding_window"),
            )
        )

    return handle


def _register(base: str | None) -> str:
    """Register the observing twin of an attention implementation (once) and return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    base = base or "eager"
    name = _PREFIX + base
    if name in ALL_ATTENTION_FUNCTIONS:
        return name

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple:
        # every family keeps its own eager function in its modelling file; the other implementations are registered
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        original = ALL_ATTENTION_FUNCTIONS.get_interface(base, eager)
        output, weights = original(module, query, key, value, attention_mask, **kwargs)
        handle = getattr(module, _HANDLER, None)
        if handle is not None:
            handle(query, key, value, output, kwargs)
        return output, weights

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    return name


def load(
    path: str,
    *,
    name: str | None = None,
    gguf_file: str | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> HFModel:
    """Load a causal LM by hub name, local folder, or GGUF file (`gguf_file` inside `path`, or `path` itself).

    Weights come from safetensors or GGUF only, never from pickles.

    Args:
        dtype: auto (float32 on a CPU, the checkpoint's own elsewhere), float32, bfloat16 or float16.
        device: auto (cuda if there), or any torch device.
    Raises:
        ValueError: an option out of range, or nothing loadable at `path`; the message says what was tried.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = resolve_device(device)
    if path.endswith(".gguf") and Path(path).is_file():
        path, gguf_file = str(Path(path).parent), Path(path).name
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if gguf_file:
        common["gguf_file"] = gguf_file
    options: dict[str, Any] = {"dtype": resolve_dtype(dtype, where), "use_safetensors": True, **common}
    if attn_implementation:
        options["attn_implementation"] = attn_implementation
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, **options)
        tokenizer = AutoTokenizer.from_pretrained(path, **common)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(
            f"model.path={path}: could not be loaded as a causal LM from safetensors or GGUF "
            f"({type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}). Give a hub name that "
            "this machine can reach, a local folder with config.json and *.safetensors, or a GGUF file."
        ) from error
    identity = fingerprint(path, model.config, gguf_file)
    return HFModel(model.to(where), tokenizer, name=name or Path(path).name, fingerprint=identity)


def resolve_device(device: str) -> torch.device:
    """`auto` is cuda where there is one; anything else must be a torch device that exists."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device}: not a torch device (auto, cpu, cuda, cuda:0, ...)") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device}: this machine has no usable CUDA device; use device=auto or device=cpu")
    return where


def resolve_dtype(dtype: str, device: torch.device) -> Any:
    """torch dtype, or "auto" (the checkpoint's own) where the device is an accelerator."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={dtype}: must be auto, float32, bfloat16 or float16")
    return getattr(torch, dtype)


def fingerprint(path: str, config: Any, gguf_file: str | None = None) -> str:
    """16 hex digits that change with the weights: of a folder, its config.json and, per weight file, name, size, first
    and last 64 KiB; of a hub model, its name and the commit that transformers notes in the config.
    """
    digest = hashlib.sha256()
    folder = Path(path)
    if folder.is_dir():
        weights = [folder / gguf_file] if gguf_file else sorted(folder.glob("*.safetensors"))
        for file in [*folder.glob("config.json"), *weights]:
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}".encode())
            with file.open("rb") as handle:
                digest.update(handle.read(65536))
                handle.seek(max(0, size - 65536))
                digest.update(handle.read())
    else:
        digest.update(f"{path}@{getattr(config, '_commit_hash', None)}".encode())
    return digest.hexdigest()[:16]
