"""Hugging Face causal LMs, observed through transformers' attention interface.

During an observation the model's own attention is called as ever and its output returned untouched; the observer is
handed the tensors on the way (`hf_attention`). What an indexer of the model's own adds comes from `hf_native`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsity_lab.activations import LayerActivations, Observer
from sparsity_lab.models import hf_native
from sparsity_lab.models.hf_attention import intercepted, static_window
from sparsity_lab.topology import NativeSelection


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
        self._check_softcap(name, getattr(config, "attn_logit_softcapping", None))
        if self._dense:
            self.attention += ", dense"
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.hidden_size: int = config.hidden_size
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
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
        return None if behind else static_window(module)

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

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """Next-token logits of one document: int64 [1, t] -> float32 [t, vocabulary].

        Raises:
            ValueError: tokens that are not one unpadded document of this vocabulary.
        """
        self._check_tokens(tokens)
        logits: Tensor = self.model(input_ids=tokens.to(self.device), use_cache=False).logits
        return logits[0].float()

    @torch.inference_mode()
    def generate(self, tokens: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        """Continue one document, greedily unless `options` of transformers' `generate` say otherwise: int64 [1, t] ->
        [1, ≤ t + max_new_tokens], the prompt with it.

        Raises:
            ValueError: tokens that are not one unpadded document of this vocabulary, or too long a text.
        """
        self._check_tokens(tokens)
        length = tokens.shape[1] + max_new_tokens
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"max_new_tokens={max_new_tokens}: {self.name} was made for at most {self.max_length} positions, and "
                f"there are {tokens.shape[1]} already"
            )
        tokens = tokens.to(self.device)
        mask = options.pop("attention_mask", None)
        if mask is not None and not bool((mask != 0).all()):
            raise ValueError("attention_mask: hides tokens; padding is not supported, give one document without it")
        config = self.model.generation_config
        end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        greedy["pad_token_id"] = end if config.pad_token_id is None else config.pad_token_id
        out: Tensor = self.model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new_tokens,
            **{**greedy, **options},
        )
        return out

    def attention_module(self, layer: int) -> nn.Module:
        """The attention of a layer."""
        return self._attention[layer]

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

    def _check_softcap(self, name: str, softcap: float | None) -> None:
        """Some versions of transformers run sdpa without the soft-cap and say nothing; sparse attention has it."""
        if softcap and self.attention == "sdpa":
            raise ValueError(
                f"model={name}: attn_implementation=sdpa leaves out this model's soft-cap of {softcap}; use eager"
            )

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


@contextmanager
def _observed(modules: Mapping[int, Any], observer: Observer, tap: hf_native.Tap | None = None) -> Iterator[list[int]]:
    """Show attention to an observer; gives the list of the layers that have been observed so far."""
    seen: list[int] = []

    def around(acts: LayerActivations, own: Callable[[], tuple]) -> tuple:
        output, weights = own()
        seen.append(acts.layer)
        acts = dataclasses.replace(acts, output=output)
        observer(acts if tap is None else tap.complete(acts))
        return output, weights

    with ExitStack() as stack:
        if tap is not None:
            stack.enter_context(tap.listening(modules))
        stack.enter_context(intercepted(modules, around))
        yield seen
