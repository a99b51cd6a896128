"""The way into the attention of Hugging Face models: transformers' attention interface.

While attention is intercepted, the entries of the implementations in use (sdpa, eager, ...) stand for a function that
is given the layer's tensors and the model's own attention, so nothing is patched per model family. The entries keep
their names, because families look at them. The layer's input x comes from a forward pre-hook on the attention module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsity_lab.activations import LayerActivations, LeftOut

# A layer's tensors, and the model's own attention over them, which gives (output, weights) -> those to go on with
Around = Callable[[LayerActivations, Callable[[], tuple]], tuple]


def static_window(module: Any) -> int | None:
    # Mistral-like modules keep the window in the config, the others on the module
    holder = module if hasattr(module, "sliding_window") else module.config
    return getattr(holder, "sliding_window", None) or None


@contextmanager
def intercepted(modules: Mapping[int, Any], around: Around, *, unpadded: bool = False) -> Iterator[None]:
    """Route the attention of layers (layer -> module) through `around`, and put everything back, also after an error.

    May be nested: the inner one's `own` is then the outer one.

    Args:
        unpadded: refuse attention masks that hide tokens from the last query, with ValueError.
    """
    inputs: dict[int, list[Tensor]] = {layer: [] for layer in modules}
    places = {module: layer for layer, module in modules.items()}

    def attention(original: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple:
        layer = places.get(module)
        if layer is None:
            return original(module, q, k, v, *args, **kwargs)
        if unpadded:
            _check_mask(layer, args[0] if args else kwargs.get("attention_mask"), k.shape[2])
        acts = _activations(layer, module, inputs[layer].pop(), (q, k, v), kwargs)
        return around(acts, lambda: original(module, q, k, v, *args, **kwargs))

    with ExitStack() as stack:
        for layer, module in modules.items():
            stack.callback(module.register_forward_pre_hook(_keep_input(inputs[layer]), with_kwargs=True).remove)
        for name in {module.config._attn_implementation for module in modules.values()}:
            stack.enter_context(_standing_for(name, attention))
        yield


def _keep_input(inputs: list[Tensor]) -> Callable:
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        inputs[:] = [kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]]

    return hook


def _check_mask(layer: int, mask: Tensor | None, tokens: int) -> None:
    if mask is None:
        return
    last = mask[..., -1, :tokens]
    if not bool((last if last.dtype == torch.bool else last == 0).all()):
        raise ValueError(
            f"layer {layer}: its attention mask hides tokens from the last query; padding (and static caches) are not "
            "supported, run one sequence at a time"
        )


def _activations(
    layer: int, module: Any, x: Tensor, qkv: tuple[Tensor, Tensor, Tensor], kwargs: Mapping[str, Any]
) -> LayerActivations:
    """What an attention function was called with, still without an output."""
    q, k, v = qkv
    window = static_window(module)
    used = kwargs.get("sliding_window", window) or None
    if used != window:
        raise ValueError(f"layer {layer} attends with a sliding window of {used}, but was said to have {window}")
    scaling, softcap = kwargs.get("scaling"), kwargs.get("softcap")
    missing: Any = LeftOut(f"layer {layer}: has no output yet")
    return LayerActivations(
        layer=layer,
        q=q,
        k=k,
        v=v,
        x=x,
        output=missing,
        scale=q.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=float(softcap) if softcap else None,
        sink=kwargs.get("s_aux"),
        window=used,
    )


@contextmanager
def _standing_for(name: str | None, attention: Callable) -> Iterator[None]:
    """While open, `attention` is called in place of the implementation `name`, with that one before the arguments."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before: Any = ALL_ATTENTION_FUNCTIONS.get(name)  # None: eager, which every family has for itself

    def instead(module: nn.Module, *args: Any, **kwargs: Any) -> tuple:
        found: tuple = attention(before or _eager_attention(module), module, *args, **kwargs)
        return found

    ALL_ATTENTION_FUNCTIONS[name] = instead  # over what is registered for everybody
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
