"""Dense probabilities and masses, against the loops of naive.py and against the models' own attention weights."""

from __future__ import annotations

import dataclasses
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from naive import dense_probabilities, head_groups, position_mass
from tiny_models import FAMILIES

from sparsity_lab import dense
from sparsity_lab.activations import LayerActivations
from sparsity_lab.dense import MASS_UNIT, RowTile, attention_probabilities, per_group, row_tiles
from sparsity_lab.measurement import sample_rows
from sparsity_lab.models import loading

DOCUMENT = "0123456789abcdef"
KINDS: dict[str, dict[str, Any]] = {
    "mha": {"kv_heads": 6},
    "gqa": {"kv_heads": 2},
    "mqa": {"kv_heads": 1},
    "softcap": {"softcap": 1.5},
    "sinks": {"sink": True},
    "window": {"window": 7},
    "all": {"softcap": 2.0, "sink": True, "window": 5},
}


def activations(
    length: int = 40,
    *,
    kv_heads: int = 2,
    heads: int = 6,
    softcap: float | None = None,
    sink: bool = False,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> LayerActivations:
    """Random tensors of one layer; the output is made by the loops, so it is right by definition."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q, k, v = random(1, heads, length, 8) * 2, random(1, kv_heads, length, 8), random(1, kv_heads, length, 4)
    sinks = random(heads) if sink else None
    acts = LayerActivations(0, q, k, v, random(1, length, 16), v, 0.3, softcap, sinks, window)
    if heads % kv_heads:
        return acts
    output = np.einsum("hst,htd->shd", naive(acts), v[0].double().numpy().repeat(heads // kv_heads, 0))
    return dataclasses.replace(acts, output=torch.from_numpy(output).to(dtype).unsqueeze(0))


def naive(acts: LayerActivations) -> np.ndarray:
    sink = None if acts.sink is None else acts.sink.double().numpy()
    q, k = acts.q[0].double().numpy(), acts.k[0].double().numpy()
    return dense_probabilities(q, k, acts.scale, acts.softcap, sink, acts.window)


def tile_of(acts: LayerActivations, rows: torch.Tensor | None = None) -> RowTile:
    rows = torch.arange(acts.q.shape[2]) if rows is None else rows
    return next(row_tiles(acts, rows, len(rows), DOCUMENT, 0))


# --- probabilities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_against_loops(kind: str) -> None:
    acts = activations(**KINDS[kind])
    expected = naive(acts)
    every = attention_probabilities(acts, torch.arange(40))
    assert every.dtype == torch.float32
    np.testing.assert_allclose(every.numpy(), expected, atol=1e-6, rtol=0)
    assert np.array_equal(every.numpy() > 0, expected > 0)  # nothing beyond the mask, not even a trace
    assert np.all((expected.sum(-1) < 0.9999) == (acts.sink is not None))
    assert dense.reconstruction_error(tile_of(acts)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [1, 3, 5, 100])
def test_sampled_rows_in_tiles(kind: str, tile: int) -> None:
    """Every row once, in tiles of at most `tile`, each right whatever its neighbours."""
    acts = activations(**KINDS[kind])
    expected, rows = naive(acts), torch.tensor([0, 1, 6, 7, 13, 22, 23, 38, 39])
    tiles = list(row_tiles(acts, rows, tile, DOCUMENT, 0))
    assert sorted(torch.cat([t.rows for t in tiles]).tolist()) == rows.tolist()
    assert max(len(t.rows) for t in tiles) <= tile
    for part in tiles:
        assert part.probabilities.shape == (6, len(part.rows), 40)
        np.testing.assert_allclose(part.probabilities.numpy(), expected[:, part.rows.tolist()], atol=1e-6, rtol=0)


def test_first_tile_sees_the_whole_document() -> None:
    """measure() checks the first tile alone, so it must reach the end, as every tile should reach nearly everywhere."""
    parts = [part.rows.tolist() for part in row_tiles(activations(), torch.arange(40), 5, DOCUMENT, 0)]
    assert parts[0][-1] == 39
    for rows in parts:
        assert rows == sorted(rows)
        assert rows[0] < 8
        assert rows[-1] >= 32
    assert next(row_tiles(activations(), torch.arange(40), 1, DOCUMENT, 0)).rows.tolist() == [39]


def test_rows_of_a_continued_document() -> None:
    """With fewer query rows than keys, row i stands at position t - s + i."""
    acts = activations(window=9)
    late = dataclasses.replace(acts, q=acts.q[:, :, 30:])
    np.testing.assert_allclose(attention_probabilities(late, torch.arange(10)), naive(acts)[:, 30:], atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gqa", "all"])
def test_half_precision_is_computed_in_float32(kind: str, dtype: torch.dtype) -> None:
    """The rounded inputs are the truth; nothing is rounded after them."""
    acts = activations(dtype=dtype, **KINDS[kind])
    found = attention_probabilities(acts, torch.arange(40))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), naive(acts), atol=1e-6, rtol=0)


def test_large_logits_and_extreme_sinks_stay_finite() -> None:
    acts = activations(sink=True)
    acts = dataclasses.replace(acts, q=acts.q * 300, sink=torch.tensor([-1e4, 1e4, 0.0, 5.0, float("-inf"), 1e30]))
    found = attention_probabilities(acts, torch.arange(40))
    assert torch.isfinite(found).all()
    assert found[5].sum() == 0
    torch.testing.assert_close(found[4].sum(-1), torch.ones(40))


@pytest.mark.parametrize("family", FAMILIES)
def test_against_the_models_own_weights(family: str, tmp_path: Path) -> None:
    """What an eager model itself returns as its attention weights, every layer, sliding ones too."""
    length = 50
    model = loading.load(str(tiny_models.make(family, tmp_path)), attn_implementation="eager", device="cpu")
    with torch.inference_mode():
        own = model.model(input_ids=tiny_models.tokens(length), output_attentions=True).attentions
    seen = []

    def observer(acts: LayerActivations) -> None:
        tile = tile_of(acts)
        torch.testing.assert_close(tile.probabilities, own[acts.layer][0], atol=1e-5, rtol=0)
        np.testing.assert_allclose(tile.probabilities.numpy(), naive(acts), atol=2e-6, rtol=0)
        assert dense.reconstruction_error(tile) < 1e-5
        assert tile.probabilities[:, -1].max() > 4 / length  # far from uniform, else all of this says little
        seen.append(acts.layer)

    model.observe(tiny_models.tokens(length), observer, range(model.num_layers))
    assert seen == list(range(model.num_layers)) == list(range(len(own)))


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.31},
        {"softcap": 2.2},
        {"softcap": None},
        {"sink": None},
        {"window": None},
        {"window": 6},
    ],
)
def test_reconstruction_error_shows_what_is_wrong(change: dict[str, Any]) -> None:
    acts = activations(**KINDS["all"])
    assert dense.reconstruction_error(tile_of(acts)) < 1e-6
    assert dense.reconstruction_error(tile_of(dataclasses.replace(acts, **change))) > 1e-3


def test_reconstruction_error_shows_a_wrong_head_order() -> None:
    acts = activations()
    swapped = dataclasses.replace(acts, q=acts.q[:, [0, 2, 4, 1, 3, 5]])
    assert dense.reconstruction_error(tile_of(swapped)) > 1e-2


def test_head_division_is_checked() -> None:
    with pytest.raises(ValueError, match="6 query heads are no multiple of 4 key heads"):
        attention_probabilities(activations(kv_heads=4), torch.arange(3))
    with pytest.raises(ValueError, match="5 query heads are no multiple of 2 key heads"):
        per_group(torch.zeros(5, 3), "kv_head", 2)
    assert per_group(torch.zeros(5, 3), "layer", 2).shape == (1, 5, 3)
    with pytest.raises(ValueError, match="share='heads': must be one of layer, kv_head"):
        per_group(torch.zeros(6, 3), "heads", 2)


def test_one_document_and_one_row_at_least() -> None:
    acts = activations()
    with pytest.raises(ValueError, match="layer 0: a batch of 2, must be one document"):
        attention_probabilities(dataclasses.replace(acts, q=acts.q.expand(2, -1, -1, -1)), torch.arange(3))
    with pytest.raises(ValueError, match=r"measure.row_tile=0: must be at least 1"):
        next(row_tiles(acts, torch.arange(3), 0, DOCUMENT, 0))
    assert attention_probabilities(acts, torch.arange(0)).shape == (6, 0, 40)
    assert list(row_tiles(acts, torch.arange(0), 4, DOCUMENT, 0)) == []


# --- masses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gqa", "all"])
@pytest.mark.parametrize("share", ["layer", "kv_head"])
@pytest.mark.parametrize("ratio", [1, 3, 4])
def test_mass_against_loops(kind: str, share: str, ratio: int) -> None:
    acts = activations(41, **KINDS[kind])
    p, found = naive(acts), tile_of(acts).mass(share, ratio)
    assert found.dtype == torch.float64
    for group, heads in enumerate(head_groups(6, 2, share)):
        for row in range(41):
            expected = position_mass(p[heads, row].mean(0), ratio, 41 // ratio)
            np.testing.assert_allclose(found[group, row], expected, atol=1e-6, rtol=0)


def test_mass_does_not_depend_on_the_tile() -> None:
    acts = activations(200, sink=True)
    rows = torch.arange(0, 200, 3)
    whole = tile_of(acts, rows).mass("layer", 4)
    for tile in (1, 4, 13):
        parts = list(row_tiles(acts, rows, tile, DOCUMENT, 0))
        found = torch.cat([part.mass("layer", 4) for part in parts], dim=1)
        order = torch.cat([part.rows for part in parts]).argsort()
        torch.testing.assert_close(found[:, order], whole, atol=1e-7, rtol=0)


@pytest.mark.parametrize("share", ["layer", "kv_head"])
def test_masses_are_exact(share: str) -> None:
    """Multiples of 2**-48, at most about 1: float64 adds them without rounding, so in any order to the same bits."""
    tile = tile_of(activations(300))
    mass = tile.token_mass(share)
    assert torch.equal(mass / MASS_UNIT, (mass / MASS_UNIT).round())
    assert mass.sum(-1).max() < 1 + 1e-5
    torch.testing.assert_close(mass.float(), tile.mean_mass(share), atol=MASS_UNIT, rtol=1e-7)
    total = mass.sum(-1)
    for seed in range(5):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))
        shuffled = mass[..., order]
        assert torch.equal(shuffled.sum(-1), total)
        assert torch.equal(shuffled.cumsum(-1)[..., -1], total)
        assert torch.equal(shuffled @ torch.ones(300, dtype=torch.float64), total)
    assert torch.equal(tile.mass(share, 5).sum(-1), total)


def test_groups_average_to_the_layer() -> None:
    tile = tile_of(activations(sink=True))
    groups, layer = tile.token_mass("kv_head"), tile.token_mass("layer")
    assert (groups.shape, layer.shape) == ((2, 40, 40), (1, 40, 40))
    torch.testing.assert_close(groups.mean(0, keepdim=True), layer, atol=1e-7, rtol=0)
    assert (groups[0] - groups[1]).abs().max() > 0.1
    alone = tile_of(activations(kv_heads=1))
    assert torch.equal(alone.token_mass("kv_head"), alone.token_mass("layer"))


def test_ranked_mass_tells_apart_what_exact_mass_cannot() -> None:
    tile = tile_of(activations())
    tile.probabilities.zero_()[:, :, :2] = torch.tensor([1e-30, 2e-30])
    assert tile.token_mass("layer").max() == 0
    assert (tile.ranked_mass("layer", 1)[..., 1] > tile.ranked_mass("layer", 1)[..., 0]).all()
    torch.testing.assert_close(tile.ranked_mass("layer", 2)[..., 0], torch.full((1, 40), 3e-30), atol=0, rtol=1e-6)


def test_what_is_derived_is_kept() -> None:
    first, second = row_tiles(activations(), torch.arange(40), 20, DOCUMENT, 0)
    assert first.mass("layer", 2) is first.mass("layer", 2)
    assert first.mass("layer", 2) is not second.mass("layer", 2)
    keys = first.keep_for_layer("keys", lambda: torch.zeros(1))
    assert second.keep_for_layer("keys", lambda: torch.ones(1)) is keys


# --- memory ----------------------------------------------------------------------------------------------------------


def peak_bytes(function: Any) -> int:
    """Most bytes that torch held at a time beyond those held at the start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    held = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_memory_grows_with_the_tile_not_with_the_rows() -> None:
    """Peak is O(tile x t): the same for 8 times the rows, and far below s x t."""

    def peak(length: int, rows: int, tile: int) -> float:
        """In units of one tile's float32 probabilities, 4 heads."""
        q, k = torch.randn(1, 4, length, 8), torch.randn(1, 2, length, 8)
        acts = LayerActivations(0, q, k, k, q, q, 0.3, softcap=2.0, sink=torch.zeros(4), window=100)
        chosen = torch.arange(rows) * (length // rows)
        tiles = (part.probabilities.sum() for part in row_tiles(acts, chosen, tile, DOCUMENT, 0))
        return peak_bytes(lambda: deque(tiles, maxlen=0)) / (16 * tile * length)

    few, many = peak(1024, 32, 16), peak(1024, 256, 16)
    assert 1 < few < 6
    assert many == pytest.approx(few, rel=0.02)
    assert peak(1024, 256, 32) < 1.05 * few  # per unit: twice the tile, twice the bytes
    assert peak(4096, 256, 16) < 1.05 * few  # four times the tokens, four times the bytes


def test_default_tile() -> None:
    assert dense.default_tile(9, 2048) == 2**26 // (9 * 2048)
    assert dense.default_tile(128, 2**20) == 1
    assert dense.default_tile(2, 10, budget=60) == 3


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "count"), [(100, 10), (97, 13), (2048, 128), (5, 4), (64, 1)])
def test_sampled_rows_are_stratified(length: int, count: int) -> None:
    """Exactly one row in each of `count` equal spans, every row reachable."""
    edges = [i * length // count for i in range(count + 1)]
    for seed in range(20):
        rows = sample_rows(length, count, seed, DOCUMENT).tolist()
        assert [low <= row < high for low, high, row in zip(edges[:-1], edges[1:], rows, strict=True)] == [True] * count


def test_sampled_rows_are_seeded() -> None:
    """They depend on the seed and the document alone, so on no shard, count or order of documents."""
    rows = sample_rows(2048, 64, 3, DOCUMENT)
    torch.manual_seed(1)
    np.random.default_rng(1).random()
    assert torch.equal(sample_rows(2048, 64, 3, DOCUMENT), rows)
    assert not torch.equal(sample_rows(2048, 64, 4, DOCUMENT), rows)
    assert not torch.equal(sample_rows(2048, 64, 3, DOCUMENT[::-1]), rows)
    assert rows[:4].tolist() == [7, 57, 65, 127]  # the same on every machine and in every version


def test_all_rows() -> None:
    for count in (None, 30, 31):
        assert sample_rows(30, count, 0, DOCUMENT).tolist() == list(range(30))
    with pytest.raises(ValueError, match=r"measure.rows=0: must be at least 1, or null"):
        sample_rows(30, 0, 0, DOCUMENT)
