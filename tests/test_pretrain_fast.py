"""What computes parts of a training step faster is used where it works, and where it does not the step is the same."""

from __future__ import annotations

import re
import shutil
from typing import Any

import pytest
import tiny_pretrain
import torch

from sparsity_lab.pretrain_attention import weigh
from sparsity_lab.pretrain_fast import Parts, compiled, tried
from sparsity_lab.pretrain_recipe import PretrainRecipe

PARTS = ("sinkhorn", "weigh", "every_expert")


def losses(steps: int = 3, **changes: Any) -> tuple[list[float], list[str]]:
    """A training of all stages, and its notes."""
    train = tiny_pretrain.trainer(steps=steps, **changes)
    data = tiny_pretrain.batches(train.recipe)
    return [float(train.step(data, step, steps)["language"]) for step in range(steps)], train.notes


def test_compiled_parts_are_used_in_training_alone(monkeypatch):
    calls: list[str] = []

    def compile(function, dynamic):
        assert dynamic == (function is weigh)

        def fast(*args):
            calls.append(function.__name__)
            return function(*args)

        return fast

    monkeypatch.setattr(torch, "compile", compile)
    train = tiny_pretrain.trainer(compile=True)
    assert calls == list(PARTS), "each was tried once"
    data, layers = tiny_pretrain.batches(train.recipe), len(tiny_pretrain.SHAPE["compress_ratios"])
    found = train.step(data, 0, 6)
    assert {name: calls.count(name) - 1 for name in PARTS} == {"sinkhorn": 2 * layers, "weigh": layers} | {
        "every_expert": layers
    }
    assert float(found["language"]) == losses()[0][0]
    calls.clear()
    inputs, targets = data.at(0)
    train.evaluate(inputs, targets.clamp_min(0), torch.ones(tiny_pretrain.VOCAB, dtype=torch.long), ("pool",), 1)
    assert not calls
    calls.clear()
    tiny_pretrain.trainer(compile=True, every_expert=False)
    assert calls == ["sinkhorn", "weigh"]


def test_without_a_compiler_training_goes_on_and_says_so(monkeypatch):
    def compile(function, dynamic):
        def fast(*args):
            raise RuntimeError("no compiler here\nand more")

        return fast

    wanted, _ = losses()
    monkeypatch.setattr(torch, "compile", compile)
    found, notes = losses(compile=True)
    assert found == wanted
    assert notes == [f"compiled {name} is not used: no compiler here" for name in PARTS]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda x: x * 1.01, r"differs by 1\.0e-02 of its size"),
        (lambda x: x + 0.1 * (x - x.detach()), r"differs by 1\.0e-01 of its size"),
        (lambda x: x * torch.nan, "differs by nan of its size"),
    ],
)
def test_what_computes_something_else_is_not_used(wrong, words):
    """Outputs, gradients alone, or nonsense."""
    notes: list[str] = []
    made = [torch.linspace(-1, 1, 50)]
    plain = torch.Tensor.exp
    assert tried("it", plain, lambda x: wrong(x.exp()), made, notes) is plain
    assert len(notes) == 1
    assert re.fullmatch(f"it is not used: {words}", notes[0])
    fast = lambda x: 1 / (-x).exp()  # noqa: E731
    assert tried("it", plain, fast, made, notes) is fast
    assert len(notes) == 1


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="needs a C++ compiler")
def test_a_compiled_part_is_the_plain_one():
    """Tiles of several widths, with one row's mask for all sequences or a row's each."""
    fast = compiled(weigh, dynamic=True)
    generator = torch.Generator().manual_seed(0)
    for batch, width in ((1, 24), (2, 40), (2, 56)):
        results = []
        logits = torch.randn(2, 8, 3, width, generator=generator)
        bias = torch.zeros(batch, 8, width).masked_fill_(torch.rand(batch, 8, width, generator=generator) > 0.5, -1e9)
        factors = torch.randn(logits.shape, generator=generator)
        for function in (weigh, fast):
            x = logits.clone().requires_grad_()
            out = function(x, bias, 0.3)
            (out * factors).sum().backward()
            results.append((out.detach(), x.grad))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_plain_is_the_default():
    assert not PretrainRecipe(steps=1).compile
    assert tiny_pretrain.trainer().parts == Parts()
