"""A stand-in for a sparse model whose selections are dictated, so that what an evaluation must find is known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sparsity_lab.models.hf import HFModel


class StubSparse:
    """Runs a Llama whose attention outputs are multiplied by `scale` (layer -> factor) instead of selecting. Answers
    retrieval tasks with `answers(prompt)`, and tells watchers of `layers` the positions `picks(layer, row)` and
    `pool(layer, row)` (None: no pool)."""

    def __init__(
        self,
        model: HFModel,
        layers: Collection[int] = (),
        scale: Mapping[int, float] | None = None,
        answers: Callable[[Tensor], list[int]] | None = None,
        picks: Callable[[int, int], list[int]] = lambda layer, row: [],
        pool: Callable[[int, int], list[int] | None] = lambda layer, row: None,
    ) -> None:
        self.model, self.layers, self.scale = model, list(layers), dict(scale or {})
        self.answers, self.picks, self.pool = answers, picks, pool
        self.tokenizer, self.device = model.tokenizer, model.device
        self._callback: Any = None

    def observe(self, tokens: Tensor, observer: Any, layers: Collection[int]) -> None:
        projections = {i: self.model.model.model.layers[i].self_attn.o_proj for i in self.scale}
        with contextlib.ExitStack() as stack:
            for layer, module in projections.items():
                hook = module.register_forward_hook(lambda m, a, out, factor=self.scale[layer]: out * factor)
                stack.callback(hook.remove)
            self.model.observe(tokens, observer, layers)

    @contextlib.contextmanager
    def watch(self, callback: Any) -> Iterator[None]:
        self._callback = callback
        yield
        self._callback = None

    def generate(self, tokens: Tensor, max_new_tokens: int, **kw: Any) -> Tensor:
        assert self.answers is not None
        new = self.answers(tokens[0])[:max_new_tokens]
        length = tokens.shape[1] + len(new)
        for first, stop in [
            (tokens.shape[1] - 4, tokens.shape[1]),
            *((row, row + 1) for row in range(tokens.shape[1], length - 1)),
        ]:
            rows = torch.arange(first, stop)
            for layer in self.layers if self._callback else ():
                self._callback(layer, rows, *self._told(layer, rows, length))
        return torch.cat([tokens, torch.tensor([new], dtype=torch.int64)], dim=1)

    def _told(self, layer: int, rows: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
        chosen = [self.picks(layer, int(row)) for row in rows]
        width = max(1, *map(len, chosen))
        picks = torch.tensor([[*some, *[-1] * (width - len(some))] for some in chosen]).unsqueeze(0)
        held = [self.pool(layer, int(row)) for row in rows]
        if held[0] is None:
            return picks, None
        pool = torch.zeros(1, len(rows), length, dtype=torch.bool)
        for i, some in enumerate(held):
            pool[0, i, some] = True
        return picks, pool
