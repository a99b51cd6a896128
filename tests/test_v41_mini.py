"""The trained V4.1 model that comes along: what must be true of it, whatever indexers it is shipped with."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from test_config import composed

import sparsity_lab as sl
from sparsity_lab import pretrain_card
from sparsity_lab.models.deepseek_v41.checkpoint import SHIPPED

LENGTH = 2048  # more than the pool holds: 128 blocks of 8
SELECTING = (2, 3, 4, 5, 6, 7, 8)


@pytest.fixture(scope="module")
def model():
    return sl.load_model("v41_mini", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def held():
    return {
        kind: torch.from_numpy(rows[0].astype(np.int64))
        for kind, rows in pretrain_card.read_held_out("shipped", 1).items()
    }


@pytest.fixture(scope="module")
def layers(model, held):
    """Layer -> (index source, its scores float32 [s, n] with the invisible at -inf, the model's own picks [s, k])."""
    found = {}

    def keep(acts):
        index = acts.index
        scores = torch.einsum("shd,nd->shn", index.q[0].float(), index.k[0].float()).relu_()
        scores = torch.einsum("shn,sh->sn", scores, index.w[0])
        position, end = torch.arange(scores.shape[1]), (torch.arange(scores.shape[0]) + 1) // index.ratio
        found[acts.layer] = index.layer, scores.masked_fill(position >= end[:, None], -torch.inf), acts.selected[0]

    model.observe(held["code"][None, :LENGTH], keep, SELECTING)
    return found


def test_the_folder_is_small_and_whole():
    names = {path.name for path in SHIPPED.iterdir()}
    assert {"README.md", "record.json", "training.csv", "tokenizer.json", "held_out.npz"} <= names
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 16_000_000


def test_record_and_card_are_of_these_weights(model):
    record = json.loads((SHIPPED / "record.json").read_text(encoding="utf-8"))
    assert record["parameters"] == sum(p.numel() for p in model.model.parameters())
    assert 6e6 < record["parameters"] < 8e6
    assert record["training"]["steps"] == record["training"]["of"]
    assert f"Weights: {model.fingerprint}." in (SHIPPED / "README.md").read_text(encoding="utf-8")


def test_it_has_every_part_of_a_v41(model):
    topology, config = model.native.topology, model.model.config
    assert set(topology.compress_ratios) == {0, 1, 2}
    assert len(topology.kv_source_layers) > 1
    assert len(topology.index_source_layers) < len(SELECTING)  # some reuse
    assert topology.candidate_source_layer in topology.index_source_layers
    assert all(block.attn.attn_sink.count_nonzero() == model.num_heads for block in model.model.model.layers)
    assert config.hc_mult > 1
    assert config.n_routed_experts > config.num_experts_per_tok
    assert model.max_length == 4096
    assert model.tokenizer.decode(model.tokenizer("def f(x):\n    return x").input_ids) == "def f(x):\n    return x"
    assert len(model.tokenizer) == config.vocab_size


@pytest.mark.parametrize("kind", ["code", "prose"])
def test_it_has_learned_and_sparse_attention_costs_less_than_a_percent(model, held, kind):
    sparse, dense = (
        pretrain_card.losses(model, held[kind][: LENGTH + 1], dense=dense)[0].mean() for dense in (False, True)
    )
    assert dense < 3.5  # nats a token; ln 6144 = 8.7
    assert sparse < 1.01 * dense
    assert sparse != dense


def test_it_repeats_what_it_has_seen(model):
    found = pretrain_card.induction(model, distance=256, sequences=1, seed=1, advance=lambda done, total: None)
    assert found["sparse"]["accuracy_second"] > 0.6 > 1000 * found["chance"]
    assert found["sparse"]["accuracy_first"] < 0.02


def test_selections_are_the_best_of_what_its_indexers_score(layers, model):
    """No position left out scores above one that is selected, within the pool where there is one."""
    source, k = model.native.topology.candidate_source_layer, model.native.topk
    for layer, (index_layer, scores, picks) in layers.items():
        chosen = torch.zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.bool)
        chosen.scatter_(1, picks.long().masked_fill(picks < 0, scores.shape[1]), True)
        chosen = chosen[:, :-1]
        allowed = scores.isfinite()
        assert not (chosen & ~allowed).any()
        if index_layer > source:
            allowed &= pool(layers[source][1], model.native)
        assert torch.equal(chosen.sum(1), allowed.sum(1).clamp(max=k)), layer
        worst = scores.masked_fill(~chosen, torch.inf).amin(1)
        best = scores.masked_fill(chosen | ~allowed, -torch.inf).amax(1)
        assert (best <= worst + 1e-4 * worst.abs()).all(), layer


def pool(scores, native):
    """bool [s, n]: positions in the best blocks by their best score, ties to the first, the newest block pinned."""
    blocks = scores.unflatten(1, (-1, native.block_size)).amax(2)
    newest = (blocks.isfinite().sum(1, keepdim=True) - 1).clamp(min=0)
    blocks = blocks.scatter(1, newest, torch.inf)
    order = blocks.argsort(dim=1, descending=True, stable=True)[:, : native.topk_blocks]
    kept = torch.zeros_like(blocks, dtype=torch.bool).scatter_(1, order, True)
    return kept.repeat_interleave(native.block_size, 1)


def test_later_indexers_search_in_the_pool_and_would_go_outside(layers, model):
    source, native = model.native.topology.candidate_source_layer, model.native
    inside = pool(layers[source][1], native)
    for layer in (layer for layer in native.topology.index_source_layers if layer > source):
        _, scores, picks = layers[layer]
        there = picks >= 0
        assert inside.gather(1, picks.long().clamp(min=0))[there].all()
        late = slice(LENGTH * 3 // 4, None)  # rows that see half as much again as the pool holds
        free = scores[late].topk(native.topk, dim=1).indices
        assert 0 < (~inside[late].gather(1, free)).float().mean() < 0.5


def test_data_it_never_saw_comes_as_documents(model):
    documents = sl.data.held_out(model.tokenizer, num_documents=3, length=2048)
    rows = np.concatenate(list(pretrain_card.read_held_out("shipped", 100).values())).astype(np.int64)
    halves = {row[at : at + 2048].tobytes() for row in rows for at in (0, 2048)}
    assert len({document.tokens.numpy().tobytes() for document in documents} & halves) == 3
    with pytest.raises(ValueError, match=r"data=held_out: .*vocabulary 6144; this model's is None"):
        sl.data.held_out(None, num_documents=1, length=64)
    assert composed("model=v41_mini", "data=held_out")["data"]["length"] == 2048


def test_documents_longer_than_its_context_are_refused(model):
    documents = sl.data.stdlib(model.tokenizer, num_documents=1, length=4097)
    with pytest.raises(ValueError, match=r"data.length=4097: v41_mini was made for at most 4096 positions"):
        sl.measure(model, documents, sl.grid(scorer="native", topk=[128]))


def test_its_results_tell_that_it_is_not_priced(model):
    from sparsity_lab.shape import ModelShape

    shape = ModelShape.of(model)
    assert shape is not None
    assert shape.native
    assert shape.attention_layers == SELECTING


def test_held_out_sequences_are_not_crossed(model):
    with pytest.raises(ValueError, match=r"data\.length=5000: data=held_out has sequences of 4,097 tokens"):
        sl.data.held_out(model.tokenizer, num_documents=1, length=5000)
