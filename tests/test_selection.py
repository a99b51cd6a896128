"""Selection against loops over one row, the goldens, and the properties no selection may break."""

import math

import golden_cases
import naive_selection as naive
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsity_lab.selection import (
    adjust_scores,
    block_scores,
    order_positions,
    rank_blocks,
    select_candidate_blocks,
    select_topk,
    visible_lengths,
)

INF = math.inf
quick = settings(max_examples=60, deadline=None)
# few distinct values, so that ties are the rule; -0.0 must tie with 0.0
values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 1e-30, -3e38, 0.1])


@st.composite
def problems(draw):
    """(scores [s, n], start, ratio): the causal scores of a chunk of queries starting anywhere."""
    ratio, start, s = draw(st.integers(1, 4)), draw(st.integers(0, 12)), draw(st.integers(1, 8))
    n = (start + s) // ratio
    rows = draw(st.lists(st.lists(values, min_size=n, max_size=n), min_size=s, max_size=s))
    return torch.tensor(rows, dtype=torch.float32).view(s, n), start, ratio


def causal(problem):
    scores, start, ratio = problem
    positions = torch.arange(start, start + scores.shape[0])
    return adjust_scores(scores, positions, ratio), visible_lengths(positions, ratio)


def as_set(row: torch.Tensor) -> set[int]:
    """The selected positions; checks the form: ascending, no duplicates, -1 only at the end."""
    picked = [j for j in row.tolist() if j >= 0]
    assert row.tolist() == sorted(set(picked)) + [-1] * (len(row) - len(picked))
    return set(picked)


# --- goldens ---


@pytest.mark.parametrize("case", golden_cases.cases("candidate_blocks"), ids=lambda c: c["name"])
def test_golden_candidate_blocks(case):
    t, p = golden_cases.tensors(case), case["params"]
    lens = p.get("compress_lens", t.get("compress_lens"))
    mask = select_candidate_blocks(t["logits"], lens, p["topk_blocks"], p["block_size"])
    assert mask.dtype == torch.bool
    if not case["tie"]:
        assert torch.equal(mask, t["mask"])
        return
    size = p["block_size"]
    kept = F.pad(mask, (0, -mask.shape[-1] % size)).unflatten(-1, (-1, size)).any(-1)
    scores = t["block_scores"]
    scores = scores.masked_fill(torch.arange(scores.shape[-1]) == (torch.as_tensor(lens) - 1) // size, INF)
    want = t["kept_scores_sorted"]
    got = scores.masked_fill(~kept, -INF).sort(-1, descending=True).values[..., : want.shape[-1]]
    assert torch.equal(got, want)
    assert torch.equal(kept.sum(-1), (want > -INF).sum(-1))


def test_published_picks_outside_the_pool_and_ours():
    """The deliberate deviation (DESIGN §2): the published top-k fills up with -inf picks, ours leaves -1."""
    case = next(c for c in golden_cases.cases("indexer") if c["name"] == "r1_cand_few")
    t = golden_cases.tensors(case)
    call = next(c for c in case["calls"] if c["inf_picks_returned"])
    name = call["call"]
    pool, scores, published = t["t0.L0.candidates"], t[f"{name}.scores"], t[f"{name}.idxs"]
    topk = case["params"]["args"]["index_topk"]
    outside = (published >= 0) & ~pool.gather(-1, published.clamp(min=0).long())
    assert outside.sum() == call["inf_picks_returned"] > 0, "the published selection leaves the pool"
    ours = select_topk(scores, topk, pool=pool)
    assert not ((ours >= 0) & ~pool.gather(-1, ours.clamp(min=0).long())).any()
    assert torch.equal(golden_cases.as_mask(ours, 0, call["width"]), t[f"{name}.selected"])
    inside = [[j for j in row if j >= 0 and pool[0, s, j]] for s, row in enumerate(published[0].tolist())]
    assert [sorted(as_set(row)) for row in ours[0]] == inside, "the other picks are the same"


# --- properties, each against the loops ---


@given(st.integers(0, 200), st.integers(1, 9))
@quick
def test_visible_lengths(position, ratio):
    assert visible_lengths(torch.tensor(position), ratio) == naive.visible(position, ratio)


@given(problems())
@quick
def test_order_is_falling_with_ties_to_the_lowest(problem):
    scores, lengths = causal(problem)
    for row, length, order in zip(scores.tolist(), lengths.tolist(), order_positions(scores).tolist(), strict=True):
        want = naive.order(row, set(range(length)))
        assert order == want + [-1] * (len(row) - len(want))


@given(problems(), st.integers(1, 12))
@quick
def test_limited_order_is_a_prefix(problem, limit):
    scores, _ = causal(problem)
    assert torch.equal(order_positions(scores, limit), order_positions(scores)[:, :limit])


@given(problems(), st.integers(1, 12), st.integers(1, 4), st.integers(1, 5))
@quick
def test_topk_and_pool_against_loops(problem, k, topk_blocks, size):
    """Never unreachable, never out of the pool, never fewer than there are."""
    scores, lengths = causal(problem)
    pool = select_candidate_blocks(scores, lengths.unsqueeze(-1), topk_blocks, size)
    picks, free = select_topk(scores, k, pool=pool), select_topk(scores, k)
    assert picks.dtype == torch.int32
    assert picks.shape == (scores.shape[0], min(k, scores.shape[1]))
    for s, length in enumerate(lengths.tolist()):
        row = scores[s].tolist()
        want_pool = naive.pool(row, length, topk_blocks, size)
        assert set(pool[s].nonzero().flatten().tolist()) == want_pool
        assert as_set(picks[s]) == naive.topk(row, length, k, want_pool)
        assert as_set(picks[s]) <= want_pool & set(range(length))
        assert as_set(free[s]) == naive.topk(row, length, k)
        assert len(as_set(free[s])) == min(k, length)


@given(problems(), st.integers(1, 12), st.integers(1, 5))
@quick
def test_all_blocks_kept_is_single_level(problem, k, size):
    scores, lengths = causal(problem)
    blocks = max(1, math.ceil(scores.shape[1] / size))
    pool = select_candidate_blocks(scores, lengths.unsqueeze(-1), blocks, size)
    assert torch.equal(select_topk(scores, k, pool=pool), select_topk(scores, k))


@given(problems(), st.integers(0, 5))
@quick
def test_budget_beyond_the_visible_selects_all(problem, extra):
    scores, lengths = causal(problem)
    picks = select_topk(scores, max(1, scores.shape[1]) + extra)
    assert [as_set(row) for row in picks] == [set(range(v)) for v in lengths.tolist()]


@given(problems(), st.integers(1, 6), st.integers(1, 3), st.integers(1, 4), st.data())
@quick
def test_one_chunk_is_many_chunks_is_token_by_token(problem, k, topk_blocks, size, data):
    """A row's selection depends on its own scores only, not on the rows and the width it is computed with."""
    scores, start, ratio = problem
    rows = scores.shape[0]

    def run(first: int, last: int) -> list[set[int]]:
        width = (start + last) // ratio
        part = adjust_scores(scores[first:last, :width], torch.arange(start + first, start + last), ratio)
        lengths = visible_lengths(torch.arange(start + first, start + last), ratio)
        pool = select_candidate_blocks(part, lengths.unsqueeze(-1), topk_blocks, size)
        return [as_set(row) for row in select_topk(part, k, pool=pool)]

    whole = run(0, rows)
    cut = data.draw(st.integers(0, rows))
    assert [s for a, b in ((0, cut), (cut, rows)) if a < b for s in run(a, b)] == whole
    assert [s for i in range(rows) for s in run(i, i + 1)] == whole


@given(problems(), st.integers(1, 8))
@quick
def test_selection_grows_with_k(problem, k):
    scores, _ = causal(problem)
    small, large = select_topk(scores, k), select_topk(scores, k + 1)
    assert all(as_set(a) <= as_set(b) for a, b in zip(small, large, strict=True))


@given(problems(), st.integers(1, 5))
@quick
def test_block_ranks(problem, size):
    scores, lengths = causal(problem)
    blocks, ranks = block_scores(scores, size), rank_blocks(scores, lengths, size)
    assert blocks.shape == ranks.shape == (scores.shape[0], math.ceil(scores.shape[1] / size))
    for s, length in enumerate(lengths.tolist()):
        reachable = [r for r in ranks[s].tolist() if r < 2**31 - 1]
        assert sorted(reachable) == list(range(math.ceil(length / size)))
        if length:
            assert ranks[s, (length - 1) // size] == 0


# --- faults of others, one by one ---


def test_a_huge_future_key_is_never_selected():
    scores = torch.zeros(1, 6, 6)
    scores[..., 5] = 1e30
    masked = adjust_scores(scores, torch.arange(6), 1)
    picks = select_topk(masked, 2)
    assert [5 in as_set(row) for row in picks[0]] == [False] * 5 + [True]
    pool = select_candidate_blocks(masked, torch.arange(1, 7).unsqueeze(-1), 1, 2)
    assert [bool(row[5]) for row in pool[0]] == [False] * 4 + [True] * 2  # row 4 keeps the pinned block [4, 5] whole
    assert 5 not in as_set(select_topk(masked, 6, pool=pool)[0, 4])


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_a_group_is_visible_from_its_last_token_on(ratio):
    scores = torch.zeros(4 * ratio, 4)
    for p, row in enumerate(select_topk(adjust_scores(scores, torch.arange(4 * ratio), ratio), 4)):
        assert as_set(row) == {j for j in range(4) if p >= j * ratio + ratio - 1}


@pytest.mark.parametrize("bad", [float("nan"), -float("nan")])
def test_nan_raises(bad):
    scores = torch.zeros(2, 8)
    scores[1, 3] = bad
    for call in (
        lambda: select_topk(scores, 2),
        lambda: order_positions(scores),
        lambda: select_candidate_blocks(scores, 8, 1, 4),
    ):
        with pytest.raises(ValueError, match="NaN"):
            call()


def test_plus_infinity_is_a_score_and_minus_infinity_is_not():
    scores = torch.tensor([[-INF, INF, 0.0, -INF]])
    assert order_positions(scores).tolist() == [[1, 2, -1, -1]]
    assert select_topk(scores, 3).tolist() == [[1, 2, -1]]
    assert select_topk(torch.full((1, 4), -INF), 3).tolist() == [[-1, -1, -1]]


def test_low_precision_scores_are_refused():
    with pytest.raises(ValueError, match="bfloat16"):
        select_topk(torch.zeros(1, 4, dtype=torch.bfloat16), 2)


@pytest.mark.parametrize("n", [1, 3, 64, 5000])
def test_all_scores_equal_gives_the_lowest_positions_every_time(n):
    scores = torch.zeros(3, n)
    picks = select_topk(scores, 7)
    assert (picks == torch.arange(min(7, n))).all()
    assert torch.equal(picks, select_topk(scores.clone(), 7))


def test_shapes_with_groups_and_batch():
    """Any leading axes: one selection a KV head is [b, g, s, n]."""
    scores = torch.randn(2, 3, 5, 9)
    masked = adjust_scores(scores, torch.arange(4, 9), 1)
    picks = select_topk(masked, 4)
    assert picks.shape == (2, 3, 5, 4)
    assert torch.equal(picks[1, 2], select_topk(masked[1, 2], 4))
    pool = select_candidate_blocks(masked, torch.arange(5, 10).unsqueeze(-1), 2, 2)
    assert torch.equal(pool[1, 2], select_candidate_blocks(masked[1, 2], torch.arange(5, 10).unsqueeze(-1), 2, 2))


def test_nothing_to_select_from():
    empty = torch.zeros(2, 0)
    assert select_topk(empty, 3).shape == (2, 0)
    assert select_candidate_blocks(empty, 0, 2, 4).shape == (2, 0)
    assert order_positions(empty).shape == (2, 0)


def test_exclude_window_and_sinks():
    """Positions whose tokens all lie in the window cost budget and add nothing; sinks are always kept."""
    scores, position, window, ratio = torch.arange(10.0).unsqueeze(0), torch.tensor([19]), 5, 2
    out = adjust_scores(scores, position, ratio, window=window, exclude_window=True)
    inside = {j for j in range(10) if all(19 - window < j * ratio + i <= 19 for i in range(ratio))}
    assert set(torch.nonzero(out[0] == -INF).flatten().tolist()) == inside == {8, 9}
    kept = adjust_scores(scores, position, ratio, window=window, exclude_window=True, sinks=2)
    assert as_set(select_topk(kept, 3)[0]) == {0, 1, 7}
    early = adjust_scores(torch.zeros(1, 10), torch.tensor([1]), ratio, sinks=4)
    assert as_set(select_topk(early, 5)[0]) == {0}, "a sink that is not visible yet stays out"


def test_offset_is_added_to_picks_only():
    picks = select_topk(torch.tensor([[1.0, -INF, 2.0]]), 3, offset=128)
    assert picks.tolist() == [[128, 130, -1]]
    top = 2**31 - 4
    assert select_topk(torch.zeros(1, 3), 3, offset=top).tolist() == [[top, top + 1, top + 2]]


def test_positions_beyond_float_precision_keep_their_order():
    """2^24 + 1 has no float32: positions must never pass through floats."""
    n = 2**24 + 8
    scores = torch.full((1, n), -1.0)
    scores[0, -3:] = 1.0
    assert select_topk(scores, 3).tolist() == [[n - 3, n - 2, n - 1]]


def test_bad_arguments_are_named():
    scores = torch.zeros(1, 4)
    with pytest.raises(ValueError, match="topk=0"):
        select_topk(scores, 0)
    with pytest.raises(ValueError, match="topk_blocks=0"):
        select_candidate_blocks(scores, 4, 0, 2)
    with pytest.raises(ValueError, match="block_size=0"):
        select_candidate_blocks(scores, 4, 1, 0)
