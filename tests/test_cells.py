"""Cells: products of options, and what is refused with the key, the value and the constraint."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from sparsity_lab.cells import Candidate, Cell, Selection, cell_id, check_cell, expand, grid, with_envelope

POOL = {"source_layer": 1, "topk_blocks": 20, "block_size": 4}


# --- validation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, False, 4.0, "4", None, [4]])
@pytest.mark.parametrize("key", ["compress_ratio", "topk", "window", "sinks"])
def test_numbers_of_a_selection_must_be_whole(key, value):
    with pytest.raises(ValueError, match=re.escape(f"selection.{key}={value!r}: must be a whole number")):
        Selection(**{key: value})


@pytest.mark.parametrize("value", [True, 4.0, "4", None])
@pytest.mark.parametrize("key", POOL)
def test_numbers_of_a_pool_must_be_whole(key, value):
    with pytest.raises(ValueError, match=re.escape(f"selection.candidate.{key}={value!r}: must be a whole number")):
        Candidate(**POOL | {key: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compress_ratio": 0}, "selection.compress_ratio=0: must be at least 1"),
        ({"compress_ratio": -2}, "selection.compress_ratio=-2: must be at least 1"),
        ({"topk": 0}, "selection.topk=0: must be at least 1"),
        ({"window": -1}, "selection.window=-1: must be at least 0"),
        ({"sinks": -1}, "selection.sinks=-1: must be at least 0"),
        ({"sinks": 5, "topk": 4}, "selection.sinks=5: must be at most selection.topk=4"),
        ({"share": "head"}, "selection.share='head': must be one of layer, kv_head"),
        ({"share": None}, "selection.share=None: must be one of layer, kv_head"),
        ({"exclude_window": "false"}, "selection.exclude_window='false': must be true or false"),
        ({"exclude_window": 0}, "selection.exclude_window=0: must be true or false"),
        ({"exclude_window": None}, "selection.exclude_window=None: must be true or false"),
        ({"index_source_layers": ()}, "selection.index_source_layers=(): must be null or a list of layers"),
        ({"index_source_layers": "0,8"}, "selection.index_source_layers='0,8': must be null or a list of layers"),
        ({"index_source_layers": [0, "8"]}, "selection.index_source_layers='8': must be a whole number"),
        ({"index_source_layers": [-1, 8]}, "selection.index_source_layers=-1: must be at least 0"),
        ({"index_source_layers": [8, 0]}, "selection.index_source_layers=[8, 0]: must be ascending, each layer once"),
        ({"index_source_layers": [0, 0]}, "selection.index_source_layers=[0, 0]: must be ascending, each layer once"),
    ],
)
def test_bad_selections(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Selection(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source_layer": -1}, "selection.candidate.source_layer=-1: must be at least 0"),
        ({"topk_blocks": 0}, "selection.candidate.topk_blocks=0: must be at least 1"),
        ({"block_size": 0}, "selection.candidate.block_size=0: must be at least 1"),
    ],
)
def test_bad_pools(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Candidate(**POOL | fields)


@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
@pytest.mark.parametrize("topk_blocks", [1, 2, 5])
def test_a_pool_must_hold_the_selection_even_when_the_newest_block_has_just_begun(topk_blocks, block_size):
    pool = Candidate(0, topk_blocks, block_size)
    most = (topk_blocks - 1) * block_size + 1  # whole blocks, and one visible position in the pinned block
    Selection(topk=most, candidate=pool)
    with pytest.raises(
        ValueError,
        match=f"selection.candidate.topk_blocks={topk_blocks} x selection.candidate.block_size={block_size} .*"
        f"fewer than selection.topk={most + 1};",
    ):
        Selection(topk=most + 1, candidate=pool)


def test_a_pool_must_hold_the_sinks_and_the_newest_block():
    Selection(topk=3, sinks=2, candidate=Candidate(0, 2, 2))
    with pytest.raises(ValueError, match=r"topk_blocks=2: must hold the 2 blocks of selection.sinks=3"):
        Selection(topk=3, sinks=3, candidate=Candidate(0, 2, 2))


def test_cells_of_a_document_and_a_model():
    inside = {"length": 8, "num_layers": 4, "layers": [0, 1, 3]}
    check_cell(Cell("quest", Selection(compress_ratio=8, topk=3)), **inside)
    for source in (0, 1):
        check_cell(Cell("quest", Selection(topk=3, candidate=Candidate(source, 20, 4))), **inside)
    for fields, message in (
        ({"compress_ratio": 9}, "selection.compress_ratio=9: larger than the documents' 8 tokens"),
        ({"candidate": Candidate(4, 20, 4)}, "source_layer=4: the model has layers 0 to 3"),
        ({"candidate": Candidate(2, 20, 4)}, "source_layer=2: not among the measured layers [0, 1, 3]"),
        ({"candidate": Candidate(3, 20, 4)}, "source_layer=3: no measured layer after it would use its pool"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            check_cell(Cell("quest", Selection(topk=3, **fields)), **inside)


# --- products ---------------------------------------------------------------------------------------------------------


def test_grid_is_the_product():
    cells = grid(["quest", "oracle"], topk=[4, 8], compress_ratio=(1, 2), window=7)
    wanted = [Cell(n, Selection(r, k, 7)) for n, k, r in itertools.product(["quest", "oracle"], [4, 8], [1, 2])]
    assert cells == wanted


def test_one_value_needs_no_list():
    assert grid() == [Cell("quest", Selection())]
    assert grid("oracle", topk=9) == [Cell("oracle", Selection(topk=9))]


def test_repeated_points_count_once():
    assert len(grid(["quest", "quest"], topk=[4, 4, 8])) == 2


def test_pools_are_multiplied_out():
    pools = [None, POOL, {"source_layer": [0, 2], "topk_blocks": [30, 40], "block_size": 8}, Candidate(3, 50, 2)]
    cells = grid("quest", topk=[4, 8], candidate=pools)
    wanted = [None, Candidate(**POOL)]
    wanted += [Candidate(s, b, 8) for s in (0, 2) for b in (30, 40)]
    wanted += [Candidate(3, 50, 2)]
    assert {c.selection.candidate for c in cells} == set(wanted)
    assert len(cells) == 2 * len(wanted)
    assert grid("quest", topk=4, candidate=POOL) == [Cell("quest", Selection(topk=4, candidate=Candidate(**POOL)))]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, [None]),
        ([0, 8], [(0, 8)]),
        ((0, 8), [(0, 8)]),
        ([[0, 8], [0, 4, 8]], [(0, 8), (0, 4, 8)]),
        ([None, [0, 8]], [None, (0, 8)]),
        ([None], [None]),
    ],
)
def test_a_list_of_layers_is_one_value(value, wanted):
    assert [c.selection.index_source_layers for c in grid(index_source_layers=value)] == wanted
    assert grid(zipped=[{"index_source_layers": value}]) == grid(index_source_layers=value)


def test_bad_lists_of_layers():
    cells, failed = expand("quest", index_source_layers=[[0, 8], [8, 0], []])
    assert [c.selection.index_source_layers for c in cells] == [(0, 8)]
    assert [f["reason"].split(":")[0] for f in failed] == [
        "selection.index_source_layers=[8, 0]", "selection.index_source_layers=[]",
    ]  # fmt: skip


def test_zipped_values_are_matched():
    cells = grid("quest", window=[1, 2], zipped=[{"topk": 64, "compress_ratio": 1}, {"topk": 16, "compress_ratio": 4}])
    found = [(c.selection.topk, c.selection.compress_ratio, c.selection.window) for c in cells]
    assert found == [(64, 1, 1), (64, 1, 2), (16, 4, 1), (16, 4, 2)]
    assert grid("quest", zipped=[]) == grid("quest", zipped=None) == grid("quest")
    several = grid("quest", zipped=[{"topk": [1, 2], "compress_ratio": 4}, {"topk": 3, "candidate": POOL}])
    assert [c.selection.topk for c in several] == [1, 2, 3]
    assert several[2].selection.candidate == Candidate(**POOL)


def test_zipped_values_win_over_the_product():
    assert [c.selection.topk for c in grid("quest", topk=[7, 8], zipped=[{"topk": 1}])] == [1]


@pytest.mark.parametrize("options", [{"top_k": 4}, {"zipped": [{"topk": 4}, {"top_k": 4}]}])
def test_unknown_keys(options):
    with pytest.raises(ValueError, match=r"selection.top_k: no such field; there are candidate, compress_ratio, "):
        expand("quest", **options)


@pytest.mark.parametrize(
    "options", [{"topk": []}, {"index_source_layers": []}, {"candidate": []}, {"candidate": POOL | {"block_size": []}}]
)
def test_no_value(options):
    key = next(iter(options))
    with pytest.raises(ValueError, match=rf"selection.{key}=\[\]: needs at least one value"):
        expand("quest", **options)
    with pytest.raises(ValueError, match=r"scorer=\[\]: needs at least one value"):
        expand([])


@pytest.mark.parametrize("value", [5, "8x4", True, [[1, 20, 4]]])
def test_a_pool_that_is_no_mapping(value):
    with pytest.raises(ValueError, match=r"selection.candidate=.*: must be null, the fields of a pool, or a list"):
        expand("quest", candidate=value)


@pytest.mark.parametrize(
    "pool", [{}, {"source_layer": 1}, POOL | {"blocks": 3}, {"source_layer": 1, "topk_blocks": 2, "size": 3}]
)
def test_incomplete_pools(pool):
    with pytest.raises(
        ValueError, match=r"selection.candidate=.*: needs exactly block_size, source_layer, topk_blocks"
    ):
        expand("quest", candidate=[pool])


def test_an_invalid_point_is_returned_with_its_reason_and_the_rest_go_on():
    cells, failed = expand("quest", topk=[4, 0], candidate=[None, POOL, POOL | {"block_size": "4"}])
    assert {(c.selection.topk, c.selection.candidate) for c in cells} == {(4, None), (4, Candidate(**POOL))}
    assert [f["reason"] for f in failed] == [
        "selection.candidate.block_size='4': must be a whole number",
        *["selection.topk=0: must be at least 1"] * 2,
        "selection.candidate.block_size='4': must be a whole number",
    ]
    assert failed[0] == {
        "scorer": "quest", "topk": 4, "candidate_source_layer": 1, "candidate_topk_blocks": 20,
        "candidate_block_size": "4", "reason": failed[0]["reason"],
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"selection.topk=0: must be at least 1"):
        grid("quest", topk=[4, 0])


# --- envelope, description, id ----------------------------------------------------------------------------------------


def test_envelope_adds_single_level_bounds_once():
    pooled, free = grid("quest", topk=4, candidate=[POOL, None])
    bounds = [Cell(name, free.selection) for name in ("oracle", "recency", "random")]
    assert with_envelope([pooled]) == [pooled, *bounds]
    assert with_envelope([pooled, free, bounds[0]]) == [pooled, free, bounds[0], *bounds[1:]]
    assert with_envelope([free], ("oracle",)) == [free, bounds[0]]
    assert with_envelope([]) == []
    reusing = Cell("quest", dataclasses.replace(pooled.selection, index_source_layers=(0, 1, 2)))
    assert with_envelope([reusing]) == [reusing, *bounds]


def test_fields_are_flat_and_the_same_for_every_cell():
    pooled, free = grid("quest", topk=4, sinks=2, candidate=[POOL, None])
    assert pooled.fields() == {
        "scorer": "quest", "compress_ratio": 1, "topk": 4, "window": 128, "share": "layer", "exclude_window": False,
        "sinks": 2, "index_source_layers": None, "candidate_source_layer": 1, "candidate_topk_blocks": 20,
        "candidate_block_size": 4,
    }  # fmt: skip
    assert list(free.fields()) == list(pooled.fields())
    assert free.fields()["candidate_source_layer"] is None
    assert Selection(index_source_layers=[0, 8]) == Selection(index_source_layers=(0, 8))
    assert Cell("quest", Selection(index_source_layers=(0, 8))).fields()["index_source_layers"] == "0,8"


def test_labels_tell_a_pool():
    pooled, free = grid("quest", topk=4, candidate=[POOL, None])
    assert free.label() == "quest ratio 1 top-4"
    assert pooled.label() == "quest ratio 1 top-4 pool 20x4 of layer 1"
    assert Cell("quest", Selection(index_source_layers=(0, 8))).label() == "quest ratio 1 top-64 sources 0,8"


def test_cell_ids():
    cells = grid(
        "quest", topk=[8, 9], compress_ratio=[1, 2], window=[0, 1], share=["layer", "kv_head"],
        exclude_window=[False, True], sinks=[0, 1], candidate=[None, POOL, POOL | {"source_layer": 2}],
    )  # fmt: skip
    ids = [cell_id(cell, {"name": "quest"}, {"seed": 0}) for cell in cells]
    assert len(set(ids)) == len(cells) == 2**6 * 3
    assert all(re.fullmatch("[0-9a-f]{16}", i) for i in ids)
    one = cells[0]
    assert cell_id(one, {"name": "quest"}, {"seed": 1}) not in ids
    assert cell_id(one, {"name": "quest", "head_reduction": "logit"}, {"seed": 0}) not in ids
    assert cell_id(one, {"b": 1, "a": 2}, {}) == cell_id(one, {"a": 2, "b": 1}, {})
    assert cell_id(Cell("by another name", one.selection), {"name": "quest"}, {"seed": 0}) == ids[0]
    reused = [
        Cell("quest", dataclasses.replace(one.selection, index_source_layers=s)) for s in ((0,), (0, 2), (0, 1, 2))
    ]
    assert len({cell_id(cell, {"name": "quest"}, {"seed": 0}) for cell in [*cells, *reused]}) == len(cells) + 3
