"""Hyper-connections: mixing coefficients, Sinkhorn, collapse and expansion against loops."""

import math

import naive_v41
import pytest
import torch

from sparsity_lab.models.deepseek_v41.hyper import Mix, collapse, expand, mix, sinkhorn

COPIES, WIDTH = 3, 8


def make_mix(iters: int = 20, eps: float = 1e-6):
    torch.manual_seed(0)
    rows = COPIES * (2 + COPIES)
    streams, fn = torch.randn(2, 5, COPIES, WIDTH) * 3, torch.randn(rows, COPIES * WIDTH) * 0.3
    base, scale = torch.randn(rows), torch.tensor([0.5, 1.5, 0.7])
    return mix(streams, fn, base, scale, sinkhorn_iters=iters, eps=eps, norm_eps=1e-20), (streams, fn, base, scale)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("spread", [0.1, 1, 6])
def test_sinkhorn_is_nearly_doubly_stochastic(size, spread):
    torch.manual_seed(size)
    comb = sinkhorn(torch.randn(3, 5, size, size) * spread, 20, 1e-6)
    assert comb.shape == (3, 5, size, size)
    assert (comb > 0).all()
    torch.testing.assert_close(comb.sum(-2), torch.ones(3, 5, size), rtol=0, atol=1e-5)
    # rows come before columns in the last round and are a little off
    torch.testing.assert_close(comb.sum(-1), torch.ones(3, 5, size), rtol=0, atol=0.05 if spread == 6 else 1e-4)


@pytest.mark.parametrize("iters", [1, 2, 20])
@pytest.mark.parametrize("eps", [1e-6, 0.01])
def test_sinkhorn_against_a_loop(iters, eps):
    torch.manual_seed(iters)
    logits = torch.randn(6, 4, 4) * 2
    want = torch.stack([naive_v41.sinkhorn(one, iters, eps) for one in logits]).float()
    torch.testing.assert_close(sinkhorn(logits, iters, eps), want, rtol=0, atol=2e-6)


def test_mix_against_loops():
    site, (streams, fn, base, scale) = make_mix(iters=4, eps=0.01)
    for b in range(2):
        for s in range(5):
            flat = streams[b, s].flatten().double()
            raw = fn.double() @ flat / math.sqrt(float(flat.square().mean()) + 1e-20)
            for j in range(COPIES):
                pre, post = raw[j] * scale[0] + base[j], raw[COPIES + j] * scale[1] + base[COPIES + j]
                assert float(site.pre[b, s, j]) == pytest.approx(1 / (1 + math.exp(-pre)) + 0.01, abs=2e-6)
                assert float(site.post[b, s, j]) == pytest.approx(2 / (1 + math.exp(-post)), abs=2e-6)
            comb = (raw[2 * COPIES :] * scale[2] + base[2 * COPIES :]).view(COPIES, COPIES)
            want = naive_v41.sinkhorn(comb, 4, 0.01).float()
            torch.testing.assert_close(site.comb[b, s], want, rtol=0, atol=2e-6)


def test_coefficients_do_not_depend_on_the_size_of_the_streams():
    site, (streams, fn, base, scale) = make_mix()
    scaled = mix(streams * 1000, fn, base, scale, sinkhorn_iters=20, eps=1e-6, norm_eps=1e-20)
    for one, other in zip(site, scaled, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_collapse_and_expand_against_loops():
    site, (streams, *_) = make_mix()
    output = torch.randn(2, 5, WIDTH)
    narrow, wide = collapse(streams, site.pre), expand(output, streams, site)
    for b in range(2):
        for s in range(5):
            want = sum(float(site.pre[b, s, j]) * streams[b, s, j].double() for j in range(COPIES))
            torch.testing.assert_close(narrow[b, s], want.float(), rtol=0, atol=2e-6)
            for k in range(COPIES):
                want = float(site.post[b, s, k]) * output[b, s].double()
                want = want + sum(float(site.comb[b, s, j, k]) * streams[b, s, j].double() for j in range(COPIES))
                torch.testing.assert_close(wide[b, s, k], want.float(), rtol=0, atol=5e-6)


def test_expand_takes_rows_as_from_and_columns_as_to():
    streams = torch.tensor([[[[1.0], [10.0]]]])
    comb = torch.tensor([[[[0.0, 1.0], [0.0, 0.0]]]])  # copy 0 goes to copy 1, copy 1 nowhere
    site = Mix(torch.zeros(1, 1, 2), torch.tensor([[[0.0, 2.0]]]), comb)
    assert expand(torch.full((1, 1, 1), 100.0), streams, site).flatten().tolist() == [0.0, 201.0]


def test_bfloat16_streams_are_mixed_in_float32():
    site, (streams, *_) = make_mix()
    assert site.pre.dtype == site.post.dtype == site.comb.dtype == torch.float32
    half = streams.bfloat16()
    assert collapse(half, site.pre).dtype == expand(half[:, :, 0], half, site).dtype == torch.bfloat16
    assert torch.equal(collapse(half, site.pre), collapse(half.float(), site.pre).bfloat16())
