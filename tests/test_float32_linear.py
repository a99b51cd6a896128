"""Float32 weights on inputs of any dtype."""

import pytest
import torch

from sparsity_lab.float32_linear import Float32Linear, parts_of, split_product


def test_parts_hold_every_digit():
    x = torch.randn(40, 50) * torch.logspace(-20, 20, 50)
    parts = parts_of(x)
    assert [part.dtype for part in parts] == [torch.bfloat16] * 3
    assert torch.equal(sum(part.double() for part in parts), x.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_result_is_float32_whatever_the_input(dtype):
    layer, x = Float32Linear(30, 20), torch.randn(2, 5, 30).to(dtype)
    found = layer(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.nn.functional.linear(x.float(), layer.weight))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_parts_give_float32s_digits():
    layer = Float32Linear(4096, 300).cuda().requires_grad_(False)
    x = torch.randn(2, 70, 4096, device="cuda").bfloat16()
    wanted, size = x.double() @ layer.weight.double().T, x.abs().double() @ layer.weight.abs().double().T
    assert ((layer(x).double() - wanted).abs() <= 1e-6 * size).all()


def test_split_product_adds_the_parts(monkeypatch):
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: product(a.to(out_dtype), b.to(out_dtype)))
    weight, x = torch.randn(7, 12), torch.randn(2, 3, 12).bfloat16()
    found = split_product(x, weight)
    torch.testing.assert_close(found, x.float() @ weight.T)
