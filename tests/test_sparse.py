"""Layers that attend to compressed keys and layers that reuse a selection: against `naive.py`, and what must hold."""

from __future__ import annotations

import dataclasses
import math
import random

import naive
import numpy as np
import pytest
import torch
from fake_model import FakeModel, RecordingTally, documents, run, tiles_of
from sparse_model import MIXED, TOKENS, SparseModel
from test_passes import SETS, columns, fresh, nearly_tied

from sparsity_lab import measurement
from sparsity_lab.cells import Candidate, Cell, Selection, expand, grid
from sparsity_lab.checks import CheckError
from sparsity_lab.dense import attention_probabilities, reconstruction_error, row_tiles
from sparsity_lab.measurement import Plan, measure
from sparsity_lab.metrics import METRICS
from sparsity_lab.native import Native, native_cells
from sparsity_lab.passes import DocumentPass
from sparsity_lab.results import merge_results
from sparsity_lab.scorers import BASELINES
from sparsity_lab.topology import Topology

LENGTH = 27
ROWS = torch.tensor([0, 1, 2, 5, 8, 9, 13, 18, 22, 25, 26])
MODELS = {
    "mixed ratios": SparseModel(),
    "softcap": SparseModel(softcap=1.5, seed=1),
    "two key heads, no sink": SparseModel(num_kv_heads=2, sink=False, seed=2),
    "later layers see dense outputs": SparseModel(dense=True, seed=3),
    "long groups": SparseModel(topology=Topology((3, 3, 3, 1, 1), (0, 3), (0, 2, 3, 4), 3), raw_window=1, seed=4),
}


def tiles_by_layer(model, length=LENGTH, rows=ROWS, tile=4):
    return tiles_of(model, documents(1, length)[0], rows, tile)


def scorers_of(model):
    return {name: make() for name, make in BASELINES.items()} | ({"native": Native(model)} if model.native else {})


def random_sparse_cells(model, count: int, seed: int) -> list[Cell]:
    """Cells of every kind that the model takes; on a dense model of any ratio."""
    draw, native, cells = random.Random(seed), model.native, {}
    compressed = native is not None and native.compressed
    own = native.topology.compress_ratios if compressed else None
    while len(cells) < count:
        ratio = draw.choice(sorted(set(own) - {0})) if own else draw.choice([1, 2, 3])
        layers = [i for i in range(model.num_layers) if own is None or own[i] == ratio]
        sources = draw.choice([None, sorted(draw.sample(layers, draw.randint(1, len(layers))))])
        places = (sources or layers)[:-1]
        pool = Candidate(draw.choice(places), draw.choice([2, 3, 5]), draw.choice([2, 3])) if places else None
        name = draw.choice([*BASELINES, *(["native"] if own else [])])
        if name == "native":  # with the model's own sources and pool
            sources, pool = None, Candidate(3, 3, 2) if ratio == 1 else None
        try:
            selection = Selection(
                ratio, draw.choice([1, 2, 3, 4, 9, 40]), native.window if compressed else draw.choice([0, 3, 50]),
                "layer" if name == "native" else draw.choice(["layer", "kv_head"]), draw.random() < 0.3,
                draw.choice([0, 0, 1]), draw.choice([None, pool]), sources,
            )  # fmt: skip
        except ValueError:
            continue
        cells[Cell(name, selection)] = None
    return list(cells)


def reference(model, cell: Cell, tiles, layer: int) -> list[dict] | None:
    """`naive.measure` of a cell on a layer (its tile of all rows), None where the cell does not apply."""
    s, scorer, acts = cell.selection, scorers_of(model)[cell.scorer], tiles[layer].acts
    sources = s.index_source_layers if cell.scorer != "native" else model.topology.index_source_layers
    if model.native is not None and model.native.compressed:
        ratios = model.topology.compress_ratios
        if ratios[layer] != s.compress_ratio:
            return None
        sources = None if sources is None else [i for i in sources if ratios[i] == s.compress_ratio]
    source = naive.index_source(layer, sources)
    if source is None:
        return None

    def scores(i: int) -> np.ndarray:
        found = scorer.scores(tiles[i], s.compress_ratio, s.share)
        return found.expand(tiles[i].groups(s.share), -1, -1).numpy()

    options = {}
    if s.candidate is not None and source > s.candidate.source_layer:
        options["pool_scores"] = scores(s.candidate.source_layer)
        options |= {"topk_blocks": s.candidate.topk_blocks, "block_size": s.candidate.block_size}
    if acts.compressed is not None:
        options["compressed"] = acts.compressed.k[0].numpy(), acts.compressed.v[0].numpy()
    return naive.measure(
        acts.q[0].numpy(), acts.k[0].numpy(), acts.v[0].numpy(), tiles[layer].rows.tolist(), scale=acts.scale,
        softcap=acts.softcap, sink=acts.sink, model_window=acts.window, ratio=s.compress_ratio, topk=s.topk,
        window=s.window, share=s.share, exclude_window=s.exclude_window, sinks=s.sinks, index_scores=scores(source),
        **options,
    )  # fmt: skip


def assert_equals_reference(model, cells, *, seldom: int) -> None:
    tiles = tiles_by_layer(model, tile=LENGTH)
    tally = run(cells, tiles, scorers=scorers_of(model), native=model.native, detail_rows=ROWS)
    left_out = 0
    for i, cell in enumerate(cells):
        for layer in range(model.num_layers):
            wanted = reference(model, cell, tiles, layer)
            if wanted is None:
                assert (i, layer) not in tally.parts
                assert not tally.rows[i, layer].any()
                continue
            found = tally.rows_of(i, layer)
            for place, row in enumerate(wanted):
                tied = row["visible"] > 0 and nearly_tied(tiles[layer], cell, row["row"], row["group"])
                left_out += tied
                for name in METRICS if row["visible"] else ():
                    value, where = found[name].reshape(-1)[place], f"{name}: {cell}, layer {layer}, {row}"
                    if row[name] is None:
                        assert math.isnan(value), where
                    elif not (tied and name in SETS):
                        assert value == pytest.approx(row[name], abs=5e-6), where
    assert left_out <= seldom


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_compressed_layers_equal_the_reference(model):
    assert_equals_reference(model, random_sparse_cells(model, 24, seed=model.seed), seldom=3)


@pytest.mark.parametrize("model", [FakeModel(sink=True), FakeModel(num_layers=6, num_kv_heads=4, seed=1)])
def test_reuse_on_dense_models_equals_the_reference(model):
    cells = [c for c in random_sparse_cells(model, 60, seed=model.seed) if c.selection.index_source_layers]
    assert_equals_reference(model, cells[:24], seldom=3)


def test_reuse_of_tokens_in_a_sparse_model_of_tokens():
    model = SparseModel(topology=TOKENS, compressed=False, seed=5)
    assert_equals_reference(model, random_sparse_cells(model, 16, seed=5), seldom=3)


# --- dense probabilities and the model's own output -------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_probabilities_are_one_softmax(model):
    tokens = documents(1, LENGTH)[0].tokens.unsqueeze(0)
    for layer in [i for i, ratio in enumerate(model.topology.compress_ratios) if ratio]:
        acts = model.activations(tokens, layer)
        raw = naive.attention_logits(acts.q[0].numpy(), acts.k[0].numpy(), acts.scale, acts.softcap, acts.window)
        own = naive.compressed_logits(
            acts.q[0].numpy(), acts.compressed.k[0].numpy(), acts.scale, acts.softcap, acts.compressed.ratio
        )
        wanted = naive.probabilities(np.concatenate([raw, own], 2), acts.sink)
        found = attention_probabilities(acts, torch.arange(LENGTH)).numpy()
        np.testing.assert_allclose(found, wanted, atol=1e-6, rtol=0)
        assert np.array_equal(found > 0, wanted > 0)


OWN = [*MODELS.values(), SparseModel(topology=TOKENS, compressed=False)]


@pytest.mark.parametrize("model", OWN, ids=[*MODELS, "tokens"])
def test_own_output_is_rebuilt_from_what_was_attended_to(model):
    for tile in tiles_by_layer(model, tile=LENGTH):
        assert reconstruction_error(tile) < 1e-5
    if not model.dense:
        wrong = dataclasses.replace(model, forget=1)
        assert all(reconstruction_error(t) > 1e-3 for t in tiles_by_layer(wrong) if t.acts.compressed is not None)


def test_selected_tokens_far_below_the_best_still_rebuild_the_output():
    """Their dense probabilities underflow, so a renormalised dense softmax would be 0 / 0."""
    model = SparseModel(topology=TOKENS, compressed=False, sharpness=400.0, sink=False)
    tiles = tiles_by_layer(model, tile=LENGTH)
    assert max(reconstruction_error(tile) for tile in tiles) < 1e-4
    chosen = tiles[0].acts.selected[0, ROWS].long()
    p = tiles[0].probabilities.masked_fill(tiles[0].probabilities.isnan(), 0)
    kept = p.gather(-1, chosen.clamp(min=0).expand(len(p), -1, -1)).sum(-1)
    assert (kept == 0).any()


def test_an_output_that_forgets_part_of_its_selection_is_refused():
    cells = grid("oracle", topk=4, window=5, compress_ratio=2)
    with pytest.raises(CheckError, match="layer 1: attention rebuilt from its queries and keys differs"):
        measure(SparseModel(forget=1), documents(1, LENGTH), cells)


def test_latent_attention_has_values_of_another_width():
    """MLA: as many key heads as query heads, v narrower than k."""
    acts = SparseModel(num_kv_heads=4, sink=False, dense=True).activations(documents(1, LENGTH)[0].tokens[None], 3)
    narrow = dataclasses.replace(acts.compressed, v=acts.compressed.v[..., :6])
    acts = dataclasses.replace(acts, v=acts.v[..., :6], compressed=narrow, output=acts.output[..., :6])
    tile = next(row_tiles(acts, ROWS, LENGTH, documents(1, LENGTH)[0].id, 0))
    assert reconstruction_error(tile) < 1e-5
    tally = RecordingTally(1, [3], LENGTH, torch.device("cpu"))
    native = SparseModel().native
    cells = [Cell("recency", Selection(1, 40, 5, "kv_head"))]
    DocumentPass(cells, scorers_of(FakeModel()), tally, num_layers=6, native=native, detail_rows=ROWS).tile(tile)
    found = tally.rows_of(0, 3)
    assert found["output_error"].shape == (4, len(ROWS))
    assert (found["output_error"] < 1e-5).all()


# --- invariants -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("scorer", ["oracle", "random", "native"])
def test_everything_selected_is_the_dense_output_at_any_ratio(model, scorer):
    for ratio in sorted(set(model.topology.compress_ratios) - {0}):
        cell = Cell(scorer, Selection(ratio, LENGTH, model.raw_window))
        tally = run(
            [cell], tiles_by_layer(model), scorers=scorers_of(model), native=model.native, detail_rows=torch.arange(99)
        )
        for layer in [i for i, own in enumerate(model.topology.compress_ratios) if own == ratio]:
            found = tally.rows_of(0, layer)
            seen = ROWS.numpy() >= ratio - 1
            assert (found["output_error"][:, seen] < 1e-5).all()
            assert (found["recall"][:, seen] == 1).all()
            assert (found["worst_head_coverage"][:, seen] == 1).all()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_oracle_recall_is_1_and_nothing_beats_the_oracle(model):
    for ratio in sorted(set(model.topology.compress_ratios) - {0}):
        names = list(scorers_of(model))
        cells = [Cell(name, Selection(ratio, 3, model.raw_window)) for name in names]
        tally = run(cells, tiles_by_layer(model), scorers=scorers_of(model), native=model.native)
        seen = ROWS.numpy() >= ratio - 1
        for layer in [i for i, own in enumerate(model.topology.compress_ratios) if own == ratio]:
            best = tally.rows_of(names.index("oracle"), layer)
            assert (best["recall"][:, seen] == 1).all()
            for i in range(len(names)):
                found = tally.rows_of(i, layer)
                assert (found["coverage"][:, seen] <= best["coverage"][:, seen] + 1e-6).all()
                assert (found["total_coverage"][:, seen] <= 1 + 1e-6).all()


@pytest.mark.parametrize("model", [FakeModel(), MODELS["mixed ratios"]], ids=["dense", "compressed"])
def test_every_layer_a_source_is_no_reuse(model):
    tiles = tiles_by_layer(model)
    cells = [c for c in random_sparse_cells(model, 60, seed=7) if c.scorer != "native"]
    own = model.topology.compress_ratios if model.native else None
    for cell in cells:
        free = dataclasses.replace(cell.selection, index_source_layers=None)
        layers = [i for i in range(model.num_layers) if own is None or own[i] == free.compress_ratio]
        every = dataclasses.replace(free, index_source_layers=layers)
        pair = [Cell(cell.scorer, free), Cell(cell.scorer, every)]
        tally = run(pair, fresh(tiles), native=model.native, detail_rows=ROWS[::3])
        assert columns(tally, 0).tobytes() == columns(tally, 1).tobytes(), cell


@pytest.mark.parametrize("model", [FakeModel(), MODELS["mixed ratios"]], ids=["dense", "compressed"])
def test_cells_together_equal_each_cell_alone(model):
    tiles, cells = tiles_by_layer(model), random_sparse_cells(model, 60, seed=8)
    options = {"scorers": scorers_of(model), "native": model.native, "detail_rows": ROWS[::3]}
    together = run(cells, tiles, **options)
    for i in range(0, len(cells), 5):
        alone = run([cells[i]], fresh(tiles), **options)
        assert columns(together, i).tobytes() == columns(alone).tobytes(), cells[i]


def test_nothing_is_kept_behind_the_last_layer_that_reuses_it():
    model, cell = FakeModel(num_layers=5), Cell("quest", Selection(2, 3, index_source_layers=(1, 3)))
    tally = RecordingTally(1, range(5), LENGTH, torch.device("cpu"))
    evaluator, kept = DocumentPass([cell], scorers_of(model), tally, num_layers=5), []
    for tile in tiles_by_layer(model, tile=LENGTH):
        evaluator.tile(tile)
        chosen = [c for selector, _ in evaluator.selectors for c in selector.chosen.values()]
        kept.append({tuple(o.shape) for orders in chosen for o in orders.values()})
    assert kept == [set(), {(1, len(ROWS), 3)}, set(), {(1, len(ROWS), 3)}, set()]


def test_merged_shards_equal_one_run():
    model = SparseModel()
    cells = [*random_sparse_cells(model, 20, seed=9)]
    options = {"rows": 9, "scorers": {"native": Native(model)}}

    def tallies(docs):
        return measure(model, docs, cells, **options)

    whole = tallies(documents(4, LENGTH))
    merged = merge_results([tallies(documents(indices=part, length=LENGTH)) for part in ([0, 2], [1], [3])])
    keys = ["cell_id", "document", "layer", "bucket"]
    a, b = (r.tallies.sort_values(keys, ignore_index=True) for r in (whole, merged))
    assert a.equals(b)


# --- the model's own indexer ------------------------------------------------------------------------------------------


def test_native_scorer_selects_what_the_model_selected(monkeypatch):
    """Single-level before the candidate source, reused behind sources, inside the pool where the model is."""
    model, seen = SparseModel(seed=6), {}
    cells, _ = expand("native", topk=model.topk, window=model.raw_window, zipped=native_cells(model.native))
    right = DocumentPass._read

    def read(self, tile, share, ratio, choices, true):
        for choice in choices:
            for cell in (self.cells[i] for i in choice.cells):
                seen[cell, tile.acts.layer] = choice.order[0, :, : model.topk], tile.acts.selected[0, tile.rows]
        return right(self, tile, share, ratio, choices, true)

    monkeypatch.setattr(DocumentPass, "_read", read)
    run(cells, tiles_by_layer(model, tile=LENGTH), scorers=scorers_of(model), native=model.native)
    assert {(c.selection.candidate is not None, layer) for c, layer in seen} == {
        (False, 1), (False, 2), *((pool, layer) for pool in (False, True) for layer in (3, 4, 5))
    }  # fmt: skip
    for (cell, layer), (order, selected) in seen.items():
        same = [set(a.tolist()) - {-1} == set(b.tolist()) - {-1} for a, b in zip(order, selected, strict=True)]
        # without the pool, layers behind the candidate source select otherwise than the model did
        assert all(same) == (layer <= 3 or cell.selection.candidate is not None)


def test_native_two_level_with_all_blocks_is_single_level():
    model = SparseModel()
    free = Selection(1, 4, model.raw_window)
    cells = [Cell("native", free), Cell("native", dataclasses.replace(free, candidate=Candidate(3, 99, 2)))]
    tally = run(cells, tiles_by_layer(model), scorers=scorers_of(model), native=model.native, detail_rows=ROWS)
    in_pool = ("pool_recall", "pool_coverage", "in_pool_recall")
    for layer in (3, 4, 5):
        a, b = tally.rows_of(0, layer), tally.rows_of(1, layer)
        for name in (name for name in METRICS if name not in in_pool):
            np.testing.assert_array_equal(a[name], b[name])


def test_tables_hold_the_layers_that_a_cell_applies_to():
    model, said = SparseModel(), []
    cells, _ = expand("native", topk=4, window=5, zipped=native_cells(model.native))
    frame = measure(model, documents(2, LENGTH), cells, rows=12, scorers={"native": Native(model)}, say=said.append)
    frame = frame.frame()
    for ratio, layers in ((1, {3, 4, 5}), (2, {1, 2})):
        found = frame[frame.compress_ratio == ratio].groupby("scorer").layer.agg(set).to_dict()
        assert found == dict.fromkeys(["native", "oracle", "random", "recency"], layers)
    assert said == ["layers [0] do not apply: their sliding window is shorter than 27 tokens or they select nothing"]
    assert set(frame[frame.scorer == "oracle"].recall) == {1}


# --- what is refused --------------------------------------------------------------------------------------------------


REFUSED = [
    (SparseModel(), {"compress_ratio": 4}, "compress_ratio=4: the model compresses its keys by [1, 2] only"),
    (SparseModel(), {"window": 6}, "window=6: the model attends to a raw window of 5 tokens"),
    (SparseModel(), {"window": 0}, "set selection.window=5"),
    (
        SparseModel(),
        {"candidate": Candidate(1, 9, 2)},
        "source_layer=1: must be one of the layers that select, [3, 4, 5]",
    ),
    (SparseModel(), {"candidate": Candidate(5, 9, 2)}, "source_layer=5: no measured layer after it would use its pool"),
    (SparseModel(), {"candidate": Candidate(0, 9, 2)}, "source_layer=0: not among the measured layers [1, 2, 3, 4, 5]"),
    (
        SparseModel(),
        {"index_source_layers": (1, 2)},
        "index_source_layers=[1, 2]: none of them has selection.compress_rat",
    ),
    (FakeModel(), {"index_source_layers": (0, 4)}, "index_source_layers=[0, 4]: the model has layers 0 to 3"),
    (
        FakeModel(),
        {"index_source_layers": (0, 2), "candidate": Candidate(1, 9, 2)},
        "source_layer=1: must be one of the layers that select, [0, 2]",
    ),
    (
        FakeModel(),
        {"index_source_layers": (0, 2), "candidate": Candidate(2, 9, 2)},
        "source_layer=2: no measured layer after it would use its pool",
    ),
    (
        FakeModel(sliding={2: 4}),
        {"index_source_layers": (0, 2)},
        "layer 3 reuses the selection of layer 2, which is not among the measured layers [0, 1, 3]",
    ),
]


@pytest.mark.parametrize(("model", "fields", "message"), REFUSED)
def test_refused(model, fields, message):
    selection = Selection(**{"compress_ratio": 1, "topk": 4, "window": 5} | fields)
    plan = Plan(model, documents(1, LENGTH).source, LENGTH, [Cell("quest", selection)], envelope=False)
    assert not plan.cells
    assert message in plan.failed[0]["reason"]


def test_no_measured_layer_is_refused():
    with pytest.raises(ValueError, match=r"measure.layers=\[0\]: all are layers that select nothing of 27 tokens"):
        measure(SparseModel(), documents(1, LENGTH), grid("oracle", window=5), layers=[0])
    late = grid("oracle", window=5, index_source_layers=[3])
    with pytest.raises(ValueError, match=r"applies to none of the measured layers \[0, 1\], with sources \[3\]"):
        measure(FakeModel(), documents(1, LENGTH), late, layers=[0, 1])
    some = Cell("oracle", Selection(1, 4, 5))
    with pytest.raises(ValueError, match=r"compress_ratio=1: applies to none of the measured layers \[1, 2\]"):
        measure(SparseModel(), documents(1, LENGTH), [some], layers=[1, 2])


def test_a_layer_that_does_not_keep_to_what_the_model_says_is_refused():
    """The plan goes by the model's description; the tensors must agree."""
    for change, message in (
        ({"topology": dataclasses.replace(MIXED, compress_ratios=(0, 1, 1, 1, 1, 1))}, "keys compressed by 2"),
        ({"window": 4}, "selection.window=4: layer 1 has a raw window of 5"),
    ):
        model = SparseModel()
        model.native = dataclasses.replace(model.native, **change)
        cells = [Cell("oracle", Selection(model.native.topology.compress_ratios[1], 4, model.native.window))]
        with pytest.raises(ValueError, match=message):
            measure(model, documents(1, LENGTH), cells)


def test_row_tiles_are_sized_by_all_entries():
    model = SparseModel()
    assert measurement.most_positions(model, LENGTH) == LENGTH
    assert measurement.most_positions(FakeModel(), LENGTH) == 0
