"""The indexer: goldens, every way of cutting a sequence into calls, and both generations' conventions."""

import golden_cases
import naive_selection as naive
import pytest
import torch
from index_stack import DIM, HEADS, LENGTH, RANK, ROPE, STYLES, TABLE, V32, V41, WIDTH, Stack, make, random_inputs

from sparsity_lab.index_state import IndexRole, SharedIndexState
from sparsity_lab.indexer import index_scores
from sparsity_lab.quant import fake_quant, hadamard_transform
from sparsity_lab.rope import rotate_channels
from sparsity_lab.selection import adjust_scores


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny products on several threads mostly wait for each other when the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def inputs():
    return random_inputs()


# --- goldens ---


@pytest.mark.parametrize("case", golden_cases.cases("indexer"), ids=lambda c: c["name"])
def test_golden(case):
    t = golden_cases.tensors(case)
    out = golden_cases.run_indexer(case, t)
    for call in case["calls"]:
        name, scores = call["call"], t[f"{call['call']}.scores"]
        close = {"rtol": 0, "atol": case["tolerance"]["scores"]}
        torch.testing.assert_close(out[f"{name}.scores"], scores, **close)
        if f"{name}.k_cache" in t:
            tolerance = case["tolerance"]["k_cache"]
            torch.testing.assert_close(out[f"{name}.k_cache"], t[f"{name}.k_cache"], rtol=0, atol=tolerance)
        if case["tie"]:  # which of the equal scores is free, their number and values are not
            got, want = out[f"{name}.selected"], t[f"{name}.selected"]
            assert torch.equal(got.sum(-1), want.sum(-1))
            got, want = (scores.masked_fill(~m, float("-inf")).sort(-1).values for m in (got, want))
            torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
            continue
        assert torch.equal(out[f"{name}.selected"], t[f"{name}.selected"])
        assert out[f"{name}.idxs"].dtype == torch.int32
        if not call["inf_picks_returned"]:
            assert torch.equal(out[f"{name}.idxs"], t[f"{name}.idxs"])
        if f"{name}.candidates" in t:
            assert torch.equal(out[f"{name}.candidates"], t[f"{name}.candidates"])


def test_stale_keys_of_the_published_code_are_not_copied():
    """With two owners the published decode scores against another layer's keys (README trap 2); ours must differ."""
    (case,) = golden_cases.cases("indexer", informational=True)
    t = golden_cases.tensors(case)
    out = golden_cases.run_indexer(case, t)
    same = [
        out[f"{n}.scores"].shape == t[f"{n}.scores"].shape and torch.allclose(out[f"{n}.scores"], t[f"{n}.scores"])
        for n in (c["call"] for c in case["calls"])
    ]
    assert not all(same)


# --- the parts ---


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_queries_and_keys_take_the_same_path(style):
    """RoPE layout and place, Hadamard and quantisation reach queries and keys alike (FACTS §4.1, 2, 4)."""
    indexer, qr, latent = make(**style), torch.randn(2, 5, RANK), torch.randn(2, 5, 12)

    def path(x):
        x = rotate_channels(x, TABLE[10:15], ROPE, place=style["rope_place"], layout=style["rope_layout"])
        x = hadamard_transform(x) if style.get("hadamard") else x
        return fake_quant(x, style.get("quant", "fp4_ue8m0"))

    q = (qr @ indexer.wq_b.weight.T).view(2, 5, HEADS, WIDTH)
    torch.testing.assert_close(indexer.queries(qr, TABLE[10:15]), path(q), rtol=0, atol=1e-6)
    k = indexer.k_norm(latent @ indexer.wk.weight.T)
    torch.testing.assert_close(indexer.keys(latent, TABLE[10:15]), path(k), rtol=0, atol=1e-6)


def test_hadamard_leaves_scores_unchanged_only_on_both_sides():
    plain, turned = make(**V41, quant="none"), make(**V41, quant="none", hadamard=True)
    qr, latent, w = torch.randn(1, 6, RANK), torch.randn(1, 9, 12), torch.rand(1, 6, HEADS)
    q, k = (m.queries(qr, TABLE[:6]) for m in (plain, turned)), (m.keys(latent, TABLE[:9]) for m in (plain, turned))
    (q0, q1), (k0, k1) = q, k
    torch.testing.assert_close(index_scores(q0, k0, w), index_scores(q1, k1, w), rtol=1e-4, atol=1e-4)
    assert (index_scores(q1, k0, w) - index_scores(q0, k0, w)).abs().max() > 0.1


def test_sampled_rows_equal_the_rows_of_all():
    indexer, x, qr, rows = make(), torch.randn(1, 20, DIM), torch.randn(1, 20, RANK), torch.tensor([3, 11, 12, 19])
    torch.testing.assert_close(indexer.queries(qr[:, rows], TABLE[rows]), indexer.queries(qr, TABLE[:20])[:, rows])
    torch.testing.assert_close(indexer.head_weights(x[:, rows]), indexer.head_weights(x)[:, rows])


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("tile_elements", [1, 300, 1 << 24])
def test_scores_against_loops(relu, tile_elements):
    q, k, w = torch.randn(2, 5, 3, 8), torch.randn(2, 7, 8), torch.randn(2, 5, 3)
    want = torch.zeros(2, 5, 7, dtype=torch.float64)
    for b, s, j, h in torch.cartesian_prod(*(torch.arange(n) for n in (2, 5, 7, 3))).tolist():
        product = torch.dot(q[b, s, h].double(), k[b, j].double())
        want[b, s, j] += w[b, s, h].double() * (product.clamp(min=0) if relu else product)
    got = index_scores(q, k, w, relu, tile_elements=tile_elements)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want.float(), rtol=0, atol=1e-5)


def test_scores_are_float32_for_bfloat16_and_under_autocast():
    """bfloat16 scores are mostly tied, so that the selection is arbitrary (FACTS §4.5)."""
    torch.manual_seed(0)
    q, k, w = (torch.randn(*s).bfloat16() for s in ((1, 4, 8, 32), (1, 3000, 32), (1, 4, 8)))
    want = index_scores(q.float(), k.float(), w.float())
    got = index_scores(q, k, w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = index_scores(q, k, w)
        assert make().head_weights(torch.randn(1, 2, DIM)).dtype == torch.float32
    assert got.dtype == under_autocast.dtype == torch.float32
    assert torch.equal(got, want)
    assert torch.equal(under_autocast, want)
    distinct = [row.unique().numel() / 3000 for row in got[0]]
    rounded = [row.bfloat16().unique().numel() / 3000 for row in got[0]]
    assert min(distinct) > 0.99 > 0.5 > max(rounded)


def test_head_weights_carry_both_scales_and_may_be_negative():
    indexer, x = make(), torch.randn(2, 3, DIM)
    want = (x @ indexer.weights_proj.weight.T) * WIDTH**-0.5 * HEADS**-0.5
    torch.testing.assert_close(indexer.head_weights(x), want, rtol=1e-5, atol=1e-6)
    assert (want < 0).any()
    assert indexer.bfloat16().head_weights(x.bfloat16()).dtype == torch.float32


def test_parameter_names_are_the_published_ones():
    names = {"wq_b.weight", "weights_proj.weight"}
    assert set(make(owner=False).state_dict()) == names
    assert set(make().state_dict()) == names | {"wk.weight", "k_norm.weight"}
    assert set(make(**V41, key_norm="none").state_dict()) == names | {"wk.weight"}
    assert set(make(**V32).state_dict()) == names | {"wk.weight", "k_norm.weight", "k_norm.bias"}


def test_v32_is_a_configuration():
    """128-wide heads, fp8 with 128-wide scales, ratio 1 on the attention input itself."""
    indexer = make(width=128, latent=DIM, **V32, quant="fp8_e4m3_128")
    x, qr, state = torch.randn(1, 12, DIM), torch.randn(1, 12, RANK), SharedIndexState()
    picks = indexer(x, qr, x, 0, TABLE, state, IndexRole(0, 0, 1, 4))
    assert [len(set(r.tolist()) - {-1}) for r in picks[0]] == [min(4, p + 1) for p in range(12)]


# --- whole calls ---


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_selection_against_loops(ratio, inputs):
    """From the scores on, all by hand: visibility, pool of the source, picks of source and consumer."""
    x, qr = inputs
    stack = Stack(ratio, V41)
    got, state = stack.run(x, qr)
    keys, n = state.keys[0].view(), LENGTH // ratio
    for layer in (0, 1, 2):
        indexer = stack.layers[layer]
        scores = index_scores(indexer.queries(qr, TABLE[:LENGTH]), keys, indexer.head_weights(x))
        if layer == 1:
            source_scores = scores
        for b in range(2):
            for p in range(LENGTH):
                v, row = naive.visible(p, ratio), scores[b, p].tolist()
                pool = naive.pool(source_scores[b, p].tolist()[:v], v, 2, 2) if layer == 2 else None
                picked = set(got[layer, b, p].nonzero().flatten().tolist())
                assert picked == naive.topk(row, v, 3, pool), (layer, b, p)
    assert keys.shape == (2, n, WIDTH)


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_every_split_point_token_by_token_and_odd_chunks(ratio, style, inputs):
    """Selections must not depend on how the sequence was cut into calls (FACTS §4.9, 10, 11)."""
    x, qr = inputs
    stack = Stack(ratio, style)
    whole, whole_state = stack.run(x, qr)
    for cuts in [[c] for c in range(1, LENGTH)] + [list(range(1, LENGTH)), [1, 8, 9, 20], [3, 6]]:
        parts, state = stack.run(x, qr, cuts, offset=5)
        assert torch.equal(parts, whole), cuts
        for owner in (0, 3):
            torch.testing.assert_close(state.keys[owner].view(), whole_state.keys[owner].view(), rtol=0, atol=1e-5)


def test_the_second_chunk_finds_a_needle_in_the_first():
    indexer = make(**V41, quant="none")
    x, qr, latent = torch.randn(1, 20, DIM), torch.randn(1, 20, RANK), torch.randn(1, 20, 12)
    role, state = IndexRole(0, 0, 1, 1), SharedIndexState()
    scores = index_scores(indexer.queries(qr, TABLE[:20]), indexer.keys(latent, TABLE[:20]), indexer.head_weights(x))
    indexer(x[:, :10], qr[:, :10], latent[:, :10], 0, TABLE, state, role)
    picks = indexer(x[:, 10:], qr[:, 10:], latent[:, 10:], 10, TABLE, state, role)
    best = [scores[0, p, : p + 1].argmax().item() for p in range(10, 20)]
    assert picks[0, :, 0].tolist() == best
    assert min(best) < 10


def test_no_causal_leak_from_a_huge_future_key(inputs):
    x, qr = inputs
    stack = Stack(2, {**V41, "quant": "none"})
    before, _ = stack.run(x, qr)
    changed = x.clone()
    changed[:, 20:] *= 1e4
    after, _ = stack.run(changed, qr)
    assert torch.equal(after[:, :, :20], before[:, :, :20])
    j = torch.arange(LENGTH)
    for layer, role in enumerate(stack.roles):
        reachable = j < ((torch.arange(LENGTH) + 1) // role.ratio).unsqueeze(-1)
        assert not (after[layer] & ~reachable).any()


def test_nothing_visible_yet_gives_an_empty_selection():
    """A prefill shorter than the ratio (README trap 4), for owner, source, consumer; then it fills."""
    stack = Stack(4, V41)
    x, qr = torch.randn(2, 3, DIM), torch.randn(2, 3, RANK)
    state = SharedIndexState()
    for role, layer in zip(stack.roles[:3], stack.layers[:3], strict=True):
        picks = layer(x, qr, None, 0, TABLE, state, role)
        assert (tuple(picks.shape), picks.dtype) == ((2, 3, 0), torch.int32)
        assert torch.equal(state.latest_topk(0, 3), picks)
    assert state.pool.mask().shape == (2, 3, 0)


def test_tie_goes_to_the_lowest_position_and_zero_scores_are_ties():
    indexer = make()
    torch.nn.init.zeros_(indexer.wq_b.weight)  # relu(0) = 0 everywhere
    x, qr, latent = torch.randn(1, 9, DIM), torch.randn(1, 9, RANK), torch.randn(1, 9, 12)
    picks = indexer(x, qr, latent, 0, TABLE, SharedIndexState(), IndexRole(0, 0, 1, 3))
    assert picks[0, 8].tolist() == [0, 1, 2]


def test_small_tiles_change_nothing(inputs, monkeypatch):
    """Memory is bounded by tiles of rows; pool and picks are the same."""
    whole, state = Stack(2, V41).run(*inputs)
    monkeypatch.setattr("sparsity_lab.indexer.TILE_ELEMENTS", 100)
    tiled, tiled_state = Stack(2, V41).run(*inputs)
    assert torch.equal(whole, tiled)
    assert torch.equal(state.pool.blocks, tiled_state.pool.blocks)


def test_nan_raises():
    indexer, x, qr = make(), torch.randn(1, 6, DIM), torch.randn(1, 6, RANK)
    latent = torch.randn(1, 6, 12)
    latent[0, 2, 3] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        indexer(x, qr, latent, 0, TABLE, SharedIndexState(), IndexRole(0, 0, 1, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_selects_what_the_cpu_selects(inputs):
    x, qr = inputs
    stack = Stack(2, V41)
    role, latent = stack.roles[0], stack.compressors[0](x).detach()
    want = stack.layers[0](x, qr, latent, 0, TABLE, SharedIndexState(), role)
    args = (x.cuda(), qr.cuda(), latent.cuda(), 0, TABLE.cuda(), SharedIndexState(), role)
    assert torch.equal(stack.layers[0].cuda()(*args).cpu(), want)


def test_unreachable_positions_never_come_back_from_adjusted_scores():
    """Masked with -inf, not with a small number: a negative real score must not lose to a masked one (FACTS §4.27)."""
    scores = adjust_scores(torch.full((1, 4), -1e30), torch.tensor([1]), 1)
    assert scores.tolist() == [[pytest.approx(-1e30)] * 2 + [float("-inf")] * 2]
