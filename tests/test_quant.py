"""Fake quantisation against the goldens, a search over the grid, and the faults it must not hide."""

import golden_cases
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsity_lab.quant import fake_quant, hadamard_transform

FORMATS = ["fp4_ue8m0", "fp4_e4m3", "fp8_ue8m0", "fp8_e4m3_128"]
BLOCK = {"fp4_ue8m0": 32, "fp4_e4m3": 16, "fp8_ue8m0": 32, "fp8_e4m3_128": 128}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize("case", [c for f in FORMATS[:3] for c in golden_cases.cases(f)], ids=lambda c: c["name"])
def test_golden(case):
    t = golden_cases.tensors(case)
    y = fake_quant(t["x"], case["family"])
    assert y.dtype == t["x"].dtype
    assert torch.equal(y, t["y"])


def nearest_even(value: float, grid: list[float]) -> float:
    """Search the whole grid in float64; among equally near codes the even one."""
    distances = [abs(abs(value) - g) for g in grid]
    best = min(range(len(grid)), key=lambda i: (distances[i], i % 2))
    return grid[best] if value >= 0 else -grid[best]


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32), st.integers(-30, 30))
@settings(max_examples=60, deadline=None)
def test_fp4_ue8m0_against_a_grid_search(values, exponent):
    x = torch.tensor(values) * 2.0**exponent
    amax = max(x.abs().max().item(), 6 * 2.0**-126)
    scale = 2.0**-140
    while scale * 6 < amax:  # smallest power of two that reaches amax
        scale *= 2
    scale = max(scale, 2.0**-126)
    want = torch.tensor([nearest_even(v / scale, E2M1) * scale for v in x.tolist()])
    assert torch.equal(fake_quant(x, "fp4_ue8m0"), want)


def test_fp8_128_scale_is_plain_float32():
    x = torch.randn(3, 256) * 5
    blocks = x.view(3, 2, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / 448
    want = ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).view(3, 256)
    y = fake_quant(x, "fp8_e4m3_128")
    torch.testing.assert_close(y, want, rtol=1e-6, atol=0)
    amax = x.abs().max()
    assert y.abs().max() == pytest.approx(amax.item(), rel=1e-6), "the largest value is representable"
    assert torch.equal(fake_quant(torch.zeros(1, 128), "fp8_e4m3_128"), torch.zeros(1, 128))
    tiny = torch.full((1, 128), 1e-6)  # below the floor of 1e-4: the scale stays at 1e-4/448
    step = 1e-4 / 448
    torch.testing.assert_close(fake_quant(tiny, "fp8_e4m3_128"), torch.full((1, 128), 4.5 * step), rtol=1e-2, atol=0)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_idempotent_shape_dtype_and_blocks(fmt, dtype):
    x = (torch.randn(2, 3, 256) * 3).to(dtype)
    before = x.clone()
    y = fake_quant(x, fmt)
    assert (y.dtype, y.shape) == (dtype, x.shape)
    assert torch.equal(x, before)
    if fmt != "fp8_e4m3_128":  # its scale is not representable in bfloat16
        assert torch.equal(fake_quant(y, fmt), y)
    block = BLOCK[fmt]
    alone = torch.cat([fake_quant(b, fmt) for b in x.split(block, dim=-1)], dim=-1)
    assert torch.equal(y, alone), "blocks do not influence each other"
    assert torch.equal(fake_quant(x.transpose(0, 1), fmt), y.transpose(0, 1)), "strided input"


def test_none_is_the_identity():
    x = torch.randn(3, 7)
    assert fake_quant(x, "none") is x


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_poison_their_block_only(fmt, bad):
    """A block without a finite scale must not turn into zeros unseen."""
    x = torch.randn(1, 256)
    x[0, 1] = bad
    y = fake_quant(x, fmt)
    assert y[0, : BLOCK[fmt]].isnan().all()
    assert y[0, BLOCK[fmt] :].isfinite().all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_gradients_pass_straight_through(fmt):
    x = torch.randn(2, 128, requires_grad=True)
    weight = torch.randn(2, 128)
    (fake_quant(x, fmt) * weight).sum().backward()
    assert torch.equal(x.grad, weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("fmt", FORMATS)
def test_cuda_gives_the_same_bits(fmt):
    x = torch.randn(64, 256) * torch.logspace(-30, 30, 64).unsqueeze(-1)
    assert torch.equal(fake_quant(x.cuda(), fmt).cpu(), fake_quant(x, fmt))


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"channels=48: must be a multiple of 32, .*fp4_ue8m0"):
        fake_quant(torch.randn(2, 48), "fp4_ue8m0")
    with pytest.raises(ValueError, match="quant='int4'"):
        fake_quant(torch.randn(2, 32), "int4")
    with pytest.raises(ValueError, match="hadamard width=24"):
        hadamard_transform(torch.randn(2, 24))


@pytest.mark.parametrize("width", [1, 2, 8, 128])
def test_hadamard_is_the_sylvester_matrix(width):
    matrix = np.ones((1, 1))
    while matrix.shape[0] < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = torch.randn(2, 3, width)
    want = x @ torch.from_numpy(matrix / np.sqrt(width)).float()
    torch.testing.assert_close(hadamard_transform(x), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(hadamard_transform(hadamard_transform(x)), x, rtol=0, atol=1e-5)
    assert hadamard_transform(x.bfloat16()).dtype == torch.bfloat16


def test_one_outlier_channel_wrecks_its_block_and_rotation_spreads_it():
    """A channel × 100 without rotation flushes its 31 neighbours to zero, and only them (FACTS §4.6)."""
    torch.manual_seed(0)
    k = torch.randn(64, 128)
    spoilt = k.clone()
    spoilt[:, 5] = 100
    neighbours = torch.arange(32) != 5
    plain = fake_quant(spoilt, "fp4_ue8m0")
    assert (plain[:, :32][:, neighbours] == 0).all()
    assert torch.equal(plain[:, 32:], fake_quant(k, "fp4_ue8m0")[:, 32:])
    rotated = fake_quant(hadamard_transform(spoilt), "fp4_ue8m0")
    assert (rotated == 0).float().mean() < 0.05
    back = hadamard_transform(rotated)[:, :32][:, neighbours]
    correlation = torch.corrcoef(torch.stack([back.flatten(), spoilt[:, :32][:, neighbours].flatten()]))[0, 1]
    assert correlation > 0.5, "the neighbours survive"
