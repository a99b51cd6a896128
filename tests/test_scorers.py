"""Every baseline scorer against loops over rows, heads and positions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fake_model import FakeModel, documents, tiles_of

from sparsity_lab.dense import RowTile, row_tiles
from sparsity_lab.scorers import BASELINES, MeanKey, Oracle, Quest, Random, Recency

LENGTH = 23
RATIOS = [1, 2, 3, 5]
SHARES = ["layer", "kv_head"]


def tile_of(model: FakeModel | None = None, rows=range(LENGTH), document: int = 0, layer: int = 1, seed: int = 0):
    model = model or FakeModel()
    tokens = documents(document + 1, LENGTH)[document]
    acts = model.activations(tokens.tokens.unsqueeze(0), layer)
    return next(iter(row_tiles(acts, torch.tensor(list(rows)), LENGTH, tokens.id, seed)))


def heads_of(share: str) -> list[list[int]]:
    return [[0, 1, 2, 3]] if share == "layer" else [[0, 1], [2, 3]]


def softmax(values: list[float]) -> list[float]:
    weights = [math.exp(v - max(values)) for v in values]
    return [w / sum(weights) for w in weights]


def naive_scores(tile: RowTile, ratio: int, share: str, reduction: str, bound) -> np.ndarray:
    """[g, R, n] with NaN where not visible; `bound(query, keys of a position)` is one head's logit."""
    q, k = tile.acts.q[0].double().numpy(), tile.acts.k[0].double().numpy()
    out = np.full((len(heads_of(share)), len(tile.rows), tile.length // ratio), np.nan)
    for group, heads in enumerate(heads_of(share)):
        for i, row in enumerate(tile.rows.tolist()):
            visible = (row + 1) // ratio
            per_head = []
            for head in heads:
                keys = k[head // 2]
                logits = [
                    bound(q[head, row] * tile.acts.scale, keys[j * ratio : (j + 1) * ratio]) for j in range(visible)
                ]
                per_head.append(softmax(logits) if reduction == "softmax" and visible else logits)
            for j in range(visible):
                out[group, i, j] = sum(values[j] for values in per_head) / len(heads)
    return out


def mean_bound(query, keys):
    return float(query @ (sum(keys) / len(keys)))


def quest_bound(query, keys):
    return sum(max(query[c] * key[c] for key in keys) for c in range(len(query)))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("reduction", ["softmax", "logit"])
@pytest.mark.parametrize(("scorer", "bound"), [(MeanKey, mean_bound), (Quest, quest_bound)])
def test_key_scorers(scorer, bound, reduction, ratio, share):
    tile = tile_of()
    scores = scorer(reduction).scores(tile, ratio, share)
    expected = naive_scores(tile, ratio, share, reduction, bound)
    assert scores.dtype == torch.float32
    assert scores.shape == expected.shape
    seen = ~np.isnan(expected)
    np.testing.assert_allclose(scores.numpy()[seen], expected[seen], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ratio", RATIOS)
def test_quest_is_an_upper_bound_of_every_logit(ratio):
    tile = tile_of()
    bound = Quest("logit").scores(tile, ratio, "kv_head")
    q = tile.acts.q[0].view(2, 2, LENGTH, -1)
    logits = torch.einsum("gmsd,gtd->gmst", q, tile.acts.k[0]).mean(1) * tile.acts.scale
    n = LENGTH // ratio
    assert (logits[..., : n * ratio].unflatten(-1, (n, ratio)).amax(-1) <= bound + 1e-5).all()


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_oracle_is_the_dense_mass(ratio, share):
    tile = tile_of(FakeModel(sink=True, softcap=3.0))
    scores = Oracle().scores(tile, ratio, share)
    p = tile.probabilities.double().numpy()
    for group, heads in enumerate(heads_of(share)):
        for i in range(LENGTH):
            for j in range(LENGTH // ratio):
                mass = sum(p[head, i, u] for head in heads for u in range(j * ratio, (j + 1) * ratio)) / len(heads)
                assert float(scores[group, i, j]) == pytest.approx(mass, rel=1e-6, abs=1e-30)


def test_recency_ranks_the_newest_first():
    scores = Recency().scores(tile_of(rows=[9, 22]), 2, "layer")
    assert scores.shape == (1, 2, LENGTH // 2)
    assert (scores.diff(dim=-1) > 0).all()


@pytest.mark.parametrize("ratio", RATIOS)
def test_random_does_not_depend_on_tiles_or_neighbours(ratio):
    whole = Random().scores(tile_of(), ratio, "layer")
    for rows in ([0], [22], [3, 4, 5], [21, 7]):
        torch.testing.assert_close(
            Random().scores(tile_of(rows=rows), ratio, "layer"), whole[:, torch.tensor(rows)], rtol=0, atol=0
        )


def test_random_changes_with_seed_document_layer_ratio_and_row():
    def scores(ratio=1, **options):
        return Random().scores(tile_of(rows=[20], **options), ratio, "layer")[..., :4].flatten().tolist()

    different = [scores(), scores(seed=1), scores(document=1), scores(layer=2), scores(ratio=5)]
    different.append(Random().scores(tile_of(rows=[21]), 1, "layer")[..., :4].flatten().tolist())
    assert len({tuple(values) for values in different}) == len(different)


def splitmix(x: int) -> int:
    """The finaliser of splitmix64 in plain integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


@pytest.mark.parametrize("ratio", RATIOS)
def test_random_is_this_hash_for_good(ratio):
    """Results already stored under a cell id must stay true: another hash needs another NUMBERS_VERSION."""
    tile = tile_of(layer=3, seed=7)
    tile.document = "fedcba9876543210"
    salt = (0xFEDCBA987654 ^ (7 * 1_000_003) ^ (3 << 40) ^ (ratio << 52)) % 2**62
    expected = [
        [splitmix((splitmix(row + salt) + j) % 2**64) % 2**24 for j in range(LENGTH // ratio)] for row in range(LENGTH)
    ]
    assert Random().scores(tile, ratio, "layer")[0].tolist() == expected


def test_random_is_uniform_over_positions():
    model, document = FakeModel(num_layers=1), documents(1, 512)[0]
    [tile] = tiles_of(model, document, torch.arange(256, 512), 512)
    best = Random().scores(tile, 1, "layer")[0, :, :256].argmax(-1)
    counts = torch.bincount(best // 32, minlength=8)  # 256 draws in 8 equal bins: 32 each, standard deviation 5.3
    assert counts.min() > 8
    assert counts.max() < 60


@pytest.mark.parametrize("name", BASELINES)
def test_scores_where_nothing_is_visible_are_no_nan(name):
    scores = BASELINES[name]().scores(tile_of(rows=[0, 1]), 5, "kv_head")
    assert not scores.isnan().any()


@pytest.mark.parametrize("name", BASELINES)
def test_describe_names_the_scorer_and_its_options(name):
    scorer = BASELINES[name]()
    assert scorer.name == name
    assert scorer.describe()["name"] == name
    if name in ("mean_key", "quest"):
        assert scorer.describe() != BASELINES[name](head_reduction="logit").describe()


@pytest.mark.parametrize("scorer", [MeanKey, Quest])
def test_unknown_reduction(scorer):
    with pytest.raises(ValueError, match=r"scorer.head_reduction='max': must be one of softmax, logit"):
        scorer("max")


def test_a_scorer_of_ones_own_must_say_how():
    from sparsity_lab.scorers import _Keys

    with pytest.raises(TypeError, match="_Keys must define summaries"):
        _Keys().scores(tile_of(), 1, "layer")
