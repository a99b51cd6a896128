"""Dense against sparse, row by row: hand-computed numbers, the families' own logits, errors by layer."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from stub_sparse import StubSparse
from torch import nn

from sparsity_lab.cells import Selection
from sparsity_lab.checks import CheckError
from sparsity_lab.evaluation import likelihood
from sparsity_lab.evaluation.likelihood import Comparison, Forward
from sparsity_lab.models.hf import HFModel


class Identity(nn.Module):
    """A causal LM whose logits are its final hidden states."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Identity()

    def get_decoder(self):
        return self.backbone

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.backbone(input_ids).last_hidden_state)


def forward(*rows):
    return Forward(torch.tensor(rows).log(), {})


def test_by_hand():
    dense = forward([0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [1 / 3, 1 / 3, 1 / 3])
    sparse = forward([0.25, 0.5, 0.25], [0.1, 0.1, 0.8], [1 / 3, 1 / 3, 1 / 3])
    found = likelihood.compare(Identity(), dense, sparse, torch.tensor([2, 0, 2]))
    assert found.dense_loss.tolist() == pytest.approx([math.log(2), -math.log(0.8)], abs=1e-6)
    assert found.loss.tolist() == pytest.approx([math.log(4), -math.log(0.8)], abs=1e-6)
    assert found.kl.tolist() == pytest.approx([0.25 * math.log(2), 0], abs=1e-6)
    assert found.agreement.tolist() == [0, 1]


def test_stretches_join_without_a_seam(monkeypatch):
    torch.manual_seed(0)
    dense, sparse = (Forward(torch.randn(11, 7), {}) for _ in range(2))
    tokens = torch.randint(7, (11,))
    whole = likelihood.compare(Identity(), dense, sparse, tokens)
    monkeypatch.setattr(likelihood, "STRETCH", 4)
    parts = likelihood.compare(Identity(), dense, sparse, tokens)
    p, q = dense.hidden[:-1].softmax(-1), sparse.hidden[:-1].softmax(-1)
    torch.testing.assert_close(whole.kl, (p * (p / q).log()).sum(-1).double())
    for name in ("dense_loss", "loss", "kl", "agreement"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_logits_are_the_familys_own(family):
    model = HFModel(tiny_models.build(family, attn_implementation="eager"), name=family, fingerprint="f")
    tokens = tiny_models.tokens(24)[0]
    found = likelihood.run(model, model, tokens, [], torch.arange(0))
    with torch.inference_mode():
        own = model.model(input_ids=tokens.unsqueeze(0)).logits[0]
    torch.testing.assert_close(likelihood.logits(model.model, found.hidden[5:9]), own[5:9])
    likelihood.check_head(model, tokens)


def llama():
    return HFModel(tiny_models.build("llama"), name="llama", fingerprint="f")


def test_a_head_that_is_elsewhere_is_noticed(monkeypatch):
    model = llama()
    monkeypatch.setattr(likelihood, "logits", lambda causal, hidden: torch.zeros(hidden.shape[0], tiny_models.VOCAB))
    with pytest.raises(CheckError, match="not its own"):
        likelihood.check_head(model, tiny_models.tokens(24)[0])


def test_output_error_of_a_layer_and_of_those_behind_it():
    model, tokens, rows = llama(), tiny_models.tokens(40)[0], torch.arange(3, 40, 4)
    dense = likelihood.run(model, model, tokens, [0, 1, 2], rows)
    sparse = likelihood.run(StubSparse(model, scale={1: 1.25}), model, tokens, [0, 1, 2], rows)
    errors = likelihood.output_errors(dense, sparse)
    assert errors[0] == 0
    assert errors[1] == pytest.approx(0.25, rel=1e-5)
    assert errors[2] > 0.001
    assert dense.outputs[0].shape == (10, model.hidden_size)
    assert not torch.equal(dense.hidden, sparse.hidden)


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({"topk": 4, "window": 0}, 4),  # at row 4 five positions are visible
        ({"topk": 4, "window": 9}, 9),  # at row 9 token 0 has left the window
        ({"topk": 4, "window": 9, "compress_ratio": 2}, 9),  # five pairs are visible from row 9 on
        ({"topk": 4, "window": 0, "compress_ratio": 2}, 9),
    ],
)
def test_rows_at_which_something_can_be_left_out(options, first):
    assert likelihood.selective(torch.arange(20), Selection(**options)).tolist() == [row >= first for row in range(20)]


def test_sums_by_keys():
    ones = torch.arange(6, dtype=torch.float64)
    found = likelihood.sums_by(
        [torch.tensor([1, 1, 2, 2, 4, 4]), torch.tensor([0, 0, 0, 1, 1, 1])], Comparison(ones, 2 * ones, 3 * ones, ones)
    )
    assert [(row["keys"], row["rows"], row["loss_sum"]) for row in found] == [
        ([1, 0], 2, 2.0), ([2, 0], 1, 4.0), ([2, 1], 1, 6.0), ([4, 1], 2, 18.0),
    ]  # fmt: skip
