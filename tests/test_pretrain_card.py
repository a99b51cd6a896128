"""The figures of a model's card, and the card."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from test_pretrain_text import TEXTS
from v41_cases import random_tiny

from sparsity_lab import pretrain_card, pretrain_report
from sparsity_lab.dense import attention_probabilities
from sparsity_lab.models.deepseek_v41 import DeepseekV41
from sparsity_lab.pretrain_data import encode_files, train_tokenizer

VOCAB = 300


def silent(done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, VOCAB, 10_000_000)


@pytest.fixture(scope="module")
def model(tokenizer):
    model = random_tiny(vocab_size=VOCAB)
    return DeepseekV41(model, tokenizer, name="tiny", fingerprint="none")


@pytest.fixture(scope="module")
def held(tokenizer):
    stream = encode_files(tokenizer, TEXTS)
    return {"code": np.stack([stream[i * 96 : i * 96 + 97] for i in range(2)])}


class Echo:
    """Predicts, at each token, what followed the last time it was seen."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.config = type("Config", (), {"vocab_size": vocab})()
        self.lm_head = torch.nn.Linear(vocab, vocab, bias=False)
        torch.nn.init.eye_(self.lm_head.weight)

    def hidden(self, ids, dense=False):
        last, guesses = {}, []
        row = ids[0].tolist()
        for place, token in enumerate(row):
            guesses.append(last.get(token, 0))
            if place + 1 < len(row):
                last[token] = row[place + 1]
        return 20.0 * F.one_hot(torch.tensor([guesses]), self.vocab).float()


def test_losses_are_those_of_the_logits(model, held):
    tokens = torch.from_numpy(held["code"][0].astype(np.int64))
    for dense in (False, True):
        nll, right = pretrain_card.losses(model, tokens, dense=dense)
        with torch.no_grad():
            logits = F.linear(model.model.hidden(tokens[None, :-1], dense=dense)[0], model.model.lm_head.weight)
        want = torch.logsumexp(logits, -1) - logits[torch.arange(96), tokens[1:]]
        torch.testing.assert_close(nll, want, rtol=1e-4, atol=1e-4)
        assert right.tolist() == (logits.argmax(-1) == tokens[1:]).tolist()


def test_held_out_figures_add_up(model, held):
    found = pretrain_card.held_out(model, held, silent)
    code = found["code"]
    assert code["sequences"] == 2
    for mode in ("sparse", "dense"):
        nats = code[f"nats_per_token_{mode}"] * 2 * 96
        assert code[f"bits_per_byte_{mode}"] == pytest.approx(nats / math.log(2) / code["bytes"])
    ratio = code["nats_per_token_sparse"] / code["nats_per_token_dense"]
    assert found["sparse_over_dense"] == pytest.approx(ratio)


def test_a_model_that_copies_is_told_from_one_that_does_not(model, tokenizer, held):
    copies = DeepseekV41.__new__(DeepseekV41)
    copies.model, copies.tokenizer = Echo(VOCAB), tokenizer
    options = {"distance": 40, "seed": 0, "advance": silent}
    found = pretrain_card.induction(copies, sequences=3, **options)["dense"]
    assert found["accuracy_second"] > 0.8
    assert found["accuracy_first"] < 0.2
    assert found["nats_second"] < found["nats_first"]
    assert found["low"] <= found["accuracy_second"] <= found["high"]
    assert pretrain_card.induction(model, sequences=3, **options)["sparse"]["accuracy_second"] < 0.2
    found = pretrain_card.copying(copies, held["code"], count=4, **options)["dense"]
    assert found["copied"] > found["control"] + 0.2


class Far(Echo):
    """The same, but it forgets after 40 tokens unless attention is dense."""

    def hidden(self, ids, dense=False):
        row = ids[0].tolist()
        shown = [super(Far, self).hidden(ids[:, max(0, i - 39) : i + 1])[:, -1:] for i in range(len(row))]
        return super().hidden(ids) if dense else torch.cat(shown, 1)


def test_what_selection_forgets_shows_beside_dense(tokenizer, held):
    forgets = DeepseekV41.__new__(DeepseekV41)
    forgets.model, forgets.tokenizer = Far(VOCAB), tokenizer
    options = {"distance": 60, "seed": 0, "advance": silent}
    found = pretrain_card.induction(forgets, sequences=2, **options)
    assert found["dense"]["accuracy_second"] > found["sparse"]["accuracy_second"] + 0.5
    found = pretrain_card.copying(forgets, held["code"], count=6, **options)
    assert found["dense"]["copied"] > 1.5 * found["sparse"]["copied"]


def test_coverage_is_of_every_selecting_layer(model, held):
    found = pretrain_card.coverage(model, held["code"], rows=16, advance=silent)
    assert list(found["layers"]) == ["2", "3", "4", "5", "6", "7"]
    assert found["worst"] == min(found["layers"].values())
    assert 0 < found["worst"] <= found["mean"] <= 1


def test_what_sharing_costs_bounds_nothing_where_nobody_shares(model, held):
    """By a loop over rows: the best k of the served layers' summed masses, as a share of each layer's own best k."""
    found = pretrain_card.shared_bound(model, held["code"][:1], rows=None, advance=silent)
    native, tokens = model.native, torch.from_numpy(held["code"][0, :-1].astype(np.int64))
    topology, masses = native.topology, {}

    def keep(acts):
        p = attention_probabilities(acts, torch.arange(len(tokens))).mean(0)
        masses[acts.layer] = p[:, len(tokens) :]

    model.observe(tokens[None], keep, [2, 3, 4, 5, 6, 7])
    for layer, own in masses.items():
        ratio, source = topology.compress_ratios[layer], topology.index_source(layer)
        served = sum(mass for other, mass in masses.items() if topology.index_source(other) == source)
        shares = []
        for row in range(len(tokens)):
            n = (row + 1) // ratio
            if n > native.topk:
                chosen = served[row, :n].topk(native.topk).indices
                shares.append(float(own[row, chosen].sum() / own[row, :n].topk(native.topk).values.sum()))
        assert found["layers"][str(layer)] == pytest.approx(np.mean(shares), abs=1e-5)
        alone = sum(topology.index_source(other) == source for other in masses) == 1
        assert (found["layers"][str(layer)] > 1 - 1e-6) == alone


def test_the_card_says_what_was_found(tmp_path, model, held):
    figures = {"fingerprint": "0a1b", "held_out": pretrain_card.held_out(model, held, silent)}
    figures["coverage"] = pretrain_card.coverage(model, held["code"], rows=16, advance=silent)
    figures["shared_bound"] = pretrain_card.shared_bound(model, held["code"], rows=16, advance=silent)
    figures["induction_40"] = pretrain_card.induction(model, distance=40, sequences=2, seed=0, advance=silent)
    record = {
        "parameters": 1_200_000,
        "training": {"steps": 2000, "tokens": 65_000_000, "seconds": 480.0, "notes": []},
        "device": "a card",
        "config": {"data": {"shares": {"code": 0.9, "repeats": 0.1}}, "recipe": {"length": 96}},
        "held_out": {"loss_dense": 1.0},
        "corpus": {
            "held_out_sequences": {"code": 4, "prose": 3},
            "digest": "a",
            "tokens": {"code": 30_000_000},
            "settings": {"held_out_percent": 2},
            "packages": {"rich": {"version": "1", "licence": "MIT", "files": 3, "bytes": 5}},
        },
    }
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="no training that can be read"):
        pretrain_report.read_card("mini", str(tmp_path), figures)
    (tmp_path / "model" / "record.json").write_text(json.dumps(record))
    steps = np.arange(100, 2100, 100)
    curve = pd.DataFrame({"step": steps, "tokens": steps, "stage": "dense", "loss": 1.0, "bits_dense": 1.5})
    curve.to_csv(tmp_path / "training.csv", index=False)
    path, text = pretrain_report.read_card("mini", str(tmp_path), figures)
    assert path == tmp_path / "README.md"
    assert "1.2 M parameters" in text
    assert text.count("random tokens repeated after 40 tokens") == 2
    assert "2,000 steps, 65 M tokens, 8.0 minutes on a card" in text
    assert "| rich | 1 | MIT | 3 | 5 |" in text
    assert "| 2000 | 2000 | dense | 1 | 1.5 |" in text
    assert "nan" not in text
    assert text.count("| dense | 1 | 1.5 |") == pretrain_report.CURVE_POINTS
    assert f"({pretrain_report.CURVE})" in text
    with pytest.raises(ValueError, match=r"training\.csv lacks loss_dense"):
        pretrain_report.write_curve("mini", str(tmp_path))
    curve.assign(loss_dense=1.0).to_csv(tmp_path / "training.csv", index=False)
    image = pretrain_report.write_curve("mini", str(tmp_path))
    assert image == path.with_name(pretrain_report.CURVE)
    assert image.read_bytes().startswith(b"\x89PNG")
    later = {"train": "indexers", "length": 96}
    second = {**record, "config": {**record["config"], "recipe": later}, "start": record, "device": "another"}
    text = pretrain_report.card("mini", second, figures, curve)
    assert "8.0 minutes on a card; then the indexers alone, 2,000 steps, 65 M tokens, 8.0 minutes on another" in text
    assert "no pool)" not in text  # the record has no coverage
    assert "compare those within it alone" in text
    second["held_out"] = {"loss_dense": 1.0, "coverage_2": 0.5, "coverage_4": 1.0}
    text = pretrain_report.card("mini", second, figures, curve)
    assert "no pool, 7 held-out sequences): 2: 0.500, 4: 1.000 (mean 0.750)." in text


def test_unreadable_held_out_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"held_out=.*no\.npz: cannot be read"):
        pretrain_card.read_held_out(str(tmp_path / "no.npz"), 1)
