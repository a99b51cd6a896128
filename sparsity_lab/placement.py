"""Which layers should select: placements of index sources and of the candidate source, from measured coverage.

Every layer uses the selection of the latest source at or before it, and the first source is layer 0, so that each
layer is served. A placement's value is the sum over layers of C[source, layer], the coverage of a layer with the
selection of a source; sources after a candidate source c select inside its pool, and serve J[c, source, layer]. Both
are measured, so values are exact on the documents they were measured on.

Exact dynamic programming, as Kascade does for its anchor layers (arXiv 2512.16391): a placement is a cut of the layers
into segments, each of which adds its own value.

Shapes: L layers; C float64 [L, L], read at source <= layer; J (`inside`) float64 [L, L, L], read at candidate < source
<= layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

V41_LAYERS, V41_SOURCES, V41_CANDIDATE = (2, 40), (2, 8, 14, 20, 24, 28, 32, 36), 20  # layers 0 and 1 select nothing


@dataclass(frozen=True)
class Placement:
    """Index sources (layer 0 first), the candidate source or None, and the mean coverage predicted over layers."""

    sources: tuple[int, ...]
    candidate: int | None
    value: float


def segments(coverage: np.ndarray) -> np.ndarray:
    """Value of source a serving layers a to e - 1, [L, L + 1]; -inf where e <= a."""
    layers = len(coverage)
    out = np.full((layers, layers + 1), -np.inf)
    for a in range(layers):
        out[a, a + 1 :] = np.cumsum(coverage[a, a:])
    return out


def with_pool(coverage: np.ndarray, inside: np.ndarray, candidate: int) -> np.ndarray:
    """`segments` where `candidate` must be a source that others follow: no segment runs over it or from it to the
    end."""
    out = segments(np.concatenate([coverage[: candidate + 1], inside[candidate, candidate + 1 :]]))
    out[:candidate, candidate + 1 :] = -np.inf
    out[candidate, len(coverage)] = -np.inf
    return out


def value_of(parts: np.ndarray, sources: tuple[int, ...]) -> float:
    """Sum of the segments that the sources begin."""
    ends = [*sources[1:], parts.shape[0]]
    return float(sum(parts[a, e] for a, e in zip(sources, ends, strict=True)))


def best_cuts(parts: np.ndarray, most: int) -> list[tuple[int, ...] | None]:
    """The best sources for every number of them, 1 to `most`; None where no such cut is allowed. Ties go to the
    earlier last source."""
    layers = parts.shape[0]
    value = np.full((most + 1, layers + 1), -np.inf)
    begin = np.zeros((most + 1, layers + 1), dtype=int)
    value[0, 0] = 0.0
    for n in range(1, most + 1):
        options = value[n - 1, :layers, None] + parts  # [begin of the last segment, its end]
        begin[n], value[n] = options.argmax(0), options.max(0)
    return [_walk_back(begin, n, layers) if np.isfinite(value[n, layers]) else None for n in range(1, most + 1)]


def _walk_back(begin: np.ndarray, n: int, end: int) -> tuple[int, ...]:
    sources: list[int] = []
    for count in range(n, 0, -1):
        end = int(begin[count, end])
        sources.append(end)
    return tuple(reversed(sources))


def check_number(number: int, layers: int) -> None:
    """Raise ValueError for a number of sources that the layers cannot hold."""
    if not 1 <= number <= layers:
        raise ValueError(f"num_sources={number}: must be at least 1 and at most the {layers} layers")


def best(coverage: np.ndarray, number: int) -> Placement:
    """The best `number` sources, single-level."""
    check_number(number, len(coverage))
    parts = segments(coverage)
    sources = best_cuts(parts, number)[-1]
    assert sources is not None, "some cut always exists"
    return Placement(sources, None, value_of(parts, sources) / len(coverage))


def best_joint(coverage: np.ndarray, inside: np.ndarray, number: int, latest: int | None = None) -> Placement | None:
    """The best sources and candidate source together, the latter at layer `latest` or before; None where there is no
    room for both (number below 2)."""
    check_number(number, len(coverage))
    found = []
    last = len(coverage) - 2
    for candidate in range(1 + (last if latest is None else min(latest, last))):
        parts = with_pool(coverage, inside, candidate)
        sources = best_cuts(parts, number)[-1]
        if sources is not None:
            found.append(Placement(sources, candidate, value_of(parts, sources) / len(coverage)))
    return max(found, key=lambda placement: placement.value, default=None)


def best_candidate(
    coverage: np.ndarray, inside: np.ndarray, sources: tuple[int, ...], latest: int | None = None
) -> Placement | None:
    """The best candidate source among given sources, each but the last, at layer `latest` or before; None with a single
    source."""
    found = [
        Placement(sources, c, value_of(with_pool(coverage, inside, c), sources) / len(coverage))
        for c in sources[:-1]
        if latest is None or c <= latest
    ]
    return max(found, key=lambda placement: placement.value, default=None)


def greedy(coverage: np.ndarray, number: int) -> tuple[int, ...]:
    """Layer 0, then always the layer that adds most."""
    check_number(number, len(coverage))
    parts = segments(coverage)
    sources: tuple[int, ...] = (0,)
    while len(sources) < number:
        rest = [layer for layer in range(len(coverage)) if layer not in sources]
        sources = max((tuple(sorted((*sources, layer))) for layer in rest), key=lambda more: value_of(parts, more))
    return sources


def every_nth(layers: int, number: int) -> tuple[int, ...]:
    """Evenly spread, layer 0 first."""
    check_number(number, layers)
    return tuple(i * layers // number for i in range(number))


def published(layers: int, number: int) -> tuple[int, ...]:
    """DeepSeek V4.1-Flash's pattern (of its 38 layers that select, sources at 0, 6, 12, 18, 22, 26, 30 and 34: sparser
    before the candidate source than after it) stretched to this depth and number."""
    check_number(number, layers)
    first, end = V41_LAYERS
    pattern = (np.array([*V41_SOURCES, end]) - first) / (end - first)
    at = np.interp(np.arange(number) * len(V41_SOURCES) / number, np.arange(len(pattern)), pattern)
    places = np.floor(at * layers + 1e-9).astype(int)
    for i in range(1, number):  # each layer once, however tight
        places[i] = max(places[i], places[i - 1] + 1)
    latest = layers - number + np.arange(number)
    return tuple(int(place) for place in np.minimum(places, latest))


METHODS = ("dynamic_programming", "greedy", "published", "every_nth")


def placements(
    coverage: np.ndarray, inside: np.ndarray | None, number: int, latest: int | None = None
) -> dict[tuple[str, bool], Placement]:
    """What each method places, (method, with a pool) -> placement. Dynamic programming searches sources and candidate
    together; the others get the best candidate for their sources, at layer `latest` or before. inside: None = no
    pool."""
    layers = len(coverage)
    sources = {
        "greedy": greedy(coverage, number),
        "published": published(layers, number),
        "every_nth": every_nth(layers, number),
    }
    parts = segments(coverage)
    out = {("dynamic_programming", False): best(coverage, number)}
    out |= {(name, False): Placement(at, None, value_of(parts, at) / layers) for name, at in sources.items()}
    if inside is not None:
        pooled = {name: best_candidate(coverage, inside, at, latest) for name, at in sources.items()}
        pooled["dynamic_programming"] = best_joint(coverage, inside, number, latest)
        out |= {(name, True): found for name, found in pooled.items() if found is not None}
    return out
