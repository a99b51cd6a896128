"""Tracing a needle: dictated selections, and what must be said of them."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from stub_sparse import StubSparse
from tiny import tiny_tokenizer

from sparsity_lab.cells import Selection
from sparsity_lab.dense import attention_probabilities
from sparsity_lab.evaluation import retrieval
from sparsity_lab.evaluation.needles import Task
from sparsity_lab.evaluation.retrieval import Answer, Trace
from sparsity_lab.models.hf import HFModel
from sparsity_lab.topology import Topology

LAYERS, NEEDLE = 3, [10, 11, 12, 13]
PROMPT, ANSWER = tiny_models.tokens(50)[0], torch.tensor([5, 6, 7])
TASK = Task("single", 64, 0.2, "d0", 0, PROMPT, ANSWER, ("x",), ((NEEDLE[0], NEEDLE[-1] + 1),))
ONES = {layer: torch.ones(6, 3, 4) for layer in range(LAYERS)}  # of every head, at every answer row and needle token


@pytest.fixture(scope="module")
def model():
    return HFModel(tiny_models.build("llama"), tiny_tokenizer(), name="llama", fingerprint="f")


def traced(model, picks, pool=lambda layer, row: None, *, ratio=1, window=8, sources=None, answer=(5, 6, 7), mass=ONES):
    """What the trace says by layer, and what the sparse run answered."""
    selection = Selection(compress_ratio=ratio, topk=4, window=window)
    trace = Trace(TASK, selection, Topology.attached(LAYERS, ratio, sources))
    sparse = StubSparse(model, range(LAYERS), answers=lambda prompt: list(answer), picks=picks, pool=pool)
    with sparse.watch(trace):
        given = retrieval.answer(sparse, TASK)
    return trace.layers(mass, given.rows(TASK))


def test_a_selection_that_holds_the_needle(model):
    for layer in traced(model, lambda layer, row: NEEDLE):
        assert (layer["in_selection"], layer["attended"], layer["in_pool"]) == (1, 1, 1)
        assert layer["dense_mass"] == 4
        assert layer["scorer_lost"] == layer["pool_lost"] == layer["reuse_lost"] == 0


def test_a_selection_that_leaves_the_needle_out(model):
    layers = traced(model, lambda layer, row: [0, 1, 2, 3])
    assert [layer["scorer_lost"] for layer in layers] == [4, 4, 4]
    assert retrieval.stage(0, layers) == "scorer"
    assert retrieval.stage(1, layers) == "found"


def test_a_pool_that_leaves_the_needle_out(model):
    def pool(layer, row):
        return list(range(14, 30)) if layer else None

    layers = traced(model, lambda layer, row: [14, 15] if layer else NEEDLE, pool)
    assert [layer["pool_lost"] for layer in layers] == [0, 4, 4]
    assert [layer["in_pool"] for layer in layers] == [1, 0, 0]
    assert retrieval.stage(0, layers) == "pool"


def test_a_layer_that_reuses_a_selection_without_the_needle(model):
    layers = traced(model, lambda layer, row: [0] if layer else NEEDLE, sources=(0,))
    assert [layer["reuse_lost"] for layer in layers] == [0, 4, 4]
    assert retrieval.stage(0, layers) == "reuse"


def test_a_miss_though_the_needle_was_attended_is_the_models(model):
    assert retrieval.stage(0, traced(model, lambda layer, row: NEEDLE)) == "model"
    assert retrieval.stage(0.5, traced(model, lambda layer, row: NEEDLE if layer else NEEDLE[:2])) == "model"  # 5 of 6
    assert retrieval.stage(0.5, traced(model, lambda layer, row: NEEDLE[:3])) == "scorer"


def test_the_window_counts_as_attended(model):
    near = traced(model, lambda layer, row: [0], window=60)
    assert [(layer["in_selection"], layer["attended"]) for layer in near] == [(0, 1)] * LAYERS
    # the first answer row is 49: a window of 38 begins at token 12 there, at 13 and 14 in the next rows
    partly = traced(model, lambda layer, row: [0], window=38)
    assert partly[0]["attended"] == pytest.approx((2 + 1 + 0) / 12)
    assert partly[0]["scorer_lost"] == pytest.approx(4 - 1)


def test_positions_stand_for_their_tokens(model):
    layers = traced(model, lambda layer, row: [5], ratio=2)  # tokens 10 and 11
    assert [layer["in_selection"] for layer in layers] == [0.5] * LAYERS


def test_rows_behind_the_first_wrong_token_do_not_count(model):
    def picks(layer, row):
        return NEEDLE if row < 51 else [0]

    assert traced(model, picks)[0]["scorer_lost"] == pytest.approx(4 / 3)
    assert traced(model, picks, answer=(5, 9, 7))[0]["scorer_lost"] == 0  # rows 49 and 50 count
    assert traced(model, picks, answer=(9,))[0]["scorer_lost"] == 0


@pytest.mark.parametrize(("tokens", "rows"), [([], 1), ([5], 2), ([9, 6], 1), ([5, 6, 7, 8], 3), ([5, 6, 9], 3)])
def test_rows_that_the_expected_answer_explains(tokens, rows):
    assert Answer("", torch.tensor(tokens), 0).rows(TASK) == rows


def test_lost_mass_is_weighted_by_where_dense_attends(model):
    mass = {layer: torch.zeros(6, 3, 4) for layer in range(LAYERS)}
    mass[1][:, :, 2] = 0.5
    layers = traced(model, lambda layer, row: [10, 11, 13], mass=mass)
    assert [layer["scorer_lost"] for layer in layers] == [0, 0.5, 0]
    assert layers[1]["dense_mass"] == 0.5


def test_dense_mass_is_the_models_attention_on_the_needle(model):
    found = retrieval.dense_mass(model, TASK, [0, 2])
    whole = {}

    def observe(acts):
        whole[acts.layer] = attention_probabilities(acts, torch.arange(52))

    model.observe(torch.cat([PROMPT, ANSWER[:2]]).unsqueeze(0), observe, [0, 2])
    for layer in (0, 2):
        torch.testing.assert_close(found[layer], whole[layer][:, [49, 50, 51]][:, :, NEEDLE])


def test_a_selection_a_key_head(model):
    trace = Trace(TASK, Selection(topk=4, window=8, share="kv_head"), Topology.attached(LAYERS, 1))
    picks = torch.tensor([NEEDLE, [0, 1, 2, 3]]).unsqueeze(1)  # the first of two groups holds the needle
    trace(0, torch.tensor([49]), picks, None)
    mass = {0: torch.cat([torch.full((3, 3, 4), 0.1), torch.full((3, 3, 4), 0.2)])}
    (layer,) = trace.layers(mass, 1)
    assert layer["in_selection"] == 0.5
    assert layer["dense_mass"] == pytest.approx((0.4 + 0.8) / 2)
    assert layer["scorer_lost"] == pytest.approx(0.8 / 2)


def test_the_share_of_the_mass_that_was_kept():
    def layer(mass, pool=0.0, scorer=0.0, reuse=0.0):
        return {"dense_mass": mass, "pool_lost": pool, "scorer_lost": scorer, "reuse_lost": reuse}

    assert retrieval.kept_mass([layer(2.0, pool=0.5), layer(2.0, scorer=0.25, reuse=0.25)]) == 0.75
    assert retrieval.kept_mass([layer(0.1, pool=0.1 + 1e-9)]) == 0  # rounded sums
    assert retrieval.kept_mass([layer(0.0)]) is None
