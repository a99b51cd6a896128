"""Pins the reference itself: tiny examples worked by hand, then the invariants of DESIGN section 2."""

from __future__ import annotations

import math

import naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

# Every query is 1 and every key the log of a weight, so a causal softmax row is the weights up to it over their sum.
# weights:      [1, 1, 4, 2, 1, 1]    row 5: p = .1 .1 .4 .2 .1 .1    ratio 2: D = .2 .6 .2
WEIGHTS = [1, 1, 4, 2, 1, 1]
VALUES = [0, 0, 1, 1, 1, 1]  # row 5: dense output .4 + .2 + .1 + .1 = .8


def from_weights(*heads):
    """Weights per KV head -> q [h,s,1], k [h,t,1] with p proportional to the weights."""
    k = np.log(np.array(heads, np.float64))[:, :, None]
    return np.ones_like(k), k


def measure_one(rows, scores, *, heads=(WEIGHTS,), values=(VALUES,), groups=1, **options):
    """`scores` [n], the same for every group and row."""
    q, k = from_weights(*heads)
    v = np.array(values, np.float64)[:, :, None]
    defaults = {"scale": 1.0, "ratio": 2, "topk": 1, "window": 0}
    index_scores = np.tile(np.array(scores, np.float64), (groups, len(rows), 1))
    if (pool := options.pop("pool_scores", None)) is not None:
        options["pool_scores"] = np.tile(np.array(pool, np.float64), (groups, len(rows), 1))
    return naive.measure(q, k, v, rows, index_scores=index_scores, **(defaults | options))


def check(result, **expected):
    for key, value in expected.items():
        assert result[key] == (pytest.approx(value, abs=1e-12) if isinstance(value, float) else value), key


# --- dense probabilities ---------------------------------------------------------------------------------------------


def test_dense_causal():
    p = naive.dense_probabilities(*from_weights([1, 3, 4, 8]), 1.0)
    expected = [[1, 0, 0, 0], [1 / 4, 3 / 4, 0, 0], [1 / 8, 3 / 8, 4 / 8, 0], [1 / 16, 3 / 16, 4 / 16, 8 / 16]]
    np.testing.assert_allclose(p[0], expected, atol=1e-15)
    assert p.dtype == np.float64


def test_dense_scale():
    p = naive.dense_probabilities(*from_weights([1, 3]), 2.0)  # exp(2 log w) = w squared: 1 and 9
    np.testing.assert_allclose(p[0, 1], [0.1, 0.9])


def test_dense_sliding_window_counts_own_token():
    p = naive.dense_probabilities(*from_weights([1, 3, 4, 8]), 1.0, window=2)
    np.testing.assert_allclose(p[0], [[1, 0, 0, 0], [0.25, 0.75, 0, 0], [0, 3 / 7, 4 / 7, 0], [0, 0, 1 / 3, 2 / 3]])


def test_dense_sink_is_in_the_denominator_only():
    p = naive.dense_probabilities(*from_weights([1, 3, 4, 8]), 1.0, sink=np.log([4.0]))
    np.testing.assert_allclose(p[0, 0], [1 / 5, 0, 0, 0])
    np.testing.assert_allclose(p[0, 3], [0.05, 0.15, 0.2, 0.4])


def test_dense_softcap():
    # scaled logits 0 and 4*atanh(1/2); capped at 4 they are 0 and 4*(1/2) = 2. The sink log(2) is not capped.
    q, k = np.ones((1, 2, 1)), np.array([[[0.0], [2 * math.atanh(0.5)]]])
    p = naive.dense_probabilities(q, k, 2.0, softcap=4.0, sink=np.log([2.0]))
    np.testing.assert_allclose(p[0, 1], [1 / (3 + math.e**2), math.e**2 / (3 + math.e**2)])


def test_dense_gqa_neighbouring_query_heads_share_a_kv_head():
    _, k = from_weights([1, 1], [1, 3])
    p = naive.dense_probabilities(np.ones((4, 2, 1)), k, 1.0)
    np.testing.assert_allclose(p[:, 1, 1], [1 / 2, 1 / 2, 3 / 4, 3 / 4])


def test_dense_survives_huge_logits():
    q, k = np.ones((1, 2, 1)), np.array([[[5000.0], [-5000.0]]])
    np.testing.assert_array_equal(naive.dense_probabilities(q, k, 1.0)[0, 1], [1, 0])


# --- measure, by hand ------------------------------------------------------------------------------------------------


def test_wrong_selection():
    [result] = measure_one([5], [5, 1, 0], window=1)
    check(result, row=5, group=0, visible=3, saturated=False, selected=[0], oracle=[1], pool=None)
    check(result, recall=0.0, coverage=0.2, oracle_coverage=0.6, relative_coverage=1 / 3, top1_hit=0)
    # Attended: tokens 0, 1 and the window 5: mass .3 of 1, 3 of 6 tokens, output (0 + 0 + .1) / .3 against .8.
    check(result, total_coverage=0.3, density=0.5, worst_head_coverage=0.2, output_error=(0.8 - 1 / 3) / 0.8)
    check(result, pool_recall=None, pool_coverage=None, in_pool_recall=None)


def test_right_selection():
    [result] = measure_one([5], [0, 1, 0])
    check(result, selected=[1], recall=1.0, coverage=0.6, relative_coverage=1.0, top1_hit=1, total_coverage=0.6)
    check(result, output_error=0.25, density=2 / 6)  # output 1 against .8


def test_incomplete_tail_group_is_attended_but_not_visible():
    # row 4: weights 1 1 4 2 | 1, sum 9; D = 2/9 6/9, visible mass 8/9; token 4 is the tail.
    [result] = measure_one([4], [0, 9, 99])
    check(result, visible=2, saturated=False, selected=[1], oracle=[1])
    check(result, coverage=6 / 8, oracle_coverage=6 / 8, total_coverage=7 / 9, density=3 / 5, worst_head_coverage=6 / 8)


def test_compressed_positions_are_entries_of_their_own():
    # row 5 sees raw token 5 (weight 1) and three compressed positions (weights 3 5 1): p = .1 | .3 .5 .1
    q, k = from_weights(WEIGHTS)
    compressed = np.log([[3.0, 5, 1]])[:, :, None], np.array([[0.0, 1, 1]])[:, :, None]
    values, scores = np.array([VALUES], np.float64)[:, :, None], np.array([[[9.0, 1, 5]]])
    options = {"scale": 1.0, "ratio": 2, "window": 1, "model_window": 1, "compressed": compressed}
    [result] = naive.measure(q, k, values, [5], topk=2, index_scores=scores, **options)
    check(result, visible=3, selected=[0, 2], oracle=[0, 1], recall=0.5, coverage=4 / 9, oracle_coverage=8 / 9)
    # Attended: token 5 and two positions, mass .1 + .3 + .1; they stand for tokens 0 1 4 5, of which 5 is raw too.
    check(result, total_coverage=0.5, density=4 / 6, worst_head_coverage=4 / 9, top1_hit=0)
    check(result, output_error=(0.7 - 0.2 / 0.5) / 0.7)
    [everything] = naive.measure(q, k, values, [5], topk=3, index_scores=scores, **options)
    check(everything, total_coverage=1.0, density=1.0, output_error=0.0)
    # row 4: token 4 | two positions; the incomplete group is nothing but the window: 1 + 4 of 5 tokens
    [result] = naive.measure(q, k, values, [4], topk=2, index_scores=scores, **options)
    check(result, visible=2, saturated=True, selected=[0, 1], total_coverage=1.0, density=1.0, output_error=0.0)


def test_the_latest_source_at_or_before_a_layer():
    assert [naive.index_source(layer, [1, 4]) for layer in range(6)] == [None, 1, 1, 1, 4, 4]
    assert [naive.index_source(layer, None) for layer in range(3)] == [0, 1, 2]


def test_window_is_clipped_and_may_overlap_the_selection():
    [one] = measure_one([3], [0, 9], window=3)
    check(one, selected=[1], density=3 / 4, total_coverage=7 / 8)  # tokens 2 3 and 1 2 3
    [two] = measure_one([3], [0, 9], window=50)
    check(two, density=1.0, total_coverage=1.0, output_error=0.0)


def test_saturated_and_invisible_rows():
    zero, two, five = measure_one([0, 3, 5], [1, 2, 3], topk=2)
    check(zero, row=0, visible=0, saturated=True, selected=[], oracle=[], pool=None)
    assert all(zero[metric] is None for metric in naive.METRICS)
    check(two, visible=2, saturated=True, selected=[0, 1], recall=1.0, coverage=1.0)
    # row 5, k = 2: S = {1, 2}; D = .2 .6 .2, the tie of 0 and 2 goes to 0.
    check(five, visible=3, saturated=False, selected=[1, 2], oracle=[0, 1], recall=0.5, coverage=0.8)
    check(five, relative_coverage=1.0, top1_hit=1)


def test_score_ties_go_to_the_lowest_position():
    [result] = measure_one([5], [3, 7, 7])
    check(result, selected=[1])
    [result] = measure_one([5], [7, 7, 7], topk=2)
    check(result, selected=[0, 1])


def test_sink_changes_totals_and_errors_but_not_coverage():
    # A sink of weight 10 halves row 5: D = .1 .3 .1, output .4; over tokens 0 1 5 (weight 3): 1 / (3 + 10).
    [result] = measure_one([5], [5, 1, 0], window=1, sink=np.log([10.0]))
    check(result, coverage=0.2, oracle_coverage=0.6, worst_head_coverage=0.2, total_coverage=0.15)
    check(result, output_error=(0.4 - 1 / 13) / 0.4)


def test_two_heads_share_one_selection():
    # D of the heads: .2 .6 .2 and .7 .2 .1 (weights 4 3 1 1 .5 .5); mean .45 .40 .15: the oracle is 0.
    heads, values = (WEIGHTS, [4, 3, 1, 1, 0.5, 0.5]), (VALUES, [1, 1, 0, 0, 0, 0])
    [result] = measure_one([5], [0, 1, 0], heads=heads, values=values)
    check(result, selected=[1], oracle=[0], recall=0.0, coverage=0.4, oracle_coverage=0.45, relative_coverage=40 / 45)
    # Heads: .6 and .2. Outputs: 1 against .8 (error .25), 0 against .7 (error 1).
    check(result, worst_head_coverage=0.2, total_coverage=0.4, output_error=0.625, top1_hit=0)


def test_one_selection_per_kv_head():
    heads, values = (WEIGHTS, [4, 3, 1, 1, 0.5, 0.5]), (VALUES, [1, 1, 0, 0, 0, 0])
    results = measure_one([3, 5], [0, 1, 0], heads=heads, values=values, groups=2, share="kv_head")
    assert [(r["group"], r["row"]) for r in results] == [(0, 3), (0, 5), (1, 3), (1, 5)]
    check(results[1], oracle=[1], recall=1.0, coverage=0.6, worst_head_coverage=0.6, output_error=0.25)
    check(results[3], oracle=[0], recall=0.0, coverage=0.2, oracle_coverage=0.7, output_error=1.0)


def test_kv_head_groups_take_neighbouring_query_heads_and_their_sinks():
    assert naive.head_groups(4, 2, "kv_head") == [[0, 1], [2, 3]]
    assert naive.head_groups(4, 2, "layer") == [[0, 1, 2, 3]]
    # Only head 2 has a sink (weight 10). S = {0} and the window attend tokens 0 1 5, mass .3 of 1.
    _, k = from_weights(WEIGHTS, WEIGHTS)
    v = np.array([VALUES, [1, 1, 0, 0, 0, 0]], np.float64)[:, :, None]
    sink = np.array([-np.inf, -np.inf, math.log(10), -np.inf])
    options = {"scale": 1.0, "sink": sink, "ratio": 2, "topk": 1, "window": 1, "share": "kv_head"}
    one, two = naive.measure(np.ones((4, 6, 1)), k, v, [5], index_scores=np.zeros((2, 1, 3)), **options)
    check(one, selected=[0], total_coverage=0.3, output_error=7 / 12)  # 1/3 against .8, both heads
    # Head 2: 2 / (3 + 10) against .1, error 7/13. Head 3: 2/3 against .2, error 7/3.
    check(two, selected=[0], total_coverage=(0.15 + 0.3) / 2, output_error=(7 / 13 + 7 / 3) / 2)


def test_model_window_is_part_of_the_dense_probability():
    # The layer itself sees tokens 3 4 5 (weights 2 1 1): D = 0 .5 .5, tie to 1.
    [result] = measure_one([5], [9, 0, 1], model_window=3)
    check(result, oracle=[1], selected=[0], coverage=0.0, oracle_coverage=0.5, total_coverage=0.0, output_error=1.0)
    # It sees token 4 alone, the tail: no visible mass, so no ratio to it; recall goes by the tie rule.
    [result] = measure_one([4], [9, 0, 1], model_window=1)
    check(result, recall=1.0, coverage=None, oracle_coverage=None, relative_coverage=None, worst_head_coverage=None)
    check(result, total_coverage=1.0, output_error=0.0)


# --- two levels, sinks, excluded window ------------------------------------------------------------------------------

# ratio 1, row 5: D = .1 .2 .3 .2 .1 .1; blocks of 2: {0,1} {2,3} {4,5}; the oracle of k = 2 is {1, 2} (1 ties with 3).
POOLED = {"heads": ([1, 2, 3, 2, 1, 1],), "ratio": 1, "topk": 2, "block_size": 2}


def test_pool_keeps_the_newest_block_and_the_best_other():
    [result] = measure_one([5], [0, 5, 9, 9, 1, 0], pool_scores=[9, 0, 1, 2, 0, 0], topk_blocks=2, **POOLED)
    check(result, oracle=[1, 2], pool=[0, 1, 4, 5], selected=[1, 4], recall=0.5, coverage=0.3, top1_hit=0)
    check(result, oracle_coverage=0.5, pool_recall=0.5, pool_coverage=0.5, in_pool_recall=1.0)


def test_selection_misses_what_the_pool_holds():
    [result] = measure_one([5], [0, 5, 1, 9, 1, 7], pool_scores=[0, 0, 1, 2, 0, 0], topk_blocks=2, **POOLED)
    check(result, pool=[2, 3, 4, 5], selected=[3, 5], recall=0.0, coverage=0.3)
    check(result, pool_recall=0.5, pool_coverage=0.7, in_pool_recall=0.0)


def test_in_pool_recall_is_undefined_without_an_oracle_position_in_the_pool():
    [result] = measure_one([5], [9, 9, 9, 9, 0, 0], pool_scores=[9, 9, 9, 9, 0, 0], topk_blocks=1, **POOLED)
    check(result, pool=[4, 5], selected=[4, 5], pool_recall=0.0, in_pool_recall=None, recall=0.0)


def test_a_pool_smaller_than_k_leaves_the_rest_missing():
    options = POOLED | {"topk": 4}
    [result] = measure_one([5], [9, 9, 9, 9, 0, 1], pool_scores=[0] * 6, topk_blocks=1, **options)
    check(result, oracle=[0, 1, 2, 3], selected=[4, 5], recall=0.0)
    [result] = measure_one([5], [9, 9, 9, 9, 0, 1], pool_scores=[0, 0, 1, 0, 0, 0], topk_blocks=2, **options)
    check(result, selected=[2, 3, 4, 5], recall=2 / 4, in_pool_recall=1.0)


def test_block_score_is_the_maximum():
    [result] = measure_one([5], [0] * 6, pool_scores=[2, 2, 3, 0, 0, 0], topk_blocks=2, **POOLED)
    check(result, pool=[2, 3, 4, 5])  # 3 beats 2 and 2


def test_pool_ignores_scores_of_the_future_and_ties_go_to_the_lowest_block():
    # row 4: position 5 is the future; the newest block {4} is pinned, blocks 0 and 1 tie.
    [result] = measure_one([4], [0, 0, 1, 1, 2, 99], pool_scores=[3, 0, 0, 3, 0, 99], topk_blocks=2, **POOLED)
    check(result, visible=5, pool=[0, 1, 4], selected=[0, 4])


def test_sinks_take_part_of_the_budget():
    [result] = measure_one([5], [0, 1, 2, 3, 4, 5], sinks=1, **(POOLED | {"block_size": None}))
    check(result, selected=[0, 5])
    [result] = measure_one([5], [0, 1, 2, 3, 4, 5], sinks=3, **(POOLED | {"block_size": None}))
    check(result, selected=[0, 1])
    [result] = measure_one([1], [0, 1, 2, 3, 4, 5], sinks=3, **(POOLED | {"topk": 1, "block_size": None}))
    check(result, selected=[0])


def test_excluded_window_positions_are_those_wholly_inside_it():
    # ratio 2, row 5: window 3 is tokens 3 4 5; position 1 (tokens 2 3) straddles and stays, position 2 is left out.
    [result] = measure_one([5], [0, 1, 9], window=3, exclude_window=True)
    check(result, selected=[1], density=4 / 6)
    [result] = measure_one([5], [0, 1, 9], window=3)
    check(result, selected=[2])
    [result] = measure_one([5], [0, 1, 9], window=6, exclude_window=True)
    check(result, selected=[], recall=0.0, coverage=0.0, density=1.0, output_error=0.0)
    [result] = measure_one([5], [0, 1, 9], window=6, exclude_window=True, sinks=1)
    check(result, selected=[0])


def test_excluded_window_and_sinks_also_shape_the_pool():
    options = POOLED | {"window": 4, "exclude_window": True}
    scores = [1, 2, 9, 9, 9, 9]
    # Window 2..5: block 1 is unreachable and dropped though three blocks fit; block 2 too, but it is pinned.
    [result] = measure_one([5], scores, pool_scores=scores, topk_blocks=3, **options)
    check(result, pool=[0, 1, 4, 5], selected=[0, 1])
    # Only the pinned block fits: nothing in it may be chosen.
    [result] = measure_one([5], scores, pool_scores=scores, topk_blocks=1, **options)
    check(result, pool=[4, 5], selected=[])
    # A sink block is +inf and lower than the pinned one, so it takes the only place.
    [result] = measure_one([5], scores, pool_scores=scores, topk_blocks=1, sinks=1, **options)
    check(result, pool=[0, 1], selected=[0, 1])


def test_minus_infinity_is_unreachable_and_nan_an_error():
    [result] = measure_one([5], [-np.inf, 1, -np.inf], topk=2)
    check(result, selected=[1])
    with pytest.raises(ValueError, match="NaN"):
        measure_one([5], [np.nan, 1, 0])
    measure_one([3], [0, 1, np.nan])  # beyond the visible length: ignored


# --- averages and buckets --------------------------------------------------------------------------------------------


def test_average_leaves_out_saturated_invisible_and_undefined_rows():
    row = {"saturated": False, "visible": 9}
    rows = [row | {"m": 0.5}, row | {"m": 0.0}, row | {"m": None}, {"saturated": True, "visible": 1, "m": 1.0}]
    rows.append({"saturated": False, "visible": 0, "m": 1.0})
    assert naive.average(rows, "m") == 0.25
    assert naive.average(rows[2:], "m") is None


def test_position_bucket():
    assert [naive.position_bucket(s) for s in (0, 1, 2, 3, 4, 7, 8, 1023, 1024)] == [1, 1, 2, 2, 4, 4, 8, 512, 1024]


# --- invariants ------------------------------------------------------------------------------------------------------


@st.composite
def cases(draw, **fixed):
    """Random tensors and a cell. Integer scores, so that ties are common."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    length, (h, hk) = draw(st.integers(1, 17)), draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]))
    share = draw(st.sampled_from(["layer", "kv_head"]))
    ratio = fixed.pop("ratio", None) or draw(st.integers(1, 4))
    shape = (hk if share == "kv_head" else 1, length, length // ratio)
    case = {
        "q": rng.normal(size=(h, length, 4)),
        "k": rng.normal(size=(hk, length, 4)),
        "v": rng.normal(size=(hk, length, 3)),
        "rows": list(range(length)),
        "scale": 0.5,
        "softcap": draw(st.sampled_from([None, 2.0])),
        "sink": rng.normal(size=h) if draw(st.booleans()) else None,
        "ratio": ratio,
        "topk": draw(st.integers(1, 6)),
        "window": draw(st.integers(0, 5)),
        "share": share,
        "model_window": draw(st.sampled_from([None, 4, 6])),  # longer than any tail: some visible mass remains
        "index_scores": rng.integers(0, 6, shape).astype(float),
        "pool_scores": None,
    }
    if draw(st.booleans()):
        blocks = {"topk_blocks": draw(st.integers(1, 4)), "block_size": draw(st.integers(1, 4))}
        case |= {"pool_scores": rng.integers(0, 6, shape).astype(float)} | blocks
        case |= {"exclude_window": draw(st.booleans()), "sinks": draw(st.integers(0, 2))}
    return case | fixed


def run(case, **changes):
    """Measure the case; only the rows with something visible."""
    return [r for r in naive.measure(**(case | changes)) if r["visible"] > 0]


def oracle_scores(case):
    """The index scores of a perfect scorer: D itself, [g, rows, n]."""
    p = naive.dense_probabilities(
        case["q"], case["k"], case["scale"], case["softcap"], case["sink"], case["model_window"]
    )
    scores = np.zeros_like(case["index_scores"])
    for group, heads in enumerate(naive.head_groups(len(case["q"]), len(case["k"]), case["share"])):
        for row in case["rows"]:
            visible = (row + 1) // case["ratio"]
            mass = naive.head_mean(p[heads, row])
            scores[group, row, :visible] = naive.position_mass(mass, case["ratio"], visible)
    return scores


quick = settings(max_examples=30, deadline=None)


@quick
@given(cases(pool_scores=None, exclude_window=False))
def test_enough_budget_is_recall_one(case):
    for result in run(case):
        if result["saturated"]:
            assert result["selected"] == list(range(result["visible"]))
            check(result, recall=1.0, coverage=1.0, relative_coverage=1.0, worst_head_coverage=1.0)


@quick
@given(cases(pool_scores=None, exclude_window=False, sinks=0))
def test_oracle_scores_are_the_oracle(case):
    for result in run(case, index_scores=oracle_scores(case)):
        assert result["selected"] == result["oracle"]
        assert (result["recall"], result["top1_hit"], result["relative_coverage"]) == (1.0, 1, 1.0)
        assert result["coverage"] == result["oracle_coverage"]


@quick
@given(cases())
def test_coverage_never_falls_with_k(case):
    smaller, larger = run(case), run(case, topk=case["topk"] + 1)
    for a, b in zip(smaller, larger, strict=True):
        assert set(a["selected"]) <= set(b["selected"])
        for metric in ("coverage", "oracle_coverage", "worst_head_coverage", "total_coverage", "density"):
            assert a[metric] <= b[metric] + 1e-12


@quick
@given(cases())
def test_ranges_and_selection_below_oracle(case):
    for result in run(case):
        assert result["coverage"] <= result["oracle_coverage"] + 1e-12
        assert result["worst_head_coverage"] <= result["coverage"] + 1e-12  # the mean is a weighted mean of the heads
        for metric in set(naive.METRICS) - {"output_error"}:
            assert result[metric] is None or 0 <= result[metric] <= 1 + 1e-12
        if result["pool"] is not None:
            assert result["coverage"] <= result["pool_coverage"] + 1e-12
            assert set(result["selected"]) <= set(result["pool"])


@quick
@given(cases(exclude_window=False), st.integers(1, 4))
def test_all_blocks_kept_is_single_level(case, block_size):
    single = run(case, pool_scores=None)
    pool = {"pool_scores": np.zeros_like(case["index_scores"]), "block_size": block_size, "topk_blocks": 99}
    for one, two in zip(single, run(case, **pool), strict=True):
        check(two, pool_recall=1.0, pool_coverage=1.0, pool=list(range(two["visible"])))
        ignored = ("pool", "pool_recall", "pool_coverage", "in_pool_recall")
        assert {key: x for key, x in one.items() if key not in ignored} == {
            key: x for key, x in two.items() if key not in ignored
        }


@quick
@given(cases(ratio=1, topk=99, pool_scores=None, exclude_window=False))
def test_ratio_one_and_enough_budget_is_dense(case):
    for result in run(case):
        check(result, output_error=0.0, density=1.0)


@quick
@given(cases())
def test_nothing_of_the_future_matters(case):
    row = len(case["rows"]) // 2
    rng = np.random.default_rng(0)
    changed = {key: case[key].copy() for key in ("q", "k", "v")}
    for array in changed.values():
        array[:, row + 1 :] = 50 * rng.normal(size=array[:, row + 1 :].shape)
    for key in ("index_scores", "pool_scores"):
        if case[key] is not None:
            changed[key] = case[key].copy()
            changed[key][:, :, (row + 1) // case["ratio"] :] = 1e9
    before, after = ([r for r in run(case, **c) if r["row"] == row] for c in ({}, changed))
    assert before == after
    for result in after:
        assert all(0 <= j < result["visible"] for j in result["selected"] + result["oracle"] + (result["pool"] or []))
