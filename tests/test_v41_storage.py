"""fp8 and fp4 storage: packing, nibble order, scales, partial blocks, against loops and against fake quantisation."""

import naive_v41
import numpy as np
import pytest
import torch

from sparsity_lab.models.deepseek_v41.storage import dequantise, quantise_fp4, quantise_fp8, unpack_fp4
from sparsity_lab.quant import fake_quant


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(rows, columns) * torch.logspace(-3, 2, rows).unsqueeze(1)


def test_first_value_of_a_byte_is_the_low_half():
    packed = torch.tensor([[0x21, 0xF7, 0x80]], dtype=torch.uint8)
    assert unpack_fp4(packed).tolist() == [[0.5, 1.0, 6.0, -6.0, 0.0, 0.0]]
    assert torch.equal(unpack_fp4(packed.view(torch.int8)), unpack_fp4(packed))
    row = torch.zeros(1, 32)
    row[0, :3] = torch.tensor([6.0, 0.5, -3.0])
    packed, scale = quantise_fp4(row)
    assert scale.float().tolist() == [[1.0]]
    assert packed.view(torch.uint8)[0, :2].tolist() == [0x17, 0x0D]


def test_all_codes_survive_unpacking():
    packed = torch.arange(256, dtype=torch.uint8).view(8, 32)
    np.testing.assert_array_equal(unpack_fp4(packed).double().numpy(), naive_v41.fp4_values(packed))


@pytest.mark.parametrize("shape", [(1, 32), (5, 64), (40, 160)])
def test_fp4_against_fake_quantisation(shape):
    w = weight(*shape)
    packed, scale = quantise_fp4(w)
    assert packed.shape == (shape[0], shape[1] // 2)
    assert packed.dtype == torch.int8
    assert scale.shape == (shape[0], shape[1] // 32)
    assert scale.dtype == torch.float8_e8m0fnu
    assert torch.equal(dequantise(packed, scale), fake_quant(w, "fp4_ue8m0"))
    assert torch.equal(dequantise(packed.view(torch.uint8), scale), dequantise(packed, scale))


@pytest.mark.parametrize("shape", [(3, 32), (5, 96)])
def test_fp8_rows_against_fake_quantisation(shape):
    w = weight(*shape)
    w[0] *= 1e-4  # below the floor of the scale
    values, scale = quantise_fp8(w, rows=1)
    assert scale.shape == (shape[0], shape[1] // 32)
    assert torch.equal(dequantise(values, scale), fake_quant(w, "fp8_ue8m0"))


@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (40, 50), (1, 1), (31, 33), (33, 64)])
def test_fp8_blocks_against_a_loop(shape):
    w = weight(*shape)
    values, scale = quantise_fp8(w)
    assert values.shape == shape
    assert values.dtype == torch.float8_e4m3fn
    assert list(scale.shape) == [-(-size // 32) for size in shape]
    got = dequantise(values, scale)
    for top in range(0, shape[0], 32):
        for left in range(0, shape[1], 32):
            block = w[top : top + 32, left : left + 32]
            factor = naive_v41.block_scale(block, 448.0, 1e-4)
            assert float(scale[top // 32, left // 32].float()) == factor
            want = (block / factor).to(torch.float8_e4m3fn).float() * factor
            assert torch.equal(got[top : top + 32, left : left + 32], want)


def test_zeros_and_tiny_values_have_a_scale():
    for quantise in (quantise_fp8, quantise_fp4):
        values, scale = quantise(torch.zeros(32, 32))
        assert torch.equal(dequantise(values, scale), torch.zeros(32, 32))
        assert bool((scale.float() > 0).all())
    values, scale = quantise_fp4(torch.full((1, 32), 1e-30))
    torch.testing.assert_close(dequantise(values, scale), torch.full((1, 32), 1e-30), rtol=0.3, atol=0)


@pytest.mark.parametrize("seed", range(3))
def test_quantising_again_keeps_the_values(seed):
    w = weight(40, 64, seed)
    for quantise in (quantise_fp8, lambda x: quantise_fp8(x, rows=1), quantise_fp4):
        once = dequantise(*quantise(w))
        assert not torch.equal(once, w)
        assert torch.equal(dequantise(*quantise(once)), once)


def test_errors_stay_within_half_a_step():
    w = weight(40, 64)
    for quantise, relative in ((quantise_fp8, 2.0**-4), (quantise_fp4, 0.25)):
        error = (dequantise(*quantise(w)) - w).abs().unflatten(1, (-1, 32)).amax(-1)
        largest = w.abs().unflatten(1, (-1, 32)).amax(-1)
        largest = largest.amax(0, keepdim=True) if quantise is quantise_fp8 else largest
        assert bool((error <= relative * largest).all())


def test_what_cannot_be_stored_or_read():
    with pytest.raises(ValueError, match=r"\[4, 40\].*divisible by 32"):
        quantise_fp4(torch.ones(4, 40))
    with pytest.raises(ValueError, match=r"float32: a scaled weight must be float8_e4m3fn or packed fp4"):
        dequantise(torch.ones(4, 32), torch.ones(1, 1))
    values, _ = quantise_fp8(torch.ones(64, 64))
    with pytest.raises(ValueError, match=r"scale \[3, 2\]: does not cover a weight of \[64, 64\]"):
        dequantise(values, torch.ones(3, 2))
