"""What must hold of tensors, looked at together: each look waits until a GPU has done all that it was given."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Error = Callable[[], Exception]


class Doubts:
    """Conditions of which nobody knows yet whether they hold."""

    def __init__(self) -> None:
        self._open: list[tuple[Tensor, Error]] = []

    def add(self, wrong: Tensor, error: Error) -> None:
        """Let the next `settle` raise `error()` if `wrong`, bool [], is true."""
        self._open.append((wrong, error))

    def settle(self) -> None:
        """Raise the error of the first doubt that was right, after one look at the device."""
        doubts, self._open = self._open, []
        if not doubts:
            return
        found = torch.stack([wrong for wrong, _ in doubts]).tolist()
        for wrong, (_, error) in zip(found, doubts, strict=True):
            if wrong:
                raise error()


def refuse(wrong: Tensor, error: Error, doubts: Doubts | None) -> None:
    """Raise `error()` if `wrong`, bool [], is true: now, or when `doubts` are settled."""
    if doubts is not None:
        doubts.add(wrong, error)
    elif wrong:
        raise error()
