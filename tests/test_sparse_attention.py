"""Attention over selected tokens: both ways against loops, and the attended set against the metrics that count it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_model import FakeModel, documents

from sparsity_lab import metrics
from sparsity_lab.dense import RowTile
from sparsity_lab.models.sparse_attention import attend, attended_tokens, gathered, masked

LENGTH = 37
ROWS = torch.tensor([0, 1, 2, 5, 11, 12, 30, 35, 36])
SELECTIONS = [(1, 0), (1, 5), (3, 0), (3, 2), (4, 7), (5, 99), (64, 3)]  # ratio, window
MODELS = {
    "plain": FakeModel(num_layers=1),
    "soft-cap and sink": FakeModel(num_layers=1, softcap=2.0, sink=True, num_heads=6, num_kv_heads=3),
    "one key head": FakeModel(num_layers=1, num_heads=3, num_kv_heads=1),
}


def acts_of(name: str):
    return MODELS[name].activations(documents(1, LENGTH)[0].tokens.unsqueeze(0), 0)


def random_order(groups: int, ratio: int, k: int, seed: int = 0) -> torch.Tensor:
    """Visible positions in random order, -1 behind them: int64 [g, R, min(k, n)]."""
    draw, n = np.random.default_rng(seed), LENGTH // ratio
    out = np.full((groups, len(ROWS), min(k, n)), -1)
    for group in range(groups):
        for i, row in enumerate(ROWS.tolist()):
            some = draw.permutation((row + 1) // ratio)[:k]
            out[group, i, : len(some)] = some
    return torch.from_numpy(out)


def attended_by_hand(order: torch.Tensor, ratio: int, window: int) -> list[list[set[int]]]:
    """Group -> row -> tokens."""
    out = []
    for group in order.tolist():
        out.append([])
        for row, picks in zip(ROWS.tolist(), group, strict=True):
            tokens = {u for u in range(row + 1) if u > row - window or u >= (row + 1) // ratio * ratio}
            for j in picks:
                tokens |= set(range(j * ratio, (j + 1) * ratio)) if j >= 0 else set()
            out[-1].append(tokens)
    return out


@pytest.mark.parametrize(("ratio", "window"), SELECTIONS)
@pytest.mark.parametrize("share", ["layer", "kv_head"])
@pytest.mark.parametrize("name", MODELS)
def test_both_ways_against_a_loop(name, share, ratio, window):
    acts = acts_of(name)
    heads, kv_heads = acts.q.shape[1], acts.k.shape[1]
    groups = kv_heads if share == "kv_head" else 1
    order = random_order(groups, ratio, 4)
    attended = attended_by_hand(order, ratio, window)
    mask = attended_tokens(order, ROWS, ratio, window, LENGTH)
    assert [[set(row.nonzero().flatten().tolist()) for row in group] for group in mask] == attended
    expected = np.zeros((len(ROWS), heads, acts.v.shape[-1]))
    q, k, v = (x[0].double().numpy() for x in (acts.q, acts.k, acts.v))
    for i, row in enumerate(ROWS.tolist()):
        for head in range(heads):
            source = head * kv_heads // heads
            tokens = sorted(attended[head * groups // heads][i])
            logits = k[source][tokens] @ q[head, row] * acts.scale
            logits = logits if acts.softcap is None else acts.softcap * np.tanh(logits / acts.softcap)
            weights = np.exp(logits)
            total = weights.sum() + (0 if acts.sink is None else np.exp(float(acts.sink[head])))
            expected[i, head] = weights @ v[source][tokens] / total
    for way in (masked, gathered, attend):
        np.testing.assert_allclose(way(acts, ROWS, order, ratio, window).numpy(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(("ratio", "window"), SELECTIONS[:-1])
def test_attended_tokens_are_those_that_coverage_and_density_count(ratio, window):
    acts = acts_of("soft-cap and sink")
    tile, order = RowTile(acts, ROWS, "0", 0), random_order(3, ratio, 4)
    true = metrics.truth(tile, "kv_head", ratio, window, 4)
    found = metrics.selection_metrics(order.unsqueeze(0), ratio, ROWS, true, [4])
    attended = attended_tokens(order, ROWS, ratio, window, LENGTH)
    kept = (tile.token_mass("kv_head") * attended).sum(-1)
    torch.testing.assert_close(found["total_coverage"][0, 0], kept, atol=1e-12, rtol=0)
    torch.testing.assert_close(found["density"][0, 0], attended.sum(-1) / (ROWS + 1.0).double(), atol=1e-12, rtol=0)


def test_a_huge_key_that_is_not_attended_changes_nothing():
    acts, order = acts_of("plain"), random_order(1, 1, 3)
    mask = attended_tokens(order, ROWS, 1, 2, LENGTH)[0]
    unseen = int((~mask[-1]).nonzero()[0])
    before = [way(acts, ROWS[-1:], order[:, -1:], 1, 2).clone() for way in (masked, gathered)]
    acts.k[0, :, unseen], acts.v[0, :, unseen] = 1e4, float("inf")
    assert torch.equal(gathered(acts, ROWS[-1:], order[:, -1:], 1, 2), before[1])
    acts.v[0, :, unseen] = 1e4
    assert torch.equal(masked(acts, ROWS[-1:], order[:, -1:], 1, 2), before[0])


def test_places_that_hold_nothing_look_up_nothing_of_the_first_token():
    """Rows with fewer positions than places, over a first token whose value is no number."""
    acts, rows = acts_of("plain"), torch.tensor([20])
    order = torch.tensor([[[4, -1, -1]]])
    before = gathered(acts, rows, order, 3, 2).clone()
    acts.k[0, :, :3], acts.v[0, :, :3] = float("nan"), float("nan")
    assert torch.equal(gathered(acts, rows, order, 3, 2), before)


def test_few_rows_are_looked_up_and_many_are_masked(monkeypatch):
    called = []
    for name in ("masked", "gathered"):
        monkeypatch.setattr(f"sparsity_lab.models.sparse_attention.{name}", lambda *a, name=name: called.append(name))
    acts, order = acts_of("plain"), random_order(1, 1, 3)
    attend(acts, ROWS[-1:], order[:, -1:], 1, 2)
    attend(acts, ROWS, order, 1, 2)
    assert called == ["gathered", "masked"]
