"""The adapter for lm-evaluation-harness, against a stand-in for its interface (it is an optional dependency)."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import tiny_models
import torch
from tiny import tiny_tokenizer

from sparsity_lab.models.hf import HFModel


class Interface:
    """What the adapter needs of lm_eval.api.model.TemplateLM."""

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = [request.args for request in requests]
        encoded = [(pair, *self._encode_pair(*pair)) for pair in pairs]
        return self._loglikelihood_tokens(encoded)

    def _encode_pair(self, context, continuation):
        before = self.tok_encode(context)
        return before, self.tok_encode(context + continuation)[len(before) :]


@pytest.fixture
def harness(monkeypatch):
    api = ModuleType("lm_eval.api.model")
    api.TemplateLM = Interface
    for name, module in {"lm_eval": ModuleType("lm_eval"), "lm_eval.api": ModuleType("api"), api.__name__: api}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "sparsity_lab.evaluation.harness", raising=False)
    found = importlib.import_module("sparsity_lab.evaluation.harness")
    yield found
    del sys.modules["sparsity_lab.evaluation.harness"]


@pytest.fixture(scope="module")
def model():
    return HFModel(tiny_models.build("llama"), tiny_tokenizer(), name="llama", fingerprint="f")


def request(*args):
    return SimpleNamespace(args=args)


def by_hand(model, context, continuation):
    tokens = torch.tensor([[*context, *continuation]])
    with torch.inference_mode():
        rows = model.model(tokens).logits[0].log_softmax(-1)
    return sum(float(rows[len(context) - 1 + i, token]) for i, token in enumerate(continuation))


def test_loglikelihood(harness, model):
    lm = harness.HarnessModel(model)
    context, whole = lm.tok_encode("The quick"), lm.tok_encode("The quick brown fox")
    ((value, greedy),) = lm.loglikelihood([request("The quick", " brown fox")])
    assert value == pytest.approx(by_hand(model, context, whole[len(context) :]), rel=1e-5)
    assert greedy is False
    likeliest = model.logits(torch.tensor([context]))[-1].argmax()
    assert lm._score(context, [int(likeliest)])[1] is True


def test_what_is_too_long_is_cut_on_the_left(harness, model):
    lm = harness.HarnessModel(model)
    lm.max_length = 20
    tokens = tiny_models.tokens(50)[0].tolist()
    assert lm._score(tokens[:45], tokens[45:])[0] == pytest.approx(by_hand(model, tokens[29:45], tokens[45:]), rel=1e-5)
    with pytest.raises(ValueError, match="21 tokens"):
        lm._score([1], tokens[:21])


def test_rolling_covers_every_token_once(harness, model):
    lm = harness.HarnessModel(model)
    text = "The quick brown fox jumps over the lazy dog."
    tokens = lm.tok_encode(text)
    assert lm.loglikelihood_rolling([request(text)]) == [
        pytest.approx(by_hand(model, [lm.prefix_token_id], tokens), rel=1e-5)
    ]
    lm.max_length = 5
    parts = [(tokens[i - 1] if i else lm.prefix_token_id, tokens[i : i + 5]) for i in range(0, len(tokens), 5)]
    expected = sum(by_hand(model, [before], window) for before, window in parts)
    assert lm.loglikelihood_rolling([request(text)])[0] == pytest.approx(expected, rel=1e-5)


def test_generation_stops(harness, model):
    lm = harness.HarnessModel(model)
    said = "alpha beta. gamma\nQ: delta"

    def generate(tokens, new, **options):
        assert options == {}
        return torch.cat([tokens, torch.tensor([lm.tok_encode(said)[:new]])], dim=1)

    lm.model = SimpleNamespace(generate=generate, name="dictated")
    ask = [{"until": ["\nQ:", "."], "max_gen_toks": 100, "do_sample": False, "temperature": 0.0}, {"until": "\n"}, {}]
    lm.max_length = 400
    assert lm.generate_until([request("x", options) for options in ask]) == ["alpha beta", "alpha beta. gamma", said]
    assert lm.generate_until([request("x", {"max_gen_toks": 2})])[0] == model.tokenizer.decode(lm.tok_encode(said)[:2])
    with pytest.raises(ValueError, match="max_gen_toks=400"):
        lm.generate_until([request("x", {"max_gen_toks": 400})])


def test_without_the_harness(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "sparsity_lab.evaluation.harness", raising=False)
    with pytest.raises(ValueError, match=r"pip install 'sparsity-lab\[harness\]'"):
        importlib.import_module("sparsity_lab.evaluation.harness")
