"""A dense model run sparse: against masks given to transformers itself, decoding against prefill, what is refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import tiny_models
import torch
from test_hf import traces
from transformers import DynamicCache

from sparsity_lab.cells import Candidate, Cell, Selection, grid
from sparsity_lab.checks import CheckError
from sparsity_lab.dense import row_tiles
from sparsity_lab.documents import Document, Documents
from sparsity_lab.lightning import IndexerConfig, Lightning
from sparsity_lab.measurement import Plan, check_dense, measure
from sparsity_lab.models import sparse_text
from sparsity_lab.models.hf import HFModel
from sparsity_lab.models.sparse import SparseModel
from sparsity_lab.scorers import MeanKey, Oracle, Quest, Random, Recency
from sparsity_lab.selecting import Selector

LENGTH = 41
LAYERS = 4
FAMILIES = ("llama", "gemma2", "gpt_oss")  # plain GQA; soft-cap and sliding layers; sinks and sliding layers
SMALL = IndexerConfig(index_n_heads=2, index_head_dim=8, rope_head_dim=4, head_dim=8)


@cache
def dense(family: str) -> HFModel:
    changes = {} if family in tiny_models.NATIVE_FAMILIES else {"num_hidden_layers": LAYERS}
    if family in tiny_models.EAGER_ONLY:
        changes["attn_implementation"] = "eager"
    model = tiny_models.build(family, **changes)
    return HFModel(model, name=family, fingerprint=family)


def scorer_of(name: str, model: HFModel) -> Any:
    if name == "lightning":
        return Lightning(model, SMALL)
    return {"quest": Quest, "mean_key": MeanKey, "recency": Recency, "random": Random, "oracle": Oracle}[name]()


def sparse(family: str, scorer: str = "quest", layers: Any = None, **fields: Any) -> SparseModel:
    model = dense(family)
    selection = Selection(**{"topk": 3, "window": 4, **fields})
    return SparseModel(model, selection, scorer_of(scorer, model), layers)


def tokens(length: int = LENGTH) -> torch.Tensor:
    return tiny_models.tokens(length, seed=3)


def assert_same_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to float32's rounding, in epsilons of the largest logit: these models' own logits are up to 20 off (against
    float64, by the CPU's instructions), so two ways to compute them up to 40; a forgotten token makes over 100,000."""
    atol = 40 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def in_chunks(model: SparseModel, sizes: list[int]) -> torch.Tensor:
    """Logits of a text read in calls of these many tokens, with the model's KV cache: [t, vocabulary]."""
    text, kept, out = tokens(sum(sizes)), DynamicCache(config=model.model.model.config), []
    with model.applied():
        for part in text.split(sizes, dim=1):
            out.append(model.model.model(input_ids=part, past_key_values=kept, use_cache=True).logits[0].float())
    return torch.cat(out)


def chosen(model: SparseModel, run: Any) -> tuple[dict[int, dict[int, Any]], Any]:
    """Layer -> row -> (picks as sets a group, pool [g, n] or None) of whatever `run` makes the model do; its result."""
    found: dict[int, dict[int, Any]] = defaultdict(dict)

    def watch(layer: int, rows: torch.Tensor, picks: torch.Tensor, pool: torch.Tensor | None) -> None:
        for i, row in enumerate(rows.tolist()):
            sets = [set(group.tolist()) - {-1} for group in picks[:, i]]
            found[layer][row] = sets, None if pool is None else pool[:, i]

    with model.watch(watch):
        return found, run()


# --- against other ways to say the same -------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "sinks", "window"), [(1, 0, 4), (1, 1, 0), (4, 0, 3), (4, 1, 9), (3, 2, 1)])
def test_newest_positions_are_a_mask_that_transformers_takes(ratio, sinks, window):
    """Which positions `recency` takes is known beforehand, so the whole model can be compared."""
    visible = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for row in range(LENGTH):
        groups = (row + 1) // ratio
        kept = [*range(min(sinks, groups)), *reversed(range(min(sinks, groups), groups))][:5]
        for u in range(row + 1):
            visible[row, u] = u > row - window or u >= groups * ratio or u // ratio in kept
    model = sparse("llama", "recency", compress_ratio=ratio, sinks=sinks, window=window, topk=5)
    with torch.inference_mode():
        expected = dense("llama").model(input_ids=tokens(), attention_mask=visible[None, None]).logits[0]
    assert not torch.allclose(expected, dense("llama").logits(tokens()), atol=1e-3)
    assert_same_logits(model.logits(tokens()), expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scorer", ["lightning", "quest", "oracle"])
def test_every_layer_takes_what_its_scores_say(family, scorer):
    """Selections and outputs of a run against those made afresh from the run's own activations."""
    fields = {"compress_ratio": 2, "share": "layer" if scorer == "lightning" else "kv_head"}
    model, found = sparse(family, scorer, **fields), {}

    def observe(acts: Any) -> None:
        if acts.layer in model.layers:
            (tile,) = row_tiles(acts, torch.arange(LENGTH), LENGTH, "0", 0)
            check_dense(tile, torch.float32)
            again = Selector([model.cell], model.scorer, [acts.layer], LAYERS).select(tile)[None]
            found[acts.layer] = {row: [set(g) - {-1} for g in again[:, row].tolist()] for row in range(LENGTH)}
            attended = acts.attended(torch.arange(LENGTH))
            for group, row in itertools.product(range(len(attended)), (5, 20, LENGTH - 1)):
                picks = {u for j in found[acts.layer][row][group] for u in (2 * j, 2 * j + 1)}
                raw = {u for u in range(row + 1) if u > row - 4 or u >= (row + 1) // 2 * 2}
                assert set(attended[group, row].nonzero().flatten().tolist()) == picks | raw

    seen, _ = chosen(model, lambda: model.observe(tokens(), observe, range(LAYERS)))
    assert set(found) == set(model.layers) == {i for i, w in dense(family).windows().items() if w is None}
    assert {layer: {row: sets for row, (sets, _) in rows.items()} for layer, rows in seen.items()} == found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "fields",
    [{"topk": 99}, {"topk": 1, "window": 99}, {"compress_ratio": 4, "topk": 12, "share": "kv_head"},
     {"compress_ratio": 99}],
    ids=str,
)  # fmt: skip
def test_everything_attended_is_dense(family, fields):
    model = sparse(family, **fields)
    assert_same_logits(model.logits(tokens()), dense(family).logits(tokens()))


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_text_is_dense_when_k_covers_it(family):
    covers = sparse(family, "lightning", compress_ratio=3, topk=30)
    expected = dense(family).generate(tokens(), 20)
    assert expected.shape[1] > LENGTH + 3
    assert torch.equal(covers.generate(tokens(), 20), expected)
    few = sparse(family, "lightning", compress_ratio=3, topk=1, window=1).generate(tokens(), 20)
    assert not torch.equal(few, expected)


# --- decoding is prefill ----------------------------------------------------------------------------------------------

POOL = Candidate(1, 3, 2)
CASES = [
    ("lightning", {"compress_ratio": 3}),
    ("lightning", {"compress_ratio": 1, "index_source_layers": (0, 1, 3), "candidate": POOL}),
    ("quest", {"compress_ratio": 2, "share": "kv_head", "candidate": POOL, "sinks": 1}),
    ("mean_key", {"compress_ratio": 4, "share": "kv_head", "exclude_window": True}),
    ("random", {"compress_ratio": 2, "candidate": POOL}),
    ("oracle", {"compress_ratio": 3, "share": "kv_head"}),
    ("recency", {"compress_ratio": 5, "index_source_layers": (1,)}),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("scorer", "fields"), CASES, ids=str)
def test_token_by_token_is_prefill(family, scorer, fields):
    if family != "llama":  # layers 1 and 3 have full attention
        fields = {k: (1, 3) if k == "index_source_layers" else v for k, v in fields.items()}
    model = sparse(family, scorer, **fields)
    length = 24
    whole, expected = chosen(model, lambda: model.logits(tokens(length)))
    pieces, logits = chosen(model, lambda: in_chunks(model, [1] * length))
    for layer, row in itertools.product(model.layers, range(length)):
        (a, pool), (b, grown) = whole[layer][row], pieces[layer][row]
        assert a == b, (layer, row)
        assert (pool is None) == (grown is None)
        if pool is not None:
            assert torch.equal(pool[:, : grown.shape[-1]], grown)
            assert all(pool[g, j] for g, picks in enumerate(a) for j in picks)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("scorer", "fields"), CASES[:3], ids=str)
def test_chunks_at_any_split_are_prefill(scorer, fields):
    model, length = sparse("llama", scorer, **fields), 17
    expected = model.logits(tokens(length))
    for split in range(1, length):
        torch.testing.assert_close(in_chunks(model, [split, length - split]), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(in_chunks(model, [5, 1, 1, 7, 3]), expected, atol=1e-4, rtol=0)


def test_generate_is_the_best_token_of_each_prefix():
    """Decoding with the cache against a whole forward over each prefix."""
    model = sparse("llama", "lightning", compress_ratio=3, candidate=POOL)
    out = model.generate(tokens(), 12)
    for end in range(LENGTH, out.shape[1]):
        assert int(model.logits(out[:, :end])[-1].argmax()) == int(out[0, end])


def test_a_far_needle_is_found_by_later_chunks():
    """Positions of the first chunk are selected from the second one and in decoding, in every layer."""
    model = sparse("llama", "lightning", topk=3, window=1)
    picks, _ = chosen(model, lambda: in_chunks(model, [20, 20, 1]))
    for layer in model.layers:
        for rows in (range(20, 40), [40]):
            assert any(j < 20 for row in rows for j in picks[layer][row][0][0])


# --- who selects ------------------------------------------------------------------------------------------------------


def test_reuse_layers_take_what_their_source_took():
    model = sparse("llama", index_source_layers=(1, 3), topk=4)
    assert (model.layers, model.selecting) == ([1, 2, 3], [1, 3])
    seen, _ = chosen(model, lambda: model.logits(tokens()))
    assert seen[2] == seen[1]
    assert seen[3] != seen[1]


def test_layers_that_only_select_for_others_stay_dense():
    """The source's attention is the model's own, to the bit, while a later layer uses what it selected."""
    model = sparse("llama", layers=[2], index_source_layers=(1,), topk=4)
    outputs: dict[str, dict[int, torch.Tensor]] = {"dense": {}, "sparse": {}}
    for name, run in (("dense", dense("llama")), ("sparse", model)):
        run.observe(tokens(), lambda acts, name=name: outputs[name].update({acts.layer: acts.output}), range(LAYERS))
    same = [torch.equal(outputs["dense"][i], outputs["sparse"][i]) for i in range(LAYERS)]
    assert same == [True, True, False, False]
    free = sparse("llama", layers=[1], index_source_layers=(1,), topk=4)
    own, reused = (chosen(run, lambda run=run: run.logits(tokens()))[0] for run in (free, model))
    assert own[1] == reused[2]


def test_a_candidate_source_outside_the_applied_layers_still_gives_the_pool():
    model = sparse("llama", layers=[3], candidate=POOL, compress_ratio=1)
    assert model.selecting == [1, 3]
    rows, _ = chosen(model, lambda: model.logits(tokens()))
    assert set(rows) == {3}
    pool = rows[3][LENGTH - 1][1]
    assert int(pool.sum()) <= POOL.topk_blocks * POOL.block_size


@pytest.mark.parametrize("size", [1, 7])
def test_tiles_do_not_matter(monkeypatch, size):
    model = sparse("llama", candidate=POOL, index_source_layers=(0, 1, 2))
    expected = model.logits(tokens())
    monkeypatch.setattr(sparse_text, "default_tile", lambda heads, length: size)
    assert_same_logits(model.logits(tokens()), expected)


def test_memory_is_that_of_a_tile(monkeypatch):
    from test_dense import peak_bytes

    length, heads = 2048, 4
    q, k = torch.randn(1, heads, length, 8), torch.randn(1, 2, length, 8)
    acts = sparse_text.LayerActivations(0, q, k, k, q[:, 0], q, 0.3)
    monkeypatch.setattr(sparse_text, "default_tile", lambda heads, length: 32)
    text = sparse_text.Text(Cell("quest", Selection(4, 8, 16)), Quest(), [0], [0], 1)
    with torch.inference_mode():
        peak = peak_bytes(lambda: text.around(acts, lambda: (None, None)))
    assert 0 < peak < heads * length * length * 4 / 8


# --- measured free-running --------------------------------------------------------------------------------------------


def documents() -> Documents:
    return Documents((Document(0, tokens()[0], "random"),), {"name": "random", "length": LENGTH})


def test_measuring_a_sparse_model_checks_its_attention(monkeypatch):
    model = sparse("gpt_oss", "quest", share="kv_head", compress_ratio=2)
    found = measure(model, documents(), grid("quest", topk=3, window=4), detail_rows=3)
    assert found.tallies["coverage_n"].sum() > 0
    right = sparse_text.attended_tokens
    monkeypatch.setattr(sparse_text, "attended_tokens", lambda o, r, ratio, window, t: right(o, r, ratio, 0, t))
    with pytest.raises(CheckError, match="differs from the model's own output"):
        measure(model, documents(), grid("quest", topk=3, window=4))


def test_later_layers_see_what_earlier_ones_made():
    ids = grid("recency", topk=3, window=4)
    tables = [
        measure(model, documents(), ids, envelope=False).frame(resamples=1).set_index("layer")["coverage"]
        for model in (dense("llama"), sparse("llama", topk=1, window=1))
    ]
    assert tables[0][0] == tables[1][0]
    assert all(tables[0][layer] != tables[1][layer] for layer in (1, 2, 3))


def test_results_are_told_apart_by_all_that_is_applied():
    model, cells = dense("llama"), grid("recency", topk=3, window=4)

    def cell(run: Any) -> str:
        return next(iter(Plan(run, documents().source, LENGTH, cells, envelope=False).cells))

    selection = Selection(topk=3, window=4)
    changes = [{"topk": 4}, {"window": 5}, {"compress_ratio": 2}, {"sinks": 1}, {"candidate": POOL},
               {"index_source_layers": (0, 2)}, {"share": "kv_head"}, {"exclude_window": True}]  # fmt: skip
    runs = [SparseModel(model, dataclasses.replace(selection, **change), Quest()) for change in [{}, *changes]]
    runs += [SparseModel(model, selection, scorer) for scorer in (MeanKey(), Quest("logit"), Lightning(model, SMALL))]
    runs += [
        SparseModel(model, selection, Lightning(model, SMALL, seed=1)),
        SparseModel(model, selection, Quest(), [1]),
    ]
    names = [cell(run) for run in [model, *runs]]
    assert len(set(names)) == len(names)
    assert cell(SparseModel(model, selection, Quest())) == names[1]


def test_the_model_is_left_as_it_was():
    model = sparse("gemma2", "lightning")
    before, expected = traces(model.model.model), dense("gemma2").logits(tokens())
    model.generate(tokens(), 3)
    with pytest.raises(RuntimeError, match="stop"), model.applied():
        raise RuntimeError("stop")
    assert traces(model.model.model) == before
    assert torch.equal(dense("gemma2").logits(tokens()), expected)


# --- refused ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_run_is_refused():
    model, text = sparse("llama"), tokens()
    with pytest.raises(ValueError, match=r"must be \[1, t\]"):
        model.generate(text.expand(2, -1), 2)
    with pytest.raises(ValueError, match="batch of 2"), model.applied():
        model.model.model(input_ids=text.expand(2, -1))
    mask = torch.ones_like(text)
    mask[:, :3] = 0
    with pytest.raises(ValueError, match="attention_mask: hides tokens"):
        model.generate(text, 2, attention_mask=mask)
    with pytest.raises(ValueError, match="hides tokens from the last query"), model.applied():
        model.model.model(input_ids=text, attention_mask=mask)
    with pytest.raises(ValueError, match=r"hides tokens|without a gap"):
        model.generate(text, 2, cache_implementation="static")
    with pytest.raises(ValueError, match="batch of 2"):
        model.generate(text, 2, num_beams=2)
    with pytest.raises(ValueError, match="max_new_tokens=9999: llama was made for at most 256"):
        model.generate(text, 9999)


def test_a_cache_from_elsewhere_is_refused():
    model, kept = sparse("llama"), DynamicCache(config=dense("llama").model.config)
    with torch.inference_mode():
        dense("llama").model(input_ids=tokens(), past_key_values=kept, use_cache=True)
    with pytest.raises(ValueError, match="the text has 0 tokens so far"), model.applied():
        model.model.model(input_ids=tokens(3), past_key_values=kept, use_cache=True)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("mistral", {}, "all layers of mistral have a sliding window"),
        ("deepseek_v32", {}, "model.attention=sparse: deepseek_v32 has sparse attention of its own"),
        ("gemma2", {"layers": [0, 1]}, r"layers=\[0\]: no full attention there; layers of gemma2 with it are \[1, 3\]"),
        ("gemma2", {"index_source_layers": (0, 2)}, "sliding-window layers cannot be a source"),
        ("llama", {"layers": [0], "index_source_layers": (2,)}, r"layers=\[0\]: none of them selects"),
        ("llama", {"index_source_layers": (9,)}, "the model has layers 0 to 3"),
        ("llama", {"candidate": Candidate(3, 9, 4)}, "no measured layer after it"),
    ],
)  # fmt: skip
def test_selections_that_do_not_fit_are_refused(family, options, message):
    with pytest.raises(ValueError, match=message):
        sparse(family, **options)
