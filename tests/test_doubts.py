"""Checks that wait: the first that was right speaks, and a layer of a pass looks at its device once."""

import pytest
import torch
from fake_model import FakeModel, documents

from sparsity_lab.cells import grid
from sparsity_lab.doubts import Doubts, refuse
from sparsity_lab.measurement import measure
from sparsity_lab.scorers import Quest

LOOKS = ("__bool__", "__float__", "__int__", "item", "tolist", "nonzero")


def error(text):
    return lambda: ValueError(text)


def test_the_first_doubt_that_was_right_is_raised_once():
    doubts = Doubts()
    for wrong, text in ((False, "a"), (True, "b"), (True, "c")):
        refuse(torch.tensor(wrong), error(text), doubts)
    with pytest.raises(ValueError, match=r"^b$"):
        doubts.settle()
    doubts.settle()
    refuse(torch.tensor(False), error("d"), None)
    with pytest.raises(ValueError, match=r"^e$"):
        refuse(torch.tensor(True), error("e"), None)


def looks(layers, monkeypatch):
    """How often a pass over some layers asks a tensor for its value."""
    count = 0

    def counted(name):
        ask = getattr(torch.Tensor, name)

        def asked(self, *args):
            nonlocal count
            count += 1
            return ask(self, *args)

        return asked

    cells = grid(["quest", "oracle"], topk=[2, 5], compress_ratio=[1, 3], window=4)
    with monkeypatch.context() as patch:
        for name in LOOKS:
            patch.setattr(torch.Tensor, name, counted(name))
        measure(FakeModel(num_layers=layers), documents(1, 40), cells, rows=8, detail_rows=0)
    return count


def test_a_layer_looks_at_its_device_once(monkeypatch):
    assert looks(5, monkeypatch) - looks(2, monkeypatch) == 3


def test_a_layer_with_nan_scores_is_the_last(monkeypatch):
    right = Quest.scores
    monkeypatch.setattr(
        Quest,
        "scores",
        lambda self, tile, *rest: right(self, tile, *rest) / (0.0 if tile.acts.layer == 1 else 1.0) * 0.0,
    )
    seen, cells = [], grid("quest", topk=3, window=4)
    with pytest.raises(ValueError, match="scores contain NaN"):
        measure(
            FakeModel(num_layers=3), documents(1, 40), cells, rows=8, progress=lambda done, total: seen.append(done)
        )
    assert seen == [1]
