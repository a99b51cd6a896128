"""sparsity_lab: how much of the dense attention does a cheap selection keep, and at what cost?

import sparsity_lab as sl
model = sl.load_model("smollm2")
docs = sl.data.pydoc(model.tokenizer, num_documents=2, length=2048)
results = sl.measure(model, docs, sl.grid("quest", topk=[16, 64, 256], compress_ratio=[1, 4]))
results.frame()
sl.plot.coverage(results)
sl.load("results/recall/smollm2-pydoc-2048")   # any results folder
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Resolved on first use, so that reading results does not import torch and transformers.
_NAMES = {
    "load_model": "sparsity_lab.models",
    "grid": "sparsity_lab.cells",
    "measure": "sparsity_lab.measurement",
    "load": "sparsity_lab.folders",
    "collect": "sparsity_lab.results",
}
_MODULES = ("cost", "data", "plot")
__all__ = ["__version__", *_NAMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"sparsity_lab.{name}")
    raise AttributeError(f"module 'sparsity_lab' has no attribute {name!r}")
