"""Compressor and norm against loops, and every way of cutting a sequence into calls."""

import pytest
import torch

from sparsity_lab.compressor import Compressor, CompressorState
from sparsity_lab.norm import RMSNorm

DIM, WIDTH = 12, 8


def make(ratio: int) -> Compressor:
    torch.manual_seed(ratio)
    compressor = Compressor(DIM, WIDTH, ratio, 1e-6)
    torch.nn.init.uniform_(compressor.norm.weight, 0.5, 1.5)
    return compressor.requires_grad_(False)


def naive(compressor: Compressor, x: torch.Tensor) -> torch.Tensor:
    """[b, s, dim] -> [b, s // ratio, d], one scalar channel at a time in float64."""
    r, weights = compressor.ratio, {n: p.double() for n, p in compressor.named_parameters()}
    out = torch.zeros(x.shape[0], x.shape[1] // r, WIDTH, dtype=torch.float64)
    for b in range(x.shape[0]):
        for j in range(x.shape[1] // r):
            group = x[b, j * r : (j + 1) * r].double()
            for c in range(WIDTH):
                values = group @ weights["wkv.weight"][c]
                if r > 1:
                    gates = (group @ weights["wgate.weight"][c]).exp()
                    values = values * gates / gates.sum()
                out[b, j, c] = values.sum()
            out[b, j] /= (out[b, j].square().mean() + 1e-6).sqrt()
            out[b, j] *= weights["norm.weight"]
    return out.float()


@pytest.mark.parametrize("ratio", [1, 2, 4, 5])
def test_against_loops(ratio):
    x = torch.randn(3, 23, DIM)
    torch.testing.assert_close(make(ratio)(x), naive(make(ratio), x), rtol=0, atol=2e-6)


def test_parameter_names_are_the_published_ones():
    assert set(make(2).state_dict()) == {"wkv.weight", "wgate.weight", "norm.weight"}
    assert set(make(1).state_dict()) == {"wkv.weight", "norm.weight"}


def run_in_pieces(compressor, x, cuts):
    state, parts, seen = CompressorState(), [], 0
    for piece in x.tensor_split(cuts, dim=1):
        latent = compressor(piece, state)
        before, seen = seen, seen + piece.shape[1]
        made = 0 if latent is None else latent.shape[1]
        assert made == seen // compressor.ratio - before // compressor.ratio
        assert made or latent is None, "None, not an empty tensor, while a group fills"
        assert state.pending == seen % compressor.ratio
        if latent is not None:
            parts.append(latent)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_every_split_point_and_token_by_token(ratio):
    compressor, x = make(ratio), torch.randn(2, 14, DIM)
    whole = compressor(x)
    for cuts in [[cut] for cut in range(15)] + [list(range(1, 14)), [3, 4, 9]]:
        torch.testing.assert_close(run_in_pieces(compressor, x, cuts), whole, rtol=0, atol=1e-6)


def test_incomplete_group_gives_none_and_is_dropped_without_state():
    compressor = make(4)
    assert compressor(torch.randn(1, 3, DIM)) is None
    x = torch.randn(1, 7, DIM)
    torch.testing.assert_close(compressor(x), compressor(x[:, :4]), rtol=0, atol=1e-6)
    assert make(1)(torch.randn(1, 0, DIM)) is None


def test_a_later_token_never_changes_a_finished_latent():
    compressor, x = make(4), torch.randn(1, 16, DIM)
    changed = x.clone()
    changed[:, 9] = 1e6
    before, after = compressor(x), compressor(changed)
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2], after[:, 2])


def test_pooling_is_float32_for_bfloat16_input():
    compressor = make(4).bfloat16()
    x = torch.randn(2, 64, DIM, dtype=torch.bfloat16)
    latent = compressor(x)
    assert latent.dtype == torch.bfloat16
    values, gates = compressor.wkv(x).float(), compressor.wgate(x).float()
    pooled = (gates.view(2, 16, 4, WIDTH).softmax(2) * values.view(2, 16, 4, WIDTH)).sum(2)
    assert torch.equal(latent, compressor.norm(pooled).bfloat16())


def test_huge_gates_do_not_overflow():
    compressor = make(2)
    assert compressor(torch.randn(1, 8, DIM) * 1e4).isfinite().all()


def test_errors():
    with pytest.raises(ValueError, match="compress_ratio=0"):
        Compressor(DIM, WIDTH, 0, 1e-6)
    compressor, state = make(4), CompressorState()
    compressor(torch.randn(2, 3, DIM), state)
    with pytest.raises(ValueError, match="batch=1"):
        compressor(torch.randn(1, 3, DIM), state)


def test_rms_norm():
    norm = RMSNorm(6, 1e-5)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
    x = torch.randn(4, 6) * 7
    want = torch.nn.functional.rms_norm(x.double(), (6,), norm.weight.double(), 1e-5).float()
    torch.testing.assert_close(norm(x), want, rtol=0, atol=1e-6)
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    assert norm(torch.zeros(1, 6)).isfinite().all()
