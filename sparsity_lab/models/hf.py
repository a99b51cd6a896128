"""Hugging Face causal LMs, observed through transformers' attention interface.

One function is registered per base implementation (sdpa, eager, ...). It calls the model's own attention, hands the
tensors to the observer, and returns the model's output untouched, so nothing is patched per model family. The layer's
input x comes from a forward pre-hook on the attention module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsity_lab.activations import LayerActivations, Observer
from sparsity_lab.topology import NativeSelection

_PREFIX = "observed_"
_HANDLER = "_sparsity_lab_handler"


class HFModel:
    """A `transformers` causal LM that can be observed. Implements `ObservableModel`."""

    def __init__(self, model: Any, tokenizer: Any = None, *, name: str, fingerprint: str) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.native: NativeSelection | None = None
        self.name = name
        self.fingerprint = fingerprint
        self.attention: str = self.model.config._attn_implementation or "eager"
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
        """Run tokens int64 [1, t] through the backbone (no head); `observer` is called once for each of `layers`, in
        order. Whatever happens, the model is left as it was.

        Raises:
            ValueError: tokens that are not one unpadded document of this vocabulary; a layer that does not exist or
                whose attention did not come by once, in order. Whatever the observer raises comes through.
        """
        wanted = sorted(set(layers))
        unknown = [layer for layer in wanted if layer not in self._attention]
        if unknown:
            raise ValueError(f"layers={unknown}: no attention layer of {self.name}; it has {sorted(self._attention)}")
        self._check_tokens(tokens)
        backbone = getattr(self.model, self.model.base_model_prefix, self.model)
        with _observed(self.model, {i: self._attention[i] for i in wanted}, observer) as seen:
            backbone(input_ids=tokens.to(self.device), use_cache=False)
        if seen != wanted:
            raise ValueError(
                f"model={self.name}: attention layers {wanted} were to be observed once each and in order, but {seen} "
                "came by; this family does not run them through transformers' attention interface"
            )

    def _check_tokens(self, tokens: Tensor) -> None:
        if tokens.ndim != 2 or tokens.shape[0] != 1 or tokens.shape[1] == 0:
            raise ValueError(f"tokens {list(tokens.shape)}: must be [1, t], one document without padding at a time")
        if tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"tokens are {tokens.dtype}: must be int64")
        low, high = (int(x) for x in tokens.aminmax())
        vocab_size = self.model.get_input_embeddings().weight.shape[0]
        if low < 0 or high >= vocab_size:
            raise ValueError(f"tokens {low} to {high}: {self.name} has 0 to {vocab_size - 1}")


def _attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """Layer -> its softmax attention, told by `scaling` from linear ones and from decoder layers named after it."""
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if not (isinstance(layer, int) and "Attention" in type(module).__name__ and hasattr(module, "scaling")):
            continue
        if found.setdefault(layer, module) is not module:
            names = f"{type(found[layer]).__name__} and {type(module).__name__}"
            raise ValueError(f"layer {layer} has two attentions ({names}); this family is not supported")
    return dict(sorted(found.items()))


def _static_window(module: Any) -> int | None:
    # Mistral-like modules keep the window in the config, the others on the module
    holder = module if hasattr(module, "sliding_window") else module.config
    return getattr(holder, "sliding_window", None) or None


@contextmanager
def _observed(model: Any, modules: dict[int, nn.Module], observer: Observer) -> Iterator[list[int]]:
    """Route attention through the observing function, and put everything back, also after an error.

    Gives the list of the layers that have been observed so far.
    """
    configs = list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())
    before = [config._attn_implementation for config in configs]
    seen: list[int] = []
    hooks = []
    try:
        for layer, module in modules.items():
            inputs: list[Tensor] = []
            hooks.append(module.register_forward_pre_hook(_keep_input(inputs), with_kwargs=True))
            setattr(module, _HANDLER, _handler(layer, _static_window(module), inputs, observer, seen))
        # the setter also writes to nested configs, so the outermost comes first, here and when putting back
        for config, base in zip(configs, before, strict=True):
            config._attn_implementation = _register(base)
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
        for module in modules.values():
            if hasattr(module, _HANDLER):
                delattr(module, _HANDLER)
        for config, base in zip(configs, before, strict=True):
            config._attn_implementation = base


def _keep_input(inputs: list[Tensor]) -> Callable:
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        inputs[:] = [kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]]

    return hook


def _handler(layer: int, window: int | None, inputs: list[Tensor], observer: Observer, seen: list[int]) -> Callable:
    def handle(q: Tensor, k: Tensor, v: Tensor, output: Tensor, kwargs: dict[str, Any]) -> None:
        used = kwargs.get("sliding_window", window) or None
        if used != window:
            raise ValueError(f"layer {layer} attends with a sliding window of {used}, but was said to have {window}")
        scaling, softcap = kwargs.get("scaling"), kwargs.get("softcap")
        seen.append(layer)
        observer(
            LayerActivations(
                layer=layer,
                q=q,
                k=k,
                v=v,
                x=inputs.pop(),
                output=output,
                scale=q.shape[-1] ** -0.5 if scaling is None else float(scaling),
                softcap=float(softcap) if softcap else None,
                sink=kwargs.get("s_aux"),
                window=used,
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
        original: Any = ALL_ATTENTION_FUNCTIONS.get_interface(base, _eager_attention(module))
        output, weights = original(module, query, key, value, attention_mask, **kwargs)
        handle = getattr(module, _HANDLER, None)
        if handle is not None:
            handle(query, key, value, output, kwargs)
        return output, weights

    AttentionInterface.register(name, attention)
    if base in ALL_MASK_ATTENTION_FUNCTIONS:  # an implementation that has none makes do without a mask
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    return name


def _eager_attention(module: nn.Module) -> Any:
    """Every family keeps its own eager function in its modelling file; the other implementations are registered."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function

    def missing(*args: Any, **kwargs: Any) -> tuple:
        raise ValueError(f"{type(module).__name__} has no eager attention function; use attn_implementation=sdpa")

    return missing
