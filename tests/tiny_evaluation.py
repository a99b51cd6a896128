"""A small evaluation of a tiny Llama with dictated sparse models, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tiny_models
import torch
from stub_sparse import StubSparse
from tiny import tiny_tokenizer
from torch import Tensor

from sparsity_lab.cells import Cell, Selection
from sparsity_lab.documents import Document, Documents
from sparsity_lab.evaluation.run import Evaluation, Options, place
from sparsity_lab.evaluation.summary import EvaluationResults, load
from sparsity_lab.evaluation.tables import EvaluationStore
from sparsity_lab.models.hf import HFModel
from sparsity_lab.scorers import BASELINES

LENGTH = 700
SCALES = {4: 0.5, 16: 0.8, 64: 0.95}  # k -> what the stand-in does to attention: the nearer to 1, the less is lost
CELLS = tuple(Cell("quest", Selection(topk=k, window=8)) for k in SCALES)
OPTIONS = Options(rows=16, tasks=("single", "multi_value"), lengths=(600,), depths=(0.3,))


class Dictated(HFModel):
    """A tiny Llama that answers the kinds of task in `knows` and nothing else; counts its forwards."""

    def __init__(self, knows: Sequence[str] = ("single",)) -> None:
        model = tiny_models.build("llama", max_position_embeddings=2048)
        super().__init__(model, tiny_tokenizer(), name="llama", fingerprint="f")
        self.knows, self.forwards = knows, 0

    def observe(self, *args: Any) -> None:
        self.forwards += 1
        super().observe(*args)

    def generate(self, tokens: Tensor, max_new_tokens: int, **kw: Any) -> Tensor:
        return torch.cat([tokens, torch.tensor([answer(self, tokens[0], self.knows)])], dim=1)


def answer(model: HFModel, prompt: Tensor, knows: Sequence[str] = ("single",)) -> list[int]:
    """The numbers that the text holds for the key that is asked for, if the kind of task is known."""
    import re

    text = model.tokenizer.decode(prompt)
    key = text.rpartition("of the ")[2].split()[0]
    found = re.findall(rf"The secret number of the {key} is (\d+)\.", text)
    kind = "single" if len(found) == 1 else "multi_value"
    said = ", ".join(found) if kind in knows else "unknown"
    return model.tokenizer(" " + said, add_special_tokens=False)["input_ids"]


def documents(count: int = 2, first: int = 0) -> Documents:
    tokenizer = tiny_tokenizer()
    items = []
    for index in range(first, count):
        text = "".join(f"document {index} says nothing new in line {line}.\n" for line in range(99))
        items.append(Document(index, torch.tensor(tokenizer(text)["input_ids"][:LENGTH]), f"lines {index}"))
    return Documents(tuple(items), {"name": "lines", "length": LENGTH, "seed": 0})


def run(
    folder: Path,
    docs: Documents | None = None,
    *,
    model: Any = None,
    cells: Sequence[Cell] = CELLS,
    options: Options = OPTIONS,
    make_sparse: Any = None,
    manifest: Mapping[str, Any] | None = None,
) -> EvaluationResults:
    """Sparse models of k = 64 hold the whole needle, those of less hold nothing and answer nothing."""
    model, docs = model or Dictated(), docs or documents()
    layers = {cell: [0, 1, 2] for cell in cells}
    scorers = {name: BASELINES[name]() for name in {cell.scorer for cell in cells}}
    placed, described = place(model, docs.source, cells, scorers, layers, options)
    store = EvaluationStore(folder, manifest or {})
    store.register(described)

    def sparse(model: Any, selection: Selection, scorer: Any, layers: Sequence[int]) -> StubSparse:
        whole = selection.topk == 64
        return StubSparse(
            model, layers, dict.fromkeys(layers, SCALES[selection.topk]),
            answers=lambda prompt: answer(model, prompt, model.knows if whole else ()),
            picks=lambda layer, row: list(range(600)) if whole else [],
        )  # fmt: skip

    said: list[str] = []
    Evaluation(model, docs, placed, options, make_sparse or sparse).run(store, say=said.append)
    store.finish()
    found = load(folder)
    found.manifest["said"] = said
    return found
