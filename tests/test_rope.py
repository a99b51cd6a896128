"""Rotary tables and rotations, both layouts and places."""

import cmath
import math

import golden_cases
import pytest
import torch

from sparsity_lab.rope import apply_rotary_emb, precompute_freqs_cis, rotate_channels

TABLE = {"original_seq_len": 64, "base": 160000.0, "factor": 16.0, "beta_fast": 32, "beta_slow": 1}


def table(dim: int, seqlen: int, **changes: float) -> torch.Tensor:
    return precompute_freqs_cis(dim, seqlen, **{**TABLE, **changes})


@pytest.mark.parametrize("case", golden_cases.cases("rope_freqs"), ids=lambda c: c["name"])
def test_golden_tables(case):
    t, p = golden_cases.tensors(case), case["params"]
    freqs = precompute_freqs_cis(**{k: p[k] for k in ("dim", "seqlen", *TABLE)})
    assert freqs.dtype == torch.complex64
    assert freqs.shape == (p["seqlen"], p["dim"] // 2)
    tolerance = case["tolerance"]["float32_in_the_same_order"]
    torch.testing.assert_close(torch.view_as_real(freqs)[t["positions"]], t["freqs_cis"], rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", golden_cases.cases("apply_rope"), ids=lambda c: c["name"])
def test_golden_rotations(case):
    t, p = golden_cases.tensors(case), case["params"]
    before = t["x"].clone()
    freqs = torch.view_as_complex(t["freqs_cis"])
    y = rotate_channels(t["x"], freqs, p["rope_head_dim"], place="last", layout="adjacent", inverse=p["inverse"])
    assert y.dtype == t["y"].dtype
    assert torch.equal(t["x"], before), "must not rotate in place"
    atol = 1e-6 if y.dtype == torch.float32 else 2.0**-6  # bfloat16: one unit in the last place of the largest values
    torch.testing.assert_close(y, t["y"], rtol=0, atol=atol)


@pytest.mark.parametrize("original_seq_len", [0, 64, 65536])
def test_unit_modulus(original_seq_len):
    """YaRN's magnitude factor would scale index scores by 1.63 (FACTS §4.3)."""
    freqs = table(64, 3000, original_seq_len=original_seq_len)
    torch.testing.assert_close(freqs.abs(), torch.ones(3000, 32), rtol=0, atol=2e-7)


def test_yarn_keeps_fast_and_divides_slow_channels():
    plain, yarn = table(64, 2, original_seq_len=0)[1].angle(), table(64, 2, original_seq_len=4096)[1].angle()
    ratio = plain / yarn
    assert ratio[0] == pytest.approx(1)
    assert ratio[-1] == pytest.approx(16, rel=1e-4)
    assert (ratio.diff() > -1e-3).all()


def naive_rotation(x: list[float], position: int, dim: int, layout: str) -> list[float]:
    out = list(x)
    for i in range(dim // 2):
        a, b = (2 * i, 2 * i + 1) if layout == "adjacent" else (i, i + dim // 2)
        turned = complex(x[a], x[b]) * cmath.exp(1j * position * 160000.0 ** (-2 * i / dim))
        out[a], out[b] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("layout", ["adjacent", "half"])
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("heads", [None, 3])
def test_every_layout_and_place_against_loops(layout, place, heads):
    dim, rope, s = 12, 8, 5
    x = torch.randn((2, s, dim) if heads is None else (2, s, heads, dim))
    y = rotate_channels(x, table(rope, s, original_seq_len=0), rope, place=place, layout=layout)
    turned = slice(0, rope) if place == "first" else slice(dim - rope, dim)
    want = x.clone()
    for index in torch.cartesian_prod(*(torch.arange(n) for n in x.shape[:-1])).tolist():
        want[(*index, turned)] = torch.tensor(naive_rotation(x[(*index, turned)].tolist(), index[1], rope, layout))
    torch.testing.assert_close(y, want, rtol=0, atol=2e-6)


def test_layouts_are_permutations_of_each_other_and_not_the_same():
    x, freqs = torch.randn(2, 7, 16), table(16, 7)
    half_to_adjacent = torch.arange(16).view(2, 8).T.reshape(-1)  # adjacent channel c holds half channel perm[c]
    adjacent = apply_rotary_emb(x[..., half_to_adjacent], freqs, layout="adjacent")
    half = apply_rotary_emb(x, freqs, layout="half")
    torch.testing.assert_close(adjacent, half[..., half_to_adjacent], rtol=0, atol=1e-6)
    assert (apply_rotary_emb(x, freqs, layout="adjacent") - half).abs().max() > 0.1


@pytest.mark.parametrize("layout", ["adjacent", "half"])
def test_inverse_and_relative_position(layout):
    freqs = table(8, 40)
    x = torch.randn(1, 40, 8)
    back = apply_rotary_emb(apply_rotary_emb(x, freqs, layout=layout), freqs, inverse=True, layout=layout)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-6)
    q, k = (apply_rotary_emb(torch.randn(8).expand(1, 40, 8), freqs, layout=layout)[0] for _ in range(2))
    torch.testing.assert_close((q[20] * k[13]).sum(), (q[37] * k[30]).sum(), rtol=1e-5, atol=1e-5)


def test_bad_arguments_are_named():
    freqs = table(8, 4)
    with pytest.raises(ValueError, match="dim=7"):
        table(7, 4)
    with pytest.raises(ValueError, match=r"base=1\.0"):
        table(8, 4, base=1.0)
    with pytest.raises(ValueError, match="factor=0"):
        table(8, 4, factor=0)
    with pytest.raises(ValueError, match="layout='neox'"):
        apply_rotary_emb(torch.randn(1, 4, 8), freqs, layout="neox")
    with pytest.raises(ValueError, match="freqs_cis"):
        apply_rotary_emb(torch.randn(1, 5, 8), freqs)
    with pytest.raises(ValueError, match="freqs_cis"):
        apply_rotary_emb(torch.randn(1, 4, 8), torch.view_as_real(freqs))
    with pytest.raises(ValueError, match="must be"):
        apply_rotary_emb(torch.randn(4, 8), freqs)
    with pytest.raises(ValueError, match="place='middle'"):
        rotate_channels(torch.randn(1, 4, 8), freqs, 8, place="middle", layout="half")
    with pytest.raises(ValueError, match="rope_head_dim=16"):
        rotate_channels(torch.randn(1, 4, 8), freqs, 16, place="last", layout="half")


def test_negative_angles_do_not_creep_in():
    """exp(+i·p·f): channel 0 of a unit vector turns towards +sin."""
    y = apply_rotary_emb(torch.tensor([[[0.0, 0.0], [1.0, 0.0]]]), table(2, 2, original_seq_len=0))
    torch.testing.assert_close(y[0, 1], torch.tensor([math.cos(1), math.sin(1)]))
