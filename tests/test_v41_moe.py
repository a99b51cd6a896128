"""Router and experts against a loop over tokens and experts, both ways of computing, and their split over ranks."""

import naive_v41
import pytest
import torch
from v41_cases import tiny_config

from sparsity_lab.models.deepseek_v41 import moe
from sparsity_lab.models.deepseek_v41.moe import MoE, grouped_linear, router_scores, swiglu
from sparsity_lab.models.deepseek_v41.parallel import SINGLE, Shard

TOKENS = 13


def make(shard: Shard = SINGLE, std: float = 0.3, **changes) -> MoE:
    config = tiny_config(**{"hidden_size": 16, "moe_intermediate_size": 24, "n_routed_experts": 6} | changes)
    layer = MoE(config, shard)
    torch.manual_seed(0)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=std)
    return layer.requires_grad_(False)


def inputs(scale: float = 1.0) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(1, TOKENS, 16) * scale


def naive(layer: MoE, x: torch.Tensor, shared: bool = True) -> torch.Tensor:
    config, rows = layer.gate.config, []
    routes = naive_v41.route(x[0], layer.gate.weight, layer.gate.bias, config)
    for token, weights in zip(x[0], routes, strict=True):
        out = torch.zeros(16, dtype=torch.float64)
        for e, weight in weights.items():
            w1, w3 = layer.experts.w13[e].chunk(2)
            out += weight * naive_v41.expert(token, w1, layer.experts.w2[e], w3, config.swiglu_limit)
        if shared and layer.shared_experts is not None:
            mlp = layer.shared_experts
            out += naive_v41.expert(token, mlp.w1.weight, mlp.w2.weight, mlp.w3.weight, config.swiglu_limit)
        rows.append(out)
    return torch.stack(rows).unsqueeze(0).float()


@pytest.fixture(params=["grouped", "loop"])
def product(request, monkeypatch):
    """Either one grouped product or one product an expert."""
    if request.param == "loop":
        monkeypatch.setattr(moe, "_has_grouped_mm", lambda device, dtype: False)
    elif not moe._has_grouped_mm("cpu", torch.float32):
        pytest.skip("this PyTorch has no grouped product for float32 on the CPU")
    return request.param


@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("k", [1, 2, 6])
def test_against_a_loop(product, scoring_func, k):
    layer, x = make(scoring_func=scoring_func, num_experts_per_tok=k, gate_temp=1.7), inputs()
    torch.testing.assert_close(layer(x), naive(layer, x), rtol=0, atol=5e-6)


@pytest.mark.parametrize("norm", [True, False])
def test_weights_are_normalised_only_with_more_than_one_expert(norm):
    for k in (1, 3):
        layer = make(num_experts_per_tok=k, norm_topk_prob=norm, routed_scaling_factor=1.5)
        weights, _ = layer.gate(inputs()[0])
        normalised = torch.allclose(weights.sum(-1), torch.full((TOKENS,), 1.5))
        assert normalised == (norm and k > 1)
        torch.testing.assert_close(layer(inputs()), naive(layer, inputs()), rtol=0, atol=5e-6)


def test_no_shared_expert_and_two():
    for count in (0, 2):
        layer = make(n_shared_experts=count)
        assert (layer.shared_experts is None) == (count == 0)
        torch.testing.assert_close(layer(inputs()), naive(layer, inputs()), rtol=0, atol=5e-6)
    assert layer.shared_experts.w1.weight.shape[0] == 2 * 24


def test_experts_without_tokens(product):
    layer, x = make(), inputs()
    layer.gate.bias[:] = torch.tensor([0.0, 50, 0, 0, 50, 0])  # all tokens go to experts 1 and 4
    _, chosen = layer.gate(x[0])
    assert chosen.unique().tolist() == [1, 4]
    torch.testing.assert_close(layer(x), naive(layer, x), rtol=0, atol=5e-6)


def test_bias_changes_the_choice_and_not_the_weights():
    layer, x = make(norm_topk_prob=False), inputs()[0]
    layer.gate.bias.zero_()
    _, before = layer.gate(x)
    layer.gate.bias[2] = 100.0
    weights, chosen = layer.gate(x)
    assert (chosen == 2).any(-1).all()
    assert not (before == 2).any(-1).all()
    scores = router_scores(x @ layer.gate.weight.T, "sqrtsoftplus")
    torch.testing.assert_close(weights, scores.gather(1, chosen) * 1.5, rtol=1e-5, atol=1e-6)


def test_image_bias_is_not_used():
    layer, x = make(), inputs()
    before = layer(x)
    layer.gate.bias_vl[:] = torch.tensor([100.0, 0, 0, 0, 0, 0])
    assert torch.equal(layer(x), before)


def test_swiglu_clamps_up_on_both_sides_and_gate_from_above():
    gate, up = torch.tensor([-50.0, 0.5, 50.0, 3.0, 3.0]), torch.tensor([1.0, 1.0, 1.0, 50.0, -50.0])
    got = swiglu(torch.cat([gate, up]), 2.0)
    silu = torch.nn.functional.silu
    want = torch.stack(
        [silu(gate[0]), silu(gate[1]), silu(torch.tensor(2.0)), *(silu(torch.tensor(2.0)) * u for u in (2, -2))]
    )
    torch.testing.assert_close(got, want)


def test_clamps_reach_routed_and_shared_experts():
    layer, x = make(std=1.0, swiglu_limit=1.0), inputs(scale=3)
    free = make(std=1.0, swiglu_limit=1e9)
    torch.testing.assert_close(layer(x), naive(layer, x), rtol=1e-5, atol=1e-4)
    assert (layer(x) - free(x)).abs().max() > 1
    for part in ("experts", "shared_experts"):
        half = make(std=1.0, swiglu_limit=1.0)
        getattr(half, part).limit = 1e9
        assert (half(x) - layer(x)).abs().max() > 1, part


def test_grouped_product_equals_one_product_an_expert():
    if not moe._has_grouped_mm("cpu", torch.float32):
        pytest.skip("this PyTorch has no grouped product for float32 on the CPU")
    torch.manual_seed(2)
    x, weight = torch.randn(20, 16), torch.randn(5, 24, 16)
    ends = torch.tensor([0, 7, 7, 12, 20])
    got, first = grouped_linear(x, weight, ends), 0
    for e, end in enumerate(ends.tolist()):
        torch.testing.assert_close(got[first:end], x[first:end] @ weight[e].T, rtol=0, atol=1e-5)
        first = end


def test_widths_the_grouped_product_does_not_take():
    torch.manual_seed(2)
    x, weight = torch.randn(6, 5), torch.randn(2, 7, 5)  # rows of 20 bytes
    got = grouped_linear(x, weight, torch.tensor([4, 6]))
    torch.testing.assert_close(got, torch.cat([x[:4] @ weight[0].T, x[4:] @ weight[1].T]))


def test_empty_batch_of_choices(product):
    out = grouped_linear(torch.randn(0, 16), torch.randn(3, 24, 16), torch.zeros(3, dtype=torch.int64))
    assert out.shape == (0, 24)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_sum_to_the_whole(monkeypatch, world):
    whole, x = make(), inputs()
    monkeypatch.setattr(Shard, "sum", lambda self, part: part)
    total = torch.zeros_like(x)
    for rank in range(world):
        part = make(Shard(rank, world))
        experts, width = slice(rank * 6 // world, (rank + 1) * 6 // world), 24 // world
        part.gate.load_state_dict(whole.gate.state_dict())
        part.experts.w13[:], part.experts.w2[:] = whole.experts.w13[experts], whole.experts.w2[experts]
        shared, columns = whole.shared_experts, slice(rank * width, (rank + 1) * width)
        part.shared_experts.w1.weight[:] = shared.w1.weight[columns]
        part.shared_experts.w3.weight[:] = shared.w3.weight[columns]
        part.shared_experts.w2.weight[:] = shared.w2.weight[:, columns]
        total += part(x)
    torch.testing.assert_close(total, whole(x), rtol=0, atol=5e-6)


def test_a_rank_without_work():
    layer, x = make(Shard(1, 2)), inputs()[0]
    weights, chosen = torch.ones(TOKENS, 2), torch.tensor([[0, 1]]).expand(TOKENS, 2)  # all on rank 0
    assert torch.equal(layer.experts(x, weights, chosen), torch.zeros_like(x))


def test_same_bits_in_every_run():
    layer, x = make(num_experts_per_tok=6), inputs()
    first = layer(x)
    assert all(torch.equal(layer(x), first) for _ in range(3))


def test_bfloat16_is_weighed_in_float32():
    layer, x = make(), inputs()
    half = make().to(torch.bfloat16)
    half.gate.bias.data = layer.gate.bias
    weights, _ = half.gate(x[0].bfloat16())
    assert weights.dtype == torch.float32
    out = half(x.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), naive(half, x.bfloat16()), rtol=0.03, atol=0.03)
