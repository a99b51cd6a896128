"""Triton kernels against their plain references: in Triton's interpreter here, on the card where there is one."""

import types

import pytest
import torch

pytest.importorskip("triton")

from sparsity_lab import kernels, metrics
from sparsity_lab.dense import RowTile
from sparsity_lab.indexer import index_scores as plain_scores
from sparsity_lab.kernels import dense_mass, index_scores, order_sums, select, truth_masses
from sparsity_lab.kernels import pools as pool_kernel
from sparsity_lab.quant import fake_quant
from sparsity_lab.scorers import Random
from sparsity_lab.selecting import restrict
from sparsity_lab.selection import NEG_INF, block_scores, order_positions, rank_blocks

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU  # the interpreter knows no bfloat16 products
SMALL = {
    "mass": None if ON_GPU else dense_mass.Config(32, 32),
    "scores": None if ON_GPU else index_scores.Config(16, 32),
}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter tells of the overflows we expect


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Other inputs every run, told when a test fails; short walks, so that small inputs take several."""
    seed = int(torch.seed() % 2**31)
    torch.manual_seed(seed)
    print(f"seed {seed}")
    if not ON_GPU:
        monkeypatch.setattr(select, "STEP", 32)
        monkeypatch.setattr(order_sums, "STEP", 32)
        monkeypatch.setattr(truth_masses, "STEP", 32)
        monkeypatch.setattr(pool_kernel, "STEP", 32)


@pytest.fixture
def poisoned(monkeypatch):
    """What is allocated holds NaN, or the largest number, until a kernel writes it."""
    empty = torch.empty

    def filled(*size, **options):
        out = empty(*size, **options)
        return out.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).max)

    monkeypatch.setattr(torch, "empty", filled)


def tokens_of(length: int) -> int:
    return length * 8 + 3 if ON_GPU else length


CASES = {  # heads, key heads, d, rows, tokens, share, ratio, soft-cap, sink, window
    "plain": (4, 2, 16, 20, 50, "layer", 1, None, False, None),
    "groups of three, odd width": (6, 2, 20, 33, 77, "kv_head", 3, None, True, None),
    "each head": (4, 1, 32, 40, 97, "head", 4, 5.0, True, 40),
    "window alone": (2, 2, 16, 9, 65, "layer", 5, None, False, 17),
    "one token": (2, 1, 16, 1, 1, "layer", 1, None, True, None),
    "a ratio beyond the tokens": (2, 1, 16, 3, 7, "layer", 8, None, False, None),
    "the tile's width": (2, 1, 16, 10, 70, "layer", 32, 2.0, False, None),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_dense_mass(case, dtype, poisoned):
    heads, key_heads, d, rows, tokens, share, ratio, softcap, sink, window = CASES[case]
    tokens = tokens if tokens < 10 else tokens_of(tokens)
    positions = torch.randperm(tokens, device=DEVICE)[:rows].sort().values
    q = (torch.randn(heads, rows, d, device=DEVICE) * 3).to(dtype)
    k = torch.randn(key_heads, tokens, d, device=DEVICE).to(dtype)
    options = {"share": share, "ratio": ratio, "softcap": softcap, "window": window}
    options["sink"] = torch.randn(heads, device=DEVICE) if sink else None
    found = dense_mass.dense_mass(q, k, positions, d**-0.5, config=SMALL["mass"], **options)
    wanted = dense_mass.reference(q, k, positions, d**-0.5, **options)
    assert found.shape == wanted.shape
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4 if ON_GPU else 1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("share", ["layer", "kv_head", "head"])
@pytest.mark.parametrize(
    ("heads", "key_heads", "d", "ratio"), [(32, 8, 128, 1), (9, 3, 64, 3), (8, 8, 64, 4), (16, 1, 128, 128)]
)
def test_the_kernel_for_hopper(heads, key_heads, d, ratio, share, poisoned):
    positions = torch.randperm(1003, device=DEVICE)[:300].sort().values
    q = (torch.randn(heads, 300, d, device=DEVICE) * 2).bfloat16()
    k = torch.randn(key_heads, 1003, d, device=DEVICE).bfloat16()
    sink = torch.randn(heads, device=DEVICE)
    options = {"share": share, "ratio": ratio, "sink": sink}
    found = dense_mass.dense_mass(q, k, positions, d**-0.5, **options)
    wanted = dense_mass.reference(q, k, positions, d**-0.5, **options)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-8)
    plain = dense_mass.dense_mass(q, k, positions, d**-0.5, config=dense_mass.Config(), **options)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-9)


def test_all_rows_equal_any_of_them():
    q, k = torch.randn(4, 70, 16, device=DEVICE), torch.randn(2, 70, 16, device=DEVICE)
    rows = torch.tensor([0, 3, 33, 69], device=DEVICE)
    everything = dense_mass.dense_mass(q, k, torch.arange(70, device=DEVICE), 0.25, config=SMALL["mass"])
    some = dense_mass.dense_mass(q[:, rows], k, rows, 0.25, config=SMALL["mass"])
    torch.testing.assert_close(some, everything[:, rows], rtol=1e-5, atol=1e-7)


def test_dense_mass_says_what_is_wrong():
    q, k, rows = torch.randn(3, 4, 16), torch.randn(2, 4, 16), torch.arange(4)
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2"):
        dense_mass.dense_mass(q, k, rows, 1.0)
    with pytest.raises(ValueError, match=r"share='group'.*layer, kv_head, head"):
        dense_mass.dense_mass(q, k[:1], rows, 1.0, share="group")
    with pytest.raises(ValueError, match=r"ratio=200.*width 64"):
        dense_mass.dense_mass(q, k[:1], rows, 1.0, ratio=200)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "heads", "d", "n", "block", "relu"),
    [(30, 3, 24, 100, 8, True), (17, 2, 16, 65, 4, False), (1, 1, 16, 1, 1, True)],
)
def test_index_scores(rows, heads, d, n, block, relu, dtype, poisoned):
    n = n if n < 10 else tokens_of(n)
    q, k = torch.randn(heads, rows, d, device=DEVICE).to(dtype), torch.randn(n, d, device=DEVICE).to(dtype)
    w, visible = torch.randn(heads, rows, device=DEVICE), torch.randint(0, n + 1, (rows,), device=DEVICE)
    found = index_scores.index_scores(q, k, w, visible, relu=relu, block_size=block, config=SMALL["scores"])
    wanted = plain_scores(q.cpu().movedim(0, 1)[None], k.cpu()[None], w.cpu().T[None], relu)[0].to(DEVICE)
    wanted = wanted.masked_fill(torch.arange(n, device=DEVICE) >= visible[:, None], NEG_INF)
    torch.testing.assert_close(found.scores, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.blocks, block_scores(wanted, block), rtol=1e-4, atol=1e-4)
    alone = index_scores.index_scores(
        q, k, w, visible, relu=relu, block_size=block, scores=False, config=SMALL["scores"]
    )
    assert alone.scores is None
    assert torch.equal(alone.blocks, found.blocks)


@pytest.mark.parametrize("quant", ["fp4_ue8m0", "fp4_e4m3", "fp8_ue8m0"])
def test_what_is_stored_in_few_bits_loses_nothing_in_sixteen(quant, poisoned):
    rows, heads, d, n = 9, 3, 32, tokens_of(50)
    q, k = (fake_quant(torch.randn(*size, device=DEVICE), quant) for size in ((heads, rows, d), (n, d)))
    w, visible = torch.randn(heads, rows, device=DEVICE), torch.full((rows,), n, device=DEVICE)
    short_q, short_k = (x.to(DTYPES[-1]) for x in (q, k))
    assert torch.equal(short_q.float(), q)
    assert torch.equal(short_k.float(), k)
    found = index_scores.index_scores(short_q, short_k, w, visible, config=SMALL["scores"]).scores
    wanted = plain_scores(q.cpu().movedim(0, 1)[None], k.cpu()[None], w.cpu().T[None], True)[0].to(DEVICE)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_index_scores_refuses_a_block_that_does_not_fit():
    with pytest.raises(ValueError, match=r"block_size=3.*width 128"):
        index_scores.index_scores(
            torch.randn(1, 2, 16).half(),
            torch.randn(4, 16).half(),
            torch.randn(1, 2),
            torch.ones(2).long(),
            block_size=3,
        )


def tied_scores(*shape: int) -> torch.Tensor:
    """Few values, so most are tied; a row that sees nothing, one that sees a little; -0 beside +0."""
    scores = torch.randint(-3, 17, shape, device=DEVICE).float()
    scores[0, 0], scores[-1, -1, 20:] = NEG_INF, NEG_INF
    scores[0, 1, ::3] *= -0.0
    return scores


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("k", [1, 40, 150])
def test_top_positions_are_those_of_the_order(k, at_once, poisoned, monkeypatch):
    monkeypatch.setattr(select, "IN_REGISTERS", 150 if at_once else 0)
    scores = tied_scores(2, 7, 150)
    scores[1, 2] *= 1e30  # far beyond the others, either sign
    wanted = order_positions(scores.cpu(), k).to(DEVICE)
    ascending = torch.where(wanted < 0, 10**9, wanted).sort(-1).values
    assert torch.equal(select.top_positions(scores, k), torch.where(ascending == 10**9, -1, ascending))


def test_all_of_a_row_can_be_the_best_of_it():
    scores = torch.tensor([[1.0, NEG_INF, 0.0, -2.0], [NEG_INF] * 4, [3.0, 3.0, 3.0, 3.0]], device=DEVICE)
    assert select.top_positions(scores, 4).tolist() == [[0, 2, 3, -1], [-1] * 4, [0, 1, 2, 3]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pools", [[5], [1, 5, 30], [3, 1, 2, 19, 7, 4]])
def test_restrict_keeps_what_the_walk_keeps(pools, dtype, poisoned):
    scores = tied_scores(2, 7, 150)
    order = order_positions(scores)
    ranks = rank_blocks(scores, torch.full((2, 7), 150, device=DEVICE), 8)
    wanted = restrict(order.cpu(), ranks.cpu(), 8, pools, 60)
    found = select.restrict(order.to(dtype), ranks, 8, pools, 60)
    assert found.dtype == dtype
    assert torch.equal(found.cpu().long(), torch.stack(wanted))


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("budgets", [[1, 7, 33, 64], [5], [10, 70, 100]])
def test_order_sums(budgets, apart, poisoned):
    mass = torch.randint(0, 2**20, (2, 5, 91), device=DEVICE).double() / 2**20
    mass[..., -1] = 0
    order = order_positions(torch.randn(3, 2, 5, 90, device=DEVICE))[..., :70]
    order[1, :, :, 50:] = -1
    best = order_positions(mass[..., :-1].float(), 60)
    best[0, 3, 20:] = -1
    edge = None if apart else torch.rand(2, 5, device=DEVICE).mul(1000).floor().double() / 1024
    true = types.SimpleNamespace(
        mass=mass, edge=edge, rank=metrics.ranks_of(best, 91), raw_start=torch.randint(0, 180, (5,), device=DEVICE)
    )
    found = order_sums.order_sums(order.int(), order_sums.packed(mass, best), edge, true.raw_start, 2, budgets)
    on_cpu = types.SimpleNamespace(**{k: v.cpu() if v is not None else v for k, v in vars(true).items()}, places=None)
    assert torch.equal(found.cpu(), torch.stack(list(metrics._sums_of(order.cpu(), 2, on_cpu, budgets))))


def test_masses_and_places_share_a_number():
    mass = torch.tensor([[0.0, 1 + 2.0**-20, 2.0**-48, 0.0]], device=DEVICE, dtype=torch.float64)
    found = order_sums.packed(mass, torch.tensor([[1, 2, -1]], device=DEVICE))
    assert torch.equal((found >> order_sums.RANK_BITS).double() * 2.0**-48, mass)
    assert (found & 0x3FFF).tolist() == [[0x3FFF, 0, 1, 0x3FFF]]
    assert order_sums.packed(mass, torch.full((1, 1 << 14), -1, device=DEVICE)) is None


@pytest.mark.parametrize("pools", [[4], [1, 6, 30]])
def test_what_pools_hold(pools, poisoned):
    scores = tied_scores(2, 7, 150)
    mass = torch.randint(0, 2**20, (2, 7, 151), device=DEVICE).double() / 2**20
    ranks = rank_blocks(scores, torch.full((2, 7), 150, device=DEVICE), 8)
    order = order_positions(tied_scores(2, 7, 150), 60)
    parts = {"visible": None, "best": None, "raw_start": None, "raw_mass": None, "edge": None, "places": None}
    true = metrics.Truth(order=order.cpu(), mass=mass.cpu(), total=mass.sum(-1), **parts)
    wanted = metrics.pools_of(ranks.cpu(), pools, 8, true, [1, 5, 33, 80])
    blocks = true.block_mass(8).to(DEVICE)
    held, own = pool_kernel.pools_of(ranks, pools, order, 8, blocks, [1, 5, 33, 80])
    assert torch.equal(held.cpu(), wanted.oracle_hits)
    assert torch.equal(own.cpu(), wanted.mass)


@pytest.mark.parametrize("window", [0, 9, 70])
@pytest.mark.parametrize("ratio", [1, 3])
def test_truth_masses(ratio, window, poisoned):
    rows = torch.tensor([0, 1, 4, 33, 69], device=DEVICE)
    mean = torch.rand(2, 5, 70, device=DEVICE).masked_fill(torch.arange(70, device=DEVICE) > rows[:, None], 0.0) / 7
    visible, start = (rows + 1) // ratio, metrics.raw_start(rows, ratio, window)
    acts = types.SimpleNamespace(compressed=None, q=torch.empty(0), k=torch.empty(1, 1, 70, 0))
    tile = RowTile(acts, rows.cpu(), "", 0)
    tile._cache["mean", "layer"] = mean.cpu()
    order = metrics.oracle_order(tile, "layer", ratio, 12)
    found = truth_masses.truth_masses(mean, rows, visible, start, order.to(DEVICE), ratio)._asdict()
    wanted = metrics._masses(tile, "layer", ratio, order, start.cpu())
    wanted["places"] = order_sums.packed(wanted["mass"], order)
    for name, plain in wanted.items():
        assert torch.equal(found[name].cpu(), plain), name


def test_random_scores_are_the_same_everywhere():
    tile = types.SimpleNamespace(length=100, rows=torch.arange(4), document="0123456789abcdef", seed=3)
    tile.acts = types.SimpleNamespace(layer=2)
    wanted = Random().scores(tile, 2, "layer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "usable", lambda where: True)
        tile.rows = tile.rows.to(DEVICE)
        assert torch.equal(Random().scores(tile, 2, "layer").cpu(), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_million_tokens():
    """Offsets beyond 2**31: 4,096 rows x 1,048,576 tokens."""
    tokens, rows = 1 << 20, 1 << 12
    q = torch.randn(2, rows, 16, device=DEVICE, dtype=torch.bfloat16)
    k = torch.randn(1, tokens, 16, device=DEVICE, dtype=torch.bfloat16)
    positions = torch.arange(tokens - rows, tokens, device=DEVICE)
    found = dense_mass.dense_mass(q, k, positions, 0.25)
    few = torch.tensor([0, 1, rows - 1], device=DEVICE)
    torch.testing.assert_close(
        found[:, few].double(), dense_mass.reference(q[:, few], k, positions[few], 0.25), rtol=1e-4, atol=1e-12
    )
    w = torch.randn(2, rows, device=DEVICE)
    scores = index_scores.index_scores(q, k[0], w, positions + 1).scores
    wanted = plain_scores(q[:, -1:].cpu().float().movedim(0, 1)[None], k.cpu().float(), w[:, -1:].cpu().T[None])[0]
    torch.testing.assert_close(scores[-1:].cpu(), wanted, rtol=1e-4, atol=1e-4)
