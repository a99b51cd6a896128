"""Random weights and gradients of the whole model."""

import pytest
import torch
from v41_cases import UNQUANTISED, prompt, random_tiny, tiny_config

from sparsity_lab.models.deepseek_v41 import Cache
from sparsity_lab.models.deepseek_v41.init import random_model
from sparsity_lab.models.deepseek_v41.layout import slots

SELECTION_ONLY = ("indexer.wq_b.weight", "indexer.weights_proj.weight", "indexer.wk.weight", "indexer.k_norm.weight")
NEVER = ("gate.bias", "gate.bias_vl")


@pytest.mark.parametrize("quant", [{}, UNQUANTISED], ids=["quantised", "plain"])
@pytest.mark.parametrize("dense", [False, True])
def test_gradients_reach_every_parameter_that_trains(quant, dense):
    model = random_tiny(**quant)
    hidden = model.hidden(prompt(40, batch=2), dense=dense)
    logits = torch.nn.functional.linear(hidden, model.lm_head.weight)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), prompt(40, batch=2, seed=1).flatten()).backward()
    for name, p in model.named_parameters():
        if name.endswith((*SELECTION_ONLY, *NEVER)):
            assert p.grad is None, f"{name}: a selection has no gradient"
            assert p.requires_grad == name.endswith(SELECTION_ONLY), name
            continue
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name
        assert p.grad.abs().max() > 0, name


def test_gradients_are_those_of_finite_differences():
    """With nothing that jumps: no quantisation, no selection, all experts chosen."""
    model, ids = random_tiny(**UNQUANTISED, num_experts_per_tok=8), prompt(24)
    torch.manual_seed(0)
    readout = torch.randn(24, 64)
    names = [
        "model.layers.2.attn.compressor.wgate.weight",
        "model.layers.4.attn.attn_sink",
        "model.layers.0.hc_attn_fn",
    ]
    parameters = [model.get_parameter(name) for name in names]
    (model.hidden(ids, dense=True)[0] * readout).sum().backward()
    for name, p in zip(names, parameters, strict=True):
        direction = p.grad / p.grad.norm()
        values = []
        for step in (1e-2, -1e-2):
            with torch.no_grad():
                p.add_(direction * step)
                values.append(float((model.hidden(ids, dense=True)[0].double() * readout).sum()))
                p.sub_(direction * step)
        assert (values[0] - values[1]) / 2e-2 == pytest.approx(float(p.grad.norm()), rel=0.02), name


def test_one_step_of_training_lowers_the_loss():
    model, ids = random_tiny(), prompt(40)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(4):
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:])
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses == sorted(losses, reverse=True)


def test_random_models_are_sane_at_first():
    """Streams neither vanish nor explode over the layers, and routing is spread."""
    model, sizes = random_model(tiny_config(hc_sinkhorn_iters=20)), []
    for block in model.model.layers:
        block.register_forward_hook(lambda module, args, out: sizes.append(float(out[0].std())))
    with torch.inference_mode():
        logits = model(prompt(64))
    assert all(0.3 < size < 30 for size in sizes), sizes
    assert 0.1 < float(logits.std()) < 10
    assert torch.isfinite(logits).all()


def test_slots_cover_every_number_once():
    model = random_tiny()
    found = list(slots(model))
    assert len({slot.name for slot in found}) == len(found)
    assert sum(slot.target.numel() for slot in found) == sum(p.numel() for p in model.parameters())
    for slot in found:
        slot.target.fill_(7.0)
        assert slot.shape == tuple(slot.target.shape)
    assert all(bool((p == 7).all()) for p in model.parameters())


@torch.inference_mode()
def test_rotary_tables_grow_with_the_positions():
    model, ids = random_tiny(**UNQUANTISED), prompt(70)
    short, held = random_tiny(**UNQUANTISED), Cache()
    want = model(ids)
    got = torch.cat([short(piece, held) for piece in ids.split(7, dim=1)], dim=1)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    assert {far: len(table) for far, table in short._tables.items()} == {False: 128, True: 128}


def test_bfloat16_runs_and_keeps_logits_in_float32():
    with torch.inference_mode():
        logits = random_model(tiny_config(), dtype=torch.bfloat16)(prompt(20))
        exact = random_model(tiny_config())(prompt(20))
    assert logits.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(logits.flatten(), exact.flatten(), dim=0) > 0.98
