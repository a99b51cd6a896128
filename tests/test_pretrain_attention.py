"""The training forward against the model's own, and which loss reaches which parameters."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from v41_cases import UNQUANTISED, prompt, random_tiny

from sparsity_lab import pretrain_attention
from sparsity_lab.pretrain_attention import TrainingCall
from sparsity_lab.selection import as_mask, order_positions

INDEXER = ("indexer.wq_b.weight", "indexer.weights_proj.weight", "indexer.wk.weight", "indexer.k_norm.weight")


def run(model, ids, stage="dense", **options):
    call = TrainingCall.over(model, ids.shape[1], stage=stage, tile=16, stride=4, phase=3, **options)
    return model.run(ids, call), call


def blocks(model, forward, inputs=()):
    """[(input, output)] of each block in a forward, and its result; `inputs`, if any, replace the blocks' own."""
    seen = []

    def before(block, args):
        return (*inputs[len(seen)], *args[2:]) if inputs else None

    def after(block, args, output):
        seen.append((args[:2], output))

    hooks = [block.register_forward_pre_hook(before) for block in model.model.layers]
    hooks += [block.register_forward_hook(after) for block in model.model.layers]
    try:
        return seen, forward()
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("quant", [{}, UNQUANTISED], ids=["quantised", "plain"])
@pytest.mark.parametrize(("length", "every"), [(64, False), (77, True)])
def test_the_forward_is_the_models_own(quant, length, every, monkeypatch):
    # ReLU ties scores at 0: ties as in inference here, as the device has them in training
    monkeypatch.setattr(pretrain_attention, "_best", lambda s, k: as_mask(order_positions(s, k), s.shape[-1]))
    model, ids = random_tiny(**quant), prompt(length, batch=2)
    with torch.no_grad():
        dense, sparse = (blocks(model, partial(model.hidden, ids, dense=dense)) for dense in (True, False))
        for block in model.model.layers:
            block.ffn.experts.every = every
        for stage, (wanted, hidden) in (("dense", dense), ("pool", sparse)):
            # a block at a time: one last bit may flip an fp4 code, and later blocks make that a tenth and more
            found, _ = blocks(model, lambda stage=stage: run(model, ids, stage), [given for given, _ in wanted])
            for (_, got), (_, want) in zip(found, wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
            if quant == UNQUANTISED:
                torch.testing.assert_close(run(model, ids, stage)[0], hidden, rtol=0, atol=1e-3)
    assert (dense[1] - sparse[1]).abs().max() > 0.05


def test_the_best_of_the_reachable():
    scores = torch.tensor([[1.0, 5.0, -1.0, 3.0], [2.0, float("-inf"), float("-inf"), 7.0]])
    want = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 1]], dtype=torch.bool)
    assert torch.equal(pretrain_attention._best(scores, 3), want)
    assert torch.equal(pretrain_attention._best(scores, 9)[0], torch.ones(4, dtype=torch.bool))


@pytest.mark.parametrize("stage", ["dense", "sparse", "pool"])
def test_each_loss_reaches_its_own_parameters(stage):
    model, ids = random_tiny(), prompt(48, batch=2)
    hidden, call = run(model, ids, stage)
    losses = call.index_losses()
    assert set(losses) == {2, 4, 6}
    assert all(bool(torch.isfinite(loss)) and loss > 0 for loss in losses.values())
    sum(losses.values()).backward(retain_graph=True)
    for name, p in model.named_parameters():
        assert (p.grad is not None and bool(p.grad.abs().sum() > 0)) == name.endswith(INDEXER), name
    model.zero_grad()
    hidden.square().mean().backward()
    for name, p in model.named_parameters():
        untouched = name.endswith((*INDEXER, "gate.bias", "gate.bias_vl", "lm_head.weight"))
        assert (p.grad is None or bool((p.grad == 0).all())) == untouched, name


def test_targets_are_the_dense_attention_of_the_layers_served():
    """Against the masses that measurements use, through the model's observer."""
    from sparsity_lab.dense import attention_probabilities

    model, ids = random_tiny(**UNQUANTISED), prompt(48)
    seen = {}
    rows = torch.arange(3, 48, 4)

    def observe(acts):
        seen[acts.layer] = attention_probabilities(acts, rows).sum(0)[:, -acts.compressed.k.shape[2] :]

    with torch.no_grad():
        model.hidden(ids, dense=True, observer=observe, layers=range(2, 8))
        call = run(model, ids)[1]
    for source, served in {2: (2, 3), 4: (4, 5), 6: (6, 7)}.items():
        want = sum(seen[layer] for layer in served)
        torch.testing.assert_close(call.targets[source].mass[0], want, rtol=0, atol=1e-4)
    assert all(0 < share <= 1 for share in call.relative_coverage(4).values())


def test_consumers_stay_within_the_pool():
    model, ids = random_tiny(candidate_topk_blocks=3, index_topk=8), prompt(64)
    with torch.no_grad():
        call = run(model, ids, "pool")[1]
        free = run(model, ids, "sparse")[1]
    assert call.pool.sum(-1).max() <= 3 * 4
    newest = torch.arange(64)
    assert bool(call.pool[0, newest, newest].all()), "the newest block is pinned"
    assert not bool((call.targets[6].allowed & ~call.pool).any())
    assert bool((free.targets[6].allowed & ~call.pool).any())
    torch.testing.assert_close(call.targets[4].allowed, free.targets[4].allowed)


@pytest.mark.parametrize("changes", [{"stage": "none"}, {"phase": 4}, {"tile": 15}])
def test_bad_calls_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        TrainingCall.over(random_tiny(), 16, **{"stage": "dense", "tile": 16, "stride": 4, "phase": 0} | changes)
