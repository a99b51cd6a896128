"""Placements of sources: dynamic programming against trying everything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sparsity_lab import placement
from sparsity_lab.placement import METHODS, V41_LAYERS, V41_SOURCES

LAYERS = 10


def matrices(seed):
    draw = np.random.default_rng(seed)
    return draw.uniform(0.2, 1.0, (LAYERS, LAYERS)), draw.uniform(0.1, 1.0, (LAYERS, LAYERS, LAYERS))


def plain_value(coverage, inside, sources, candidate):
    """Layer by layer."""
    total = 0.0
    for layer in range(len(coverage)):
        source = max(s for s in sources if s <= layer)
        pooled = candidate is not None and source > candidate
        total += inside[candidate, source, layer] if pooled else coverage[source, layer]
    return total / len(coverage)


def every_choice(number):
    return [(0, *rest) for rest in itertools.combinations(range(1, LAYERS), number - 1)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("number", range(1, LAYERS + 1))
def test_dynamic_programming_equals_trying_everything(number, seed):
    coverage, inside = matrices(seed)
    want = max(plain_value(coverage, inside, sources, None) for sources in every_choice(number))
    found = placement.best(coverage, number)
    assert len(found.sources) == number
    assert found.value == pytest.approx(want, abs=1e-12)
    assert found.value == pytest.approx(plain_value(coverage, inside, found.sources, None), abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("number", range(1, LAYERS + 1))
def test_the_joint_search_equals_trying_everything(number, seed):
    coverage, inside = matrices(seed)
    found = placement.best_joint(coverage, inside, number)
    if number == 1:
        assert found is None
        return
    options = [(s, c) for s in every_choice(number) for c in s[:-1]]
    want = max(plain_value(coverage, inside, *option) for option in options)
    assert found.value == pytest.approx(want, abs=1e-12)
    assert found.value == pytest.approx(plain_value(coverage, inside, found.sources, found.candidate), abs=1e-12)
    given = placement.best_candidate(coverage, inside, found.sources)
    assert given.candidate == found.candidate
    assert given.value == pytest.approx(found.value)


@pytest.mark.parametrize("number", range(1, LAYERS + 1))
def test_no_method_beats_dynamic_programming(number):
    found = placement.placements(*matrices(5), number)
    assert {name for name, _ in found} == set(METHODS)
    for (name, pooled), one in found.items():
        assert one.sources[0] == 0
        assert list(one.sources) == sorted(set(one.sources))
        assert len(one.sources) == number
        assert one.value <= found["dynamic_programming", pooled].value + 1e-12, name


def test_greedy_can_be_beaten():
    values = [(placement.best(c, 4).value, placement.value_of(placement.segments(c), placement.greedy(c, 4)) / LAYERS)
              for c, _ in map(matrices, range(8))]  # fmt: skip
    assert any(best > simple + 1e-6 for best, simple in values)


def test_published_pattern_is_v41s_at_its_own_depth():
    first, end = V41_LAYERS
    assert placement.published(end - first, 8) == tuple(layer - first for layer in V41_SOURCES)
    assert placement.published(30, 8) == (0, 4, 9, 14, 17, 20, 23, 26)


@pytest.mark.parametrize("layers", [1, 3, 10, 30])
def test_patterns_fit_every_number(layers):
    for number in range(1, layers + 1):
        for places in (placement.published(layers, number), placement.every_nth(layers, number)):
            assert len(set(places)) == number
            assert places[0] == 0
            assert places[-1] < layers


@pytest.mark.parametrize("number", [0, 11])
def test_a_number_that_does_not_fit_is_refused(number):
    with pytest.raises(ValueError, match=f"num_sources={number}"):
        placement.placements(*matrices(0), number)


@pytest.mark.parametrize("latest", [0, 3, 9])
def test_no_candidate_behind_the_latest(latest):
    coverage, inside = matrices(2)
    options = [(s, c) for s in every_choice(5) for c in s[:-1] if c <= latest]
    found = placement.best_joint(coverage, inside, 5, latest)
    assert found.value == pytest.approx(max(plain_value(coverage, inside, *option) for option in options))
    assert all(
        one.candidate <= latest for (_, pool), one in placement.placements(coverage, inside, 5, latest).items() if pool
    )
