"""From queries and keys to tallies: the whole pass against `naive.measure`, what must not matter, what must hold."""

from __future__ import annotations

import dataclasses
import math

import naive
import numpy as np
import pytest
import torch
from fake_model import FakeModel, documents, dyadic_tiles, random_cells, run, tiles_of
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsity_lab import metrics, selecting
from sparsity_lab.cells import Candidate, Cell, Selection, expand
from sparsity_lab.checks import CheckError
from sparsity_lab.dense import RowTile
from sparsity_lab.metrics import METRICS
from sparsity_lab.passes import bucket_of, num_buckets
from sparsity_lab.scorers import BASELINES, Oracle

LENGTH = 29
ROWS = torch.tensor([0, 1, 3, 7, 10, 16, 20, 21, 27, 28])
SETS = ("recall", "pool_recall", "in_pool_recall", "top1_hit", "relative_coverage", "oracle_coverage")
quick = settings(max_examples=12, deadline=None)


# --- against the reference --------------------------------------------------------------------------------------------


def library_scores(cell: Cell, tile: RowTile) -> np.ndarray:
    """[g, all positions of the document, n], zero for rows that are not in the tile."""
    s = cell.selection
    return BASELINES[cell.scorer]().scores(tile, s.compress_ratio, s.share).expand(tile.groups(s.share), -1, -1).numpy()


def naive_measure(cell: Cell, tiles: list[RowTile], layer: int) -> list[dict]:
    s, acts, pool = cell.selection, tiles[layer].acts, cell.selection.candidate
    options = {}
    if pool is not None and layer > pool.source_layer:
        options["pool_scores"] = library_scores(cell, tiles[pool.source_layer])
        options |= {"topk_blocks": pool.topk_blocks, "block_size": pool.block_size}
    return naive.measure(
        acts.q[0].numpy(), acts.k[0].numpy(), acts.v[0].numpy(), tiles[layer].rows.tolist(),
        scale=acts.scale, softcap=acts.softcap, sink=acts.sink, model_window=acts.window,
        ratio=s.compress_ratio, topk=s.topk, window=s.window, share=s.share, exclude_window=s.exclude_window,
        sinks=s.sinks, index_scores=library_scores(cell, tiles[layer]), **options,
    )  # fmt: skip


def nearly_tied(tile: RowTile, cell: Cell, row: int, group: int) -> bool:
    """Whether float32 may rightly put two positions in another order than float64, at k or at the top."""
    s = cell.selection
    mass = tile.mass(s.share, s.compress_ratio)[group, tile.rows.tolist().index(row)]
    ordered = mass[: (row + 1) // s.compress_ratio].sort(descending=True).values
    edges = [k for k in (1, s.topk) if k < len(ordered)]
    return any(float(ordered[k - 1] - ordered[k]) <= 2e-6 * float(ordered[k - 1]) for k in edges)


MODELS = {
    "plain": FakeModel(num_layers=3),
    "sink": FakeModel(num_layers=3, sink=True, seed=1),
    "softcap": FakeModel(num_layers=3, softcap=1.5, seed=2),
    "sink, softcap and sliding window": FakeModel(num_layers=3, sink=True, softcap=2.0, sliding={1: 5}, seed=3),
    "one KV head": FakeModel(num_layers=3, num_kv_heads=1, seed=4),
    "no GQA": FakeModel(num_layers=3, num_kv_heads=4, seed=5),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_whole_pass_equals_the_reference(model):
    tiles = tiles_of(model, documents(1, LENGTH)[0], ROWS, LENGTH)
    cells = random_cells(12, seed=model.seed, length=LENGTH, num_layers=3)
    tally = run(cells, tiles, detail_rows=ROWS)
    left_out = 0
    for i, cell in enumerate(cells):
        for layer in range(3):
            found = tally.rows_of(i, layer)
            for place, row in enumerate(naive_measure(cell, tiles, layer)):
                tied = row["visible"] > 0 and nearly_tied(tiles[layer], cell, row["row"], row["group"])
                left_out += tied
                for name in METRICS if row["visible"] else ():
                    value = found[name].reshape(-1)[place]
                    if row[name] is None:
                        assert math.isnan(value)
                        continue
                    if not (tied and name in SETS):
                        assert value == pytest.approx(row[name], abs=3e-6), f"{name}: {cell}, layer {layer}, {row}"
    if not model.sliding:  # a sliding window leaves many positions with a mass of 0
        assert left_out <= 3


# --- what must not matter ---------------------------------------------------------------------------------------------


def columns(tally, cell: int = 0) -> np.ndarray:
    return torch.cat([tally.sums[cell], tally.counts[cell], tally.rows[cell]], dim=-1).numpy()


def fresh(tiles: list[RowTile]) -> list[RowTile]:
    """The same tiles with nothing derived yet."""
    return [dataclasses.replace(tile, _cache={}) for tile in tiles]


@pytest.mark.parametrize("alike", [False, True])
def test_cells_together_equal_each_cell_alone(alike):
    tiles = tiles_of(FakeModel(sink=True), documents(1, LENGTH)[0], ROWS, 4)
    if alike:  # one scorer and ratio, so that all of them share one walk
        pools = [None, *(Candidate(source, blocks, 2) for source in (0, 1) for blocks in (2, 5, 9))]
        cells, _ = expand("quest", topk=[1, 2, 3, 5, 8, 9, 12, 16], window=[0, 3], candidate=pools)
    else:
        cells = random_cells(100, seed=7, length=LENGTH, num_layers=4)
    together = run(cells, tiles, detail_rows=ROWS[::3])
    for i in np.random.default_rng(0).choice(len(cells), 10, replace=False):
        alone = run([cells[i]], fresh(tiles), detail_rows=ROWS[::3])
        assert columns(together, i).tobytes() == columns(alone).tobytes(), cells[i]


LONG_ROWS = torch.tensor([90, 149])
LONG_K = [1, 31, 32, 33, 63, 64, 65, 80, 97, 128, 140, 160]


@pytest.mark.parametrize("ratio", [1, 2])
def test_large_budgets_equal_each_alone_and_the_reference(ratio):
    """The output error is summed in stretches of the order: budgets around and beyond their edges."""
    model = FakeModel(num_layers=2, seed=6)
    tiles = tiles_of(model, documents(1, 150)[0], LONG_ROWS, 2)
    pools = [None, Candidate(0, 40, 4)]
    cells, _ = expand("mean_key", topk=LONG_K, window=5, compress_ratio=ratio, share="kv_head", candidate=pools)
    together = run(cells, tiles, detail_rows=LONG_ROWS)
    for i, cell in enumerate(cells):
        alone = run([cell], fresh(tiles), detail_rows=LONG_ROWS)
        assert columns(together, i).tobytes() == columns(alone).tobytes(), cell
    for i in (3, 5, 12, 16, len(cells) - 1):
        found = together.rows_of(i, 1)
        for place, row in enumerate(naive_measure(cells[i], tiles, 1)):
            for name in ("output_error", "worst_head_coverage", "coverage", "total_coverage", "density"):
                assert found[name].reshape(-1)[place] == pytest.approx(row[name], abs=3e-6), f"{name}: {cells[i]}"


def test_order_of_cells_does_not_matter():
    tiles = tiles_of(FakeModel(), documents(1, LENGTH)[0], ROWS, 4)
    cells = random_cells(25, seed=8, length=LENGTH, num_layers=4)
    forward = run(cells, tiles, detail_rows=ROWS[::3])
    backward = run(cells[::-1], tiles, detail_rows=ROWS[::3])
    for i in range(len(cells)):
        assert columns(forward, i).tobytes() == columns(backward, len(cells) - 1 - i).tobytes()


def cut(tile: RowTile, size: int) -> list[RowTile]:
    """The tile in smaller ones with the very same probabilities, rows side by side."""
    pieces = torch.arange(len(tile.rows)).split(size)
    return [RowTile(tile.acts, tile.rows[p], tile.document, tile.seed, tile.probabilities[:, p]) for p in pieces]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_tallies_do_not_depend_on_tiles(size):
    whole = tiles_of(FakeModel(), documents(1, LENGTH)[0], ROWS, LENGTH)
    # scores that come from a matrix product may round differently by tile, so only the others are held to the bit
    cells = random_cells(12, seed=9, length=LENGTH, num_layers=4, scorers=("oracle", "recency", "random"))
    a = run(cells, whole, detail_rows=ROWS[::2])
    b = run(cells, [part for tile in whole for part in cut(tile, size)], detail_rows=ROWS[::2])
    exact = [i for i, name in enumerate(METRICS) if name != "output_error"]
    assert torch.equal(a.sums[..., exact], b.sums[..., exact])
    assert torch.equal(a.counts, b.counts)
    assert torch.equal(a.rows, b.rows)
    torch.testing.assert_close(a.sums, b.sums, rtol=1e-6, atol=1e-6)


def test_tallies_do_not_depend_on_the_order_of_rows():
    tile = dyadic_tiles(FakeModel(num_layers=1), documents(1, LENGTH)[0], ROWS)[0]
    shuffled = torch.from_numpy(np.random.default_rng(0).permutation(len(ROWS)))
    other = RowTile(tile.acts, ROWS[shuffled], tile.document, tile.seed, tile.probabilities[:, shuffled])
    cells = random_cells(20, seed=1, length=LENGTH, num_layers=2, scorers=("oracle", "recency", "random"))
    cells = [c for c in cells if c.selection.candidate is None]
    assert torch.equal(run(cells, [tile]).sums, run(cells, [other]).sums)


def test_detail_rows_change_nothing_else():
    tiles = tiles_of(FakeModel(), documents(1, LENGTH)[0], ROWS, 4)
    cells = random_cells(10, seed=2, length=LENGTH, num_layers=4)
    none, few, every = (run(cells, fresh(tiles), detail_rows=d) for d in (None, ROWS[2:7:2], ROWS))
    per_head = [METRICS.index(name) for name in ("worst_head_coverage", "output_error")]
    others = [i for i in range(len(METRICS)) if i not in per_head]
    for tally in (few, every):
        assert torch.equal(none.sums[..., others], tally.sums[..., others])
        assert torch.equal(none.counts[..., others], tally.counts[..., others])
        assert torch.equal(none.rows, tally.rows)
    assert not none.counts[..., per_head].any()
    assert 0 < few.counts[..., per_head].sum() < every.counts[..., per_head].sum()


# --- invariants (DESIGN section 2) ------------------------------------------------------------------------------------


@st.composite
def problems(draw, **fixed):
    """(model, document, rows, selection fields); no pool."""
    model = FakeModel(
        num_layers=2, num_kv_heads=draw(st.sampled_from([1, 2, 4])), head_dim=8, seed=draw(st.integers(0, 99)),
        sharpness=draw(st.sampled_from([0.0, 1.0, 8.0])), sink=draw(st.booleans()),
        softcap=draw(st.sampled_from([None, 2.0])),
    )  # fmt: skip
    length = draw(st.integers(2, 20))
    fields = {
        "compress_ratio": draw(st.integers(1, min(5, length))),
        "topk": draw(st.integers(1, length + 2)),
        "window": draw(st.sampled_from([0, 1, 4, 50])),
        "share": draw(st.sampled_from(["layer", "kv_head"])),
    } | fixed
    document = documents(indices=[draw(st.integers(0, 50))], length=length)[0]
    return model, tiles_of(model, document, torch.arange(length), draw(st.integers(1, length))), fields


def visible_of(tiles, fields) -> np.ndarray:
    return (np.arange(tiles[0].length) + 1) // fields["compress_ratio"]


@quick
@given(problems(), st.sampled_from(list(BASELINES)))
def test_recall_is_1_where_the_budget_holds_everything(problem, scorer):
    _, tiles, fields = problem
    tally = run([Cell(scorer, Selection(**fields))], tiles)
    visible = visible_of(tiles, fields)
    full = (visible <= fields["topk"]) & (visible > 0)
    assert (tally.rows_of(0, 1)["recall"][:, full] == 1).all()
    assert int(tally.rows[0, 1, :, 1].sum()) == full.sum() * tiles[0].groups(fields["share"])
    assert int(tally.rows[0, 1, :, 2].sum()) == (visible == 0).sum() * tiles[0].groups(fields["share"])
    assert int(tally.counts[0, 1, :, 0].sum()) == (visible > fields["topk"]).sum() * tiles[0].groups(fields["share"])


@quick
@given(problems())
def test_oracle_recall_is_1_and_nothing_beats_the_oracle(problem):
    _, tiles, fields = problem
    tally = run([Cell(name, Selection(**fields)) for name in BASELINES], tiles)
    names = list(BASELINES)
    seen = visible_of(tiles, fields) > 0
    oracle = tally.rows_of(names.index("oracle"), 0)
    assert (oracle["recall"][:, seen] == 1).all()
    assert (oracle["top1_hit"][:, seen] == 1).all()
    np.testing.assert_array_equal(oracle["coverage"], oracle["oracle_coverage"])
    for i in range(len(names)):
        found = tally.rows_of(i, 0)
        np.testing.assert_array_equal(found["oracle_coverage"], oracle["oracle_coverage"])
        assert (found["coverage"][:, seen] <= found["oracle_coverage"][:, seen] + 1e-6).all()


@quick
@given(problems(), st.sampled_from(list(BASELINES)))
def test_coverage_never_falls_with_k(problem, scorer):
    _, tiles, fields = problem
    cells = [Cell(scorer, Selection(**fields | {"topk": k})) for k in range(1, tiles[0].length + 2)]
    tally = run(cells, tiles)
    seen = visible_of(tiles, fields) > 0
    for name in ("coverage", "oracle_coverage", "total_coverage", "density"):
        by_k = np.stack([tally.rows_of(i, 1)[name] for i in range(len(cells))])[:, :, seen]
        assert (np.diff(by_k, axis=0) >= 0).all(), name


@quick
@given(problems(), st.sampled_from(list(BASELINES)), st.integers(1, 5), st.booleans())
def test_all_blocks_kept_is_the_single_level_selection(problem, scorer, block_size, exclude):
    _, tiles, fields = problem
    pool = Candidate(0, tiles[0].length + fields["topk"] + 2, block_size)
    free = Selection(**fields, exclude_window=exclude)
    tally = run([Cell(scorer, free), Cell(scorer, dataclasses.replace(free, candidate=pool))], tiles)
    in_pool = ("pool_recall", "pool_coverage", "in_pool_recall")
    for name in (name for name in METRICS if name not in in_pool):
        np.testing.assert_array_equal(tally.rows_of(0, 1)[name], tally.rows_of(1, 1)[name])
    seen = visible_of(tiles, fields) > 0
    if not exclude:  # a block whose positions are all left out is no part of any pool
        assert (tally.rows_of(1, 1)["pool_recall"][:, seen] == 1).all()
        np.testing.assert_array_equal(tally.rows_of(1, 1)["in_pool_recall"], tally.rows_of(0, 1)["recall"])


@quick
@given(problems(compress_ratio=1, topk=30), st.sampled_from(list(BASELINES)))
def test_everything_selected_at_ratio_1_is_the_dense_output(problem, scorer):
    _, tiles, fields = problem
    tally = run([Cell(scorer, Selection(**fields))], tiles, detail_rows=torch.arange(tiles[0].length))
    found = tally.rows_of(0, 1)
    assert (found["output_error"] < 1e-5).all()
    assert (found["density"] == 1).all()
    assert (found["worst_head_coverage"] == 1).all()


class Given:
    """A scorer whose scores at positions not visible yet are whatever it is told."""

    name = "given"

    def __init__(self, future: float) -> None:
        self.future = future

    def describe(self):
        return {"name": self.name, "future": self.future}

    def scores(self, tile, ratio, share):
        scores = tile.ranked_mass(share, ratio).clone()
        hidden = torch.arange(scores.shape[-1]) >= ((tile.rows + 1) // ratio).unsqueeze(-1)
        return scores.masked_fill(hidden, self.future)


@quick
@given(problems(), st.booleans(), st.integers(0, 2))
def test_the_future_does_not_matter(problem, exclude, sinks):
    _, tiles, fields = problem
    fields["topk"] = max(fields["topk"], sinks)
    selection = Selection(**fields, exclude_window=exclude, sinks=sinks)
    pool = Candidate(0, fields["topk"] + 3, 2)
    cells = [Cell("given", selection), Cell("given", dataclasses.replace(selection, candidate=pool))]
    calm, wild = (run(cells, tiles, scorers={"given": Given(f)}) for f in (-1.0, 3e38))
    assert torch.equal(calm.sums, wild.sums)
    assert torch.equal(calm.counts, wild.counts)


# --- small parts ------------------------------------------------------------------------------------------------------


def test_buckets():
    rows = torch.arange(5000)
    assert (1 << bucket_of(rows)).tolist() == [naive.position_bucket(row) for row in rows.tolist()]
    powers = torch.tensor([2**e + d for e in range(2, 45) for d in (-1, 0, 1)])
    assert bucket_of(powers).tolist() == [int(p).bit_length() - 1 for p in powers.tolist()]
    for length in range(1, 300):
        assert num_buckets(length) == int(bucket_of(torch.arange(length)).max()) + 1


def test_columns_leave_out_what_has_no_rows():
    tiles = tiles_of(FakeModel(num_layers=2), documents(1, LENGTH)[0], torch.tensor([2, 20]), 8)
    found = run([Cell("recency", Selection(4, 3)), Cell("oracle", Selection(1, 30))], tiles).columns()
    assert list(zip(found["cell"], found["layer"], found["bucket"], strict=True)) == [
        (cell, layer, bucket) for cell in (0, 1) for layer in (0, 1) for bucket in (2, 16)
    ]
    kinds = list(zip(found["rows"], found["saturated"], found["empty"], strict=True))
    assert kinds == [(0, 0, 1), (1, 0, 0)] * 2 + [(0, 1, 0), (0, 1, 0)] * 2
    assert found["recall_n"].tolist() == [0, 1, 0, 1, 0, 0, 0, 0]
    assert found["recall_sum"][[0, 2, 4, 5, 6, 7]].tolist() == [0] * 6


# --- the checks really fire -------------------------------------------------------------------------------------------


def broken_run(scorer: str = "recency", checks: bool = True, **selection):
    tiles = tiles_of(FakeModel(num_layers=2), documents(1, LENGTH)[0], ROWS, len(ROWS))
    return run([Cell(scorer, Selection(**({"compress_ratio": 2, "topk": 3} | selection)))], tiles, checks=checks)


def reverse_order(scores, limit=None, doubts=None, dtype=torch.int64):
    order = passes_order(scores).flip(-1)  # -1 entries come first then, so they are moved to the end again
    order = order.gather(-1, (order < 0).int().sort(dim=-1, stable=True).indices)
    return order if limit is None else order[..., :limit]


passes_order = selecting.order_positions


def future_selected(monkeypatch):
    monkeypatch.setattr(selecting, "adjust_scores", lambda scores, *args, **options: scores)


def oracle_forgets(monkeypatch):
    monkeypatch.delitem(selecting.KNOWN_ORDERS, Oracle)
    monkeypatch.setattr(selecting, "order_positions", reverse_order)


def worst_positions_are_called_best(monkeypatch):
    monkeypatch.setattr(metrics, "order_positions", reverse_order)


def with_metric(monkeypatch, name, value):
    right = metrics.selection_metrics

    def wrong(*args):
        found = right(*args)
        found[name] = found[name].clone()
        found[name][..., 2] = value
        return found

    monkeypatch.setattr(metrics, "selection_metrics", wrong)


BREAKS = {
    "a future position is selected": ("random", future_selected, r"row 0, group 0, k 3"),
    "recall is below 1 though it must be full": ("oracle", oracle_forgets, r"row \d+, group 0, k 3"),
    "coverage is above the oracle's": ("recency", worst_positions_are_called_best, r"row \d+, group 0, k 3"),
    "a share lies outside 0..1": ("random", lambda m: with_metric(m, "density", 1.5), r"row 3, group 0, k 3"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_invariant_is_reported(what, monkeypatch):
    scorer, damage, where = BREAKS[what]
    broken_run(scorer)  # holds as it is
    damage(monkeypatch)
    with pytest.raises(CheckError, match=rf"{what}: layer 0, {where}, cell {scorer} ratio 2 top-3"):
        broken_run(scorer)
    broken_run(scorer, checks=False)


def without_position_1(scores, limit=None, doubts=None, dtype=torch.int64):
    order = passes_order(scores, limit)
    return order.masked_fill(order == 1, -1)


def test_lost_position_in_a_saturated_row_is_reported(monkeypatch):
    monkeypatch.setattr(selecting, "order_positions", without_position_1)
    with pytest.raises(CheckError, match=r"recall is below 1 though it must be full: layer 0, row 3, .* top-9"):
        broken_run("random", topk=9)


@pytest.mark.parametrize("value", [-0.1, 1.1])
@pytest.mark.parametrize("name", ["recall", "coverage", "total_coverage", "relative_coverage", "top1_hit"])
def test_every_share_is_checked(name, value, monkeypatch):
    with_metric(monkeypatch, name, value)
    with pytest.raises(CheckError, match="layer 0, row 3"):
        broken_run("random")
