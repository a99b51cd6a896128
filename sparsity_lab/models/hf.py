"""Hugging Face causal LMs, observed through transformers' attention interface.

During an observation the entries of the implementations in use (sdpa, eager, ...) stand for a function that calls the
model's own attention, hands the tensors to the observer, and returns the model's output untouched, so nothing is
patched per model family. The entry keeps its name, because families look at it. The layer's input x comes from a
forward pre-hook on the attention module; what an indexer of the model's own adds, from `hf_native`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsity_lab.activations import LayerActivations, Observer
from sparsity_lab.models import hf_native
from sparsity_lab.topology import NativeSelection

_HANDLER = "_sparsity_lab_handler"


class HFModel:
    """A `transformers` causal LM that can be observed. Implements `ObservableModel`.

    Args:
        attention: what later layers see of a layer with an indexer of its own: native, the output over its top-k, or
            dense, the output over all that it could have selected.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, name: str, fingerprint: str, attention: str = "native"
    ) -> None:
        hf_native.check_attention(attention)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name
        self.fingerprint = fingerprint
        self.attention: str = self.model.config._attn_implementation or "eager"
        config = self.model.config.get_text_config()
        self._model_type: str = config.model_type
        self.native: NativeSelection | None = hf_native.native_selection_of(config)
        self._dense = attention == "dense"
        if self._dense:
            self.attention += ", dense"
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.hidden_size: int = config.hidden_size
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        self._attention = _attention_modules(self.model)
        if not self._attention:
            raise ValueError(f"model={name}: no attention layer with a layer_idx found; this family is not supported")
        if self.native is None:
            self._check_dense()
        else:
            self._attention = self._selecting(self.native)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def windows(self) -> dict[int, int | None]:
        """Layer -> sliding window (None = full causal) for the layers that have softmax attention.

        Layers that select among compressed positions count as full causal; those that attend to all of them are left
        out.
        """
        return {layer: self._window(layer, module) for layer, module in self._attention.items()}

    def _window(self, layer: int, module: nn.Module) -> int | None:
        behind = self.native is not None and self.native.compressed and self.native.topology.compress_ratios[layer]
        return None if behind else _static_window(module)

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
            raise ValueError(
                f"layers={unknown}: no attention layer of {self.name} that can be observed; it has "
                f"{sorted(self._attention)}"
            )
        self._check_tokens(tokens)
        backbone = getattr(self.model, self.model.base_model_prefix, self.model)
        with _observed({i: self._attention[i] for i in wanted}, observer, self._tap()) as seen:
            backbone(input_ids=tokens.to(self.device), use_cache=False)
        if seen != wanted:
            raise ValueError(
                f"model={self.name}: attention layers {wanted} were to be observed once each and in order, but {seen} "
                "came by; this family does not run them through transformers' attention interface"
            )

    def _tap(self) -> hf_native.Tap | None:
        if self.native is None:
            return None
        return hf_native.Tap(self._model_type, self.native, self._attention, self._dense)

    def _selecting(self, native: NativeSelection) -> dict[int, nn.Module]:
        """The attention layers without those that have compressed keys and nothing to select."""
        return {
            layer: module
            for layer, module in self._attention.items()
            if native.topology.compress_ratios[layer] or getattr(module, "compressor", None) is None
        }

    def _check_dense(self) -> None:
        """Refuse what only a family with a known indexer can do, and an indexer that is not known."""
        known = ", ".join(hf_native.FAMILIES)
        if self._dense:
            raise ValueError(
                f"model.attention=dense: {self.name} ({self._model_type}) has no selection to leave out; this is for "
                f"{known}"
            )
        if any(path.endswith("indexer") for m in self._attention.values() for path, _ in m.named_modules()):
            raise ValueError(
                f"model={self.name}: {self._model_type} has an indexer of its own that is not known here; known are "
                f"{known}"
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
def _observed(modules: Mapping[int, Any], observer: Observer, tap: hf_native.Tap | None = None) -> Iterator[list[int]]:
    """Route attention through the observing function, and put everything back, also after an error.

    Gives the list of the layers that have been observed so far.
    """
    seen: list[int] = []
    with ExitStack() as stack:
        if tap is not None:
            stack.enter_context(tap.listening(modules))
        for layer, module in modules.items():
            inputs: list[Tensor] = []
            hook = module.register_forward_pre_hook(_keep_input(inputs), with_kwargs=True)
            stack.callback(hook.remove)
            setattr(module, _HANDLER, _handler(layer, _static_window(module), inputs, observer, seen, tap))
            stack.callback(delattr, module, _HANDLER)
        for name in {module.config._attn_implementation for module in modules.values()}:
            stack.enter_context(_standing_for(name))
        yield seen


def _keep_input(inputs: list[Tensor]) -> Callable:
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        inputs[:] = [kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]]

    return hook


def _handler(
    layer: int,
    window: int | None,
    inputs: list[Tensor],
    observer: Observer,
    seen: list[int],
    tap: hf_native.Tap | None,
) -> Callable:
    def handle(q: Tensor, k: Tensor, v: Tensor, output: Tensor, kwargs: dict[str, Any]) -> None:
        used = kwargs.get("sliding_window", window) or None
        if used != window:
            raise ValueError(f"layer {layer} attends with a sliding window of {used}, but was said to have {window}")
        scaling, softcap = kwargs.get("scaling"), kwargs.get("softcap")
        seen.append(layer)
        acts = LayerActivations(
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
        observer(acts if tap is None else tap.complete(acts))

    return handle


@contextmanager
def _standing_for(name: str | None) -> Iterator[None]:
    """While open, the attention implementation `name` also calls the handler of its module, where there is one."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before: Any = ALL_ATTENTION_FUNCTIONS.get(name)  # None: eager, which every family has for itself

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple:
        original = before or _eager_attention(module)
        output, weights = original(module, query, key, value, *args, **kwargs)
        handle = getattr(module, _HANDLER, None)
        if handle is not None:
            handle(query, key, value, output, kwargs)
        return output, weights

    ALL_ATTENTION_FUNCTIONS[name] = attention  # over what is registered for everybody
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]
        if before is not None and ALL_ATTENTION_FUNCTIONS.get(name) is not before:
            ALL_ATTENTION_FUNCTIONS[name] = before


def _eager_attention(module: nn.Module) -> Any:
    """Every family keeps its own eager function in its modelling file; the other implementations have an entry."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function

    def missing(*args: Any, **kwargs: Any) -> tuple:
        raise ValueError(f"{type(module).__name__} has no eager attention function; use attn_implementation=sdpa")

    return missing
