"""Evaluations of real sparse models: equal to dense where everything is selected, and needles lost on purpose."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from tiny import tiny_tokenizer
from tiny_evaluation import documents, run

from sparsity_lab.cells import Candidate, Cell, Selection
from sparsity_lab.evaluation.run import Options
from sparsity_lab.models.hf import HFModel
from sparsity_lab.models.sparse import SparseModel
from sparsity_lab.scorers import BASELINES

FULL = Options(rows=16, tasks=("single",), lengths=(600,), depths=(0.2,))


@pytest.fixture(scope="module")
def model():
    built = tiny_models.build("llama", max_position_embeddings=2048)
    return HFModel(built, tiny_tokenizer(), name="llama", fingerprint="f")


def evaluated(folder, model, cells, options=FULL):
    return run(folder, documents(1), model=model, cells=cells, options=options, make_sparse=SparseModel)


def test_selecting_everything_is_dense(tmp_path, model):
    cells = [Cell("quest", Selection(topk=1000)), Cell("quest", Selection(topk=1000, compress_ratio=4, window=0))]
    found = evaluated(tmp_path, model, cells)
    for row in found.frame().itertuples():
        assert row.loss_difference == pytest.approx(0, abs=1e-6)
        assert row.kl == pytest.approx(0, abs=1e-6)
        assert row.top1_agreement == 1
        assert row.output_error < 1e-5
        assert row.rows_selective == 0
    tasks = found.tables["retrieval"]
    assert list(tasks["text"]) == list(tasks["dense_text"])
    assert tasks["kept_mass"].tolist() == [1, 1]


def test_losses_are_those_of_the_sparse_models_logits(tmp_path, model):
    selection, document = Selection(topk=8, compress_ratio=2, window=4), documents(1)[0]
    found = evaluated(tmp_path, model, [Cell("mean_key", selection)], Options(rows=16)).per_document().iloc[0]
    sparse = SparseModel(model, selection, BASELINES["mean_key"](), [0, 1, 2])
    tokens = document.tokens.unsqueeze(0)
    q, p = (runs.logits(tokens).log_softmax(-1)[:-1] for runs in (sparse, model))
    assert found["loss"] == pytest.approx(-float(q.gather(1, document.tokens[1:, None]).mean()), rel=1e-5)
    assert found["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
    assert found["kl_selective"] > found["kl"] > 0


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        # recency takes the newest positions: the needle is far behind them
        ({}, ["scorer_lost"] * 3),
        ({"candidate": Candidate(0, 4, 8)}, ["scorer_lost", "pool_lost", "pool_lost"]),
        ({"index_source_layers": (0,)}, ["scorer_lost", "reuse_lost", "reuse_lost"]),
        ({"index_source_layers": (1,)}, ["scorer_lost", "reuse_lost"]),  # layer 0 stays dense
    ],
)
def test_where_a_needle_is_lost(tmp_path, model, options, stages):
    cell = Cell("recency", Selection(topk=16, window=4, **options))
    found = evaluated(tmp_path, model, [cell], Options(rows=16, perplexity=False, tasks=("single",), depths=(0.1,)))
    traces = found.tables["traces"].set_index("layer").sort_index()
    first = 3 - len(stages)
    assert list(traces.index) == list(range(first, 3))
    for layer, lost in zip(traces.index, stages, strict=True):
        assert traces.loc[layer, "attended"] == traces.loc[layer, "in_selection"] == 0
        assert traces.loc[layer, lost] == pytest.approx(traces.loc[layer, "dense_mass"])
        assert traces.loc[layer, "in_pool"] == (0 if lost == "pool_lost" else 1)
    assert found.tables["retrieval"]["kept_mass"].tolist() == [pytest.approx(0, abs=1e-9)]


def test_the_first_layers_can_stay_dense(tmp_path, model):
    selection = Selection(topk=4, window=4)
    sparse = SparseModel(model, selection, BASELINES["recency"](), [2])
    from sparsity_lab.evaluation import likelihood

    tokens, rows = documents(1)[0].tokens, torch.arange(600, 700)
    dense = likelihood.run(model, model, tokens, [0, 1, 2], rows)
    errors = likelihood.output_errors(dense, likelihood.run(sparse, model, tokens, [0, 1, 2], rows))
    assert errors[0] == errors[1] == 0
    assert errors[2] > 0.01
