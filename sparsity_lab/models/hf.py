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

    Weights come from safetensors or GGUF only, never from pickles, and all of them must be there.

    Args:
        name: what results call the model; None = the last part of its path.
        revision: branch, tag or commit of a hub model.
        dtype: auto (float32 on a CPU, the checkpoint's own elsewhere), float32, bfloat16 or float16.
        device: auto (cuda if there), or any torch device.
        attn_implementation: sdpa, eager, ...; None = what transformers takes for this family.
        trust_remote_code: run Python files that come with the model.
    Raises:
        ValueError: an option out of range, nothing loadable at `path`, or weights missing from it; the message says
            what was tried.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not isinstance(trust_remote_code, bool):
        raise ValueError(f"model.trust_remote_code={trust_remote_code!r}: must be true or false")
    where = resolve_device(device)
    source, gguf_file = _locate(path, gguf_file)
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if gguf_file:
        common["gguf_file"] = gguf_file
    options: dict[str, Any] = {"dtype": resolve_dtype(dtype, where), "use_safetensors": True, **common}
    if attn_implementation:
        options["attn_implementation"] = attn_implementation
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **options)
        tokenizer = AutoTokenizer.from_pretrained(source, **common)
    except Exception as error:  # missing, damaged, foreign: each library has its own, and all mean the same here
        raise ValueError(
            f"model.path={path}: could not be loaded as a causal LM from safetensors or GGUF "
            f"({type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}). Give a hub name that "
            "this machine can reach, a local folder with config.json and *.safetensors, or a GGUF file."
        ) from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"model.path={path}: has no weights for {', '.join(missing[:3])} ({len(missing)} in all)")
    _keep_softcap(model, attn_implementation)
    identity = fingerprint(source, gguf_file=gguf_file, revision=revision)
    title = name or (Path(gguf_file).stem if gguf_file else Path(source).resolve().name)
    return HFModel(model.to(where), tokenizer, name=title, fingerprint=identity)


def _keep_softcap(model: Any, asked: str | None) -> None:
    """sdpa has no soft-cap; some versions of transformers leave it out without a word, and by default."""
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if softcap and model.config._attn_implementation == "sdpa":
        if asked:
            raise ValueError(f"attn_implementation={asked}: leaves out this model's soft-cap of {softcap}; use eager")
        model.set_attn_implementation("eager")


def _locate(path: str, gguf_file: str | None) -> tuple[str, str | None]:
    """(local folder or hub name, GGUF file in it or None)."""
    local = Path(path).expanduser()
    if local.is_dir():
        if gguf_file and not (local / gguf_file).is_file():
            there = ", ".join(sorted(file.name for file in local.glob("*.gguf"))) or "none"
            raise ValueError(f"model.gguf_file={gguf_file}: not in {path}; GGUF files there: {there}")
        return str(local), gguf_file
    if local.suffix == ".gguf" and gguf_file:
        raise ValueError(f"model.path={path} is a GGUF file itself; leave model.gguf_file={gguf_file} out")
    if local.suffix == ".gguf" and local.is_file():
        return str(local.parent), local.name
    if local.is_file():
        raise ValueError(f"model.path={path}: is a file, but no GGUF; give the folder it lies in")
    if local.is_absolute() or local.suffix == ".gguf" or path.startswith(".") or path.count("/") > 1:
        raise ValueError(f"model.path={path}: no such file or folder")
    return path, gguf_file


def resolve_device(device: str) -> torch.device:
    """`auto` is cuda where there is one; anything else must be a torch device that exists here, else ValueError."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device}: not a torch device (auto, cpu, cuda, cuda:0, ...)") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device}: this machine has no usable CUDA device; use device=auto or device=cpu")
    try:
        torch.zeros(1, device=where).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device={device}: not usable on this machine ({str(error).splitlines()[0]})") from error
    return where


def resolve_dtype(dtype: str, device: torch.device) -> Any:
    """torch dtype, or "auto" (the checkpoint's own) where the device is an accelerator; ValueError for others."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={dtype}: must be auto, float32, bfloat16 or float16")
    return getattr(torch, dtype)


def fingerprint(path: str, *, gguf_file: str | None = None, revision: str | None = None) -> str:
    """16 hex digits of everything that makes the model's outputs.

    Of a folder: the content of the GGUF file, or of config.json, *.safetensors and *.py, wherever the folder lies. Of a
    hub model: its name, file and commit (a commit is the digest of a repository's content).
    """
    folder = Path(path)
    if folder.is_dir():
        patterns = ("config.json", "*.safetensors", "*.py")
        files = [folder / gguf_file] if gguf_file else [file for p in patterns for file in sorted(folder.glob(p))]
        parts = []
        for file in files:
            with file.open("rb") as handle:
                parts.append(hashlib.file_digest(handle, "sha256").hexdigest())
    else:
        parts = [path, gguf_file or "", _commit(path, gguf_file or "config.json", revision)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _commit(repository: str, file: str, revision: str | None) -> str:
    """Commit of the snapshot in the hub cache that `file` was loaded from; later transformers note it nowhere else."""
    from transformers.utils.hub import cached_file, extract_commit_hash

    commit = extract_commit_hash(cached_file(repository, file, revision=revision, local_files_only=True), None)
    if commit is None:
        raise ValueError(f"model.path={repository}: its commit is not known, so results could not say what they are of")
    return commit
