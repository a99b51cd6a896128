"""The slow, obvious reference: DESIGN section 2, written as loops over rows, positions and tokens.

It imports nothing of the package it judges, forms every softmax in full, and tiles nothing. Read it top to bottom.

Shapes: h query heads, hk KV heads, s query rows, t key tokens (one whole document, so s == t and query row i is at
absolute position i), d head dim, dv value dim, g selection groups, n = t // ratio compressed positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

METRICS = (
    "recall",
    "coverage",
    "oracle_coverage",
    "relative_coverage",
    "total_coverage",
    "pool_recall",
    "pool_coverage",
    "in_pool_recall",
    "top1_hit",
    "worst_head_coverage",
    "output_error",
    "density",
)


# --- dense attention -------------------------------------------------------------------------------------------------


def attention_logits(q, k, scale: float, softcap: float | None = None, window: int | None = None) -> np.ndarray:
    """Scaled, soft-capped logits, -inf where a query may not look. q [h,s,d], k [hk,t,d] -> float64 [h,s,t].

    `window` is the model's own sliding window: a query sees its last `window` tokens, its own included.
    """
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    (h, s, _), (hk, t, _) = q.shape, k.shape
    if s != t or h % hk:
        raise ValueError(f"q {q.shape} and k {k.shape}: need s == t and query heads a multiple of KV heads")
    logits = np.full((h, s, t), -np.inf)
    for head in range(h):
        keys = k[head // (h // hk)]
        for row in range(s):
            # Not a matmul: BLAS may round equal keys differently by column, and ties are part of the definition.
            values = (keys * q[head, row]).sum(axis=1) * scale
            if softcap is not None:
                values = softcap * np.tanh(values / softcap)
            first = 0 if window is None else max(0, row - window + 1)
            logits[head, row, first : row + 1] = values[first : row + 1]
    return logits


def softmax(logits: np.ndarray, sink: float | None = None) -> np.ndarray:
    """Softmax of one row [t]; the sink logit adds to the denominator and takes no value. All -inf gives zeros."""
    peak = max([*logits, -np.inf if sink is None else sink])
    if peak == -np.inf:
        return np.zeros(len(logits))
    weights = [math.exp(x - peak) for x in logits]
    denominator = math.fsum(weights) + (0.0 if sink is None else math.exp(sink - peak))
    return np.array(weights) / denominator


def dense_probabilities(
    q, k, scale: float, softcap: float | None = None, sink=None, window: int | None = None
) -> np.ndarray:
    """The model's own softmax: q [h,s,d], k [hk,t,d], sink [h] logits or None -> p float64 [h,s,t].

    Rows sum to 1, or to less than 1 with a sink. Query head i uses KV head i // (h // hk).
    """
    return probabilities(attention_logits(q, k, scale, softcap, window), sink)


def compressed_logits(q, k, scale: float, softcap: float | None, ratio: int) -> np.ndarray:
    """Logits of compressed keys: q [h,s,d], k [hk,n,d] -> [h,s,n]; a position is seen once its last token is past."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    logits = np.full((len(q), q.shape[1], k.shape[1]), -np.inf)
    for head in range(len(q)):
        for row in range(q.shape[1]):
            for j in range(k.shape[1]):
                if j * ratio + ratio - 1 <= row:
                    value = float((q[head, row] * k[head // (len(q) // len(k)), j]).sum()) * scale
                    logits[head, row, j] = value if softcap is None else softcap * math.tanh(value / softcap)
    return logits


def probabilities(logits: np.ndarray, sink=None) -> np.ndarray:
    """A softmax a head and row: logits [h,s,e] -> float64 [h,s,e]."""
    p = np.zeros_like(logits)
    for head in range(logits.shape[0]):
        for row in range(logits.shape[1]):
            p[head, row] = softmax(logits[head, row], None if sink is None else float(sink[head]))
    return p


def head_mean(p: np.ndarray) -> list[float]:
    """M of one row: p [heads,t] -> mean over the heads, after the softmax. fsum: no summation order to argue over."""
    return [math.fsum(p[:, u]) / len(p) for u in range(p.shape[1])]


def position_mass(mass: Sequence[float], ratio: int, visible: int) -> list[float]:
    """D of one row: token mass [t] -> mass of each visible compressed position [visible]."""
    return [math.fsum(mass[j * ratio : (j + 1) * ratio]) for j in range(visible)]


# --- selection -------------------------------------------------------------------------------------------------------


def best(scores: Sequence[float], among: Sequence[int], count: int) -> list[int]:
    """The `count` best of `among`, ties to the lowest, sorted by index. -inf means unreachable: never returned."""
    ranked = sorted((i for i in among if scores[i] != -math.inf), key=lambda i: (-scores[i], i))
    return sorted(ranked[:count])


def adjusted_scores(
    scores: Sequence[float], row: int, visible: int, ratio: int, window: int, exclude_window: bool, sinks: int
) -> list[float]:
    """Scores [n] -> [visible]: sink positions +inf; positions wholly inside the window -inf, if those are excluded."""
    out = [float(scores[j]) for j in range(visible)]
    if any(math.isnan(x) for x in out):
        raise ValueError(f"row {row}: NaN among the visible scores")
    for j in range(visible):
        if exclude_window and j * ratio >= row - window + 1:
            out[j] = -math.inf
        if j < sinks:  # sinks are the lowest positions, so the tie rule keeps them in order and ahead of a real +inf
            out[j] = math.inf
    return out


def candidate_pool(scores: Sequence[float], topk_blocks: int, block_size: int) -> list[int]:
    """Adjusted scores of the candidate source layer [visible] -> the visible positions of the blocks it keeps.

    The newest block counts as +inf, and takes one of the `topk_blocks` places like any other.
    """
    visible = len(scores)
    newest = (visible - 1) // block_size
    block_scores = [max(scores[b * block_size : (b + 1) * block_size]) for b in range(newest + 1)]
    block_scores[newest] = math.inf
    kept = best(block_scores, range(newest + 1), topk_blocks)
    return [j for j in range(visible) if j // block_size in kept]


def select(
    row: int, visible: int, scores, pool_scores, *, ratio, topk, window, topk_blocks, block_size, exclude_window, sinks
) -> tuple[list[int], list[int] | None]:
    """Index scores [n] and the source layer's [n] (None: single level) of one row -> selection S, pool C or None.

    C holds whole blocks, excluded window positions among them; S never does.
    """
    adjust = (row, visible, ratio, window, exclude_window, sinks)
    pool = None
    if pool_scores is not None:
        pool = candidate_pool(adjusted_scores(pool_scores, *adjust), topk_blocks, block_size)
    among = range(visible) if pool is None else pool
    return best(adjusted_scores(scores, *adjust), among, topk), pool


def attended_tokens(row: int, selected: Sequence[int], ratio: int, window: int) -> list[int]:
    """Tokens really attended: those of the selected positions, the window, and the incomplete tail group."""
    visible = (row + 1) // ratio
    tokens = {u for j in selected for u in range(j * ratio, (j + 1) * ratio)}
    tokens |= set(range(max(0, row - window + 1), row + 1))
    tokens |= set(range(visible * ratio, row + 1))
    return sorted(tokens)


# --- metrics ---------------------------------------------------------------------------------------------------------


def ratio_or_none(numerator: float, denominator: float) -> float | None:
    return None if denominator == 0 else numerator / denominator


def total(mass: Sequence[float], chosen: Sequence[int]) -> float:
    return math.fsum(mass[j] for j in chosen)


def worst_head_coverage(p: np.ndarray, selected: Sequence[int], ratio: int, visible: int) -> float | None:
    """min over heads of selected / visible mass; p [heads,t] of one row. Heads without visible mass do not count."""
    coverages = []
    for head in range(len(p)):
        mass = position_mass(p[head], ratio, visible)
        if math.fsum(mass) > 0:
            coverages.append(total(mass, selected) / math.fsum(mass))
    return min(coverages, default=None)


def output_error(logits: np.ndarray, values: np.ndarray, sinks, tokens: Sequence[int]) -> float | None:
    """Mean over heads of |o_S - o| / |o|; logits [heads,t] of one row, values [heads,t,dv], sinks [heads] or None.

    The softmax is taken again over the attended tokens alone, the sink staying in its denominator. Heads whose dense
    output is exactly zero have no relative error and do not count.
    """
    errors = []
    for head in range(len(logits)):
        sink = None if sinks is None else float(sinks[head])
        dense = softmax(logits[head], sink) @ values[head]
        sparse = softmax(logits[head, tokens], sink) @ values[head, tokens]
        if np.linalg.norm(dense) > 0:
            errors.append(float(np.linalg.norm(sparse - dense) / np.linalg.norm(dense)))
    return math.fsum(errors) / len(errors) if errors else None


def set_metrics(mass: Sequence[float], topk: int, selected: list[int], oracle: list[int], pool: list[int] | None):
    """The metrics of one row that need D [visible] and the sets alone."""
    visible = len(mass)
    chosen, wanted, everything = set(selected), set(oracle), math.fsum(mass)
    coverage = ratio_or_none(total(mass, selected), everything)
    oracle_coverage = ratio_or_none(total(mass, oracle), everything)
    out: dict[str, Any] = {
        "recall": len(chosen & wanted) / min(topk, visible),
        "coverage": coverage,
        "oracle_coverage": oracle_coverage,
        "relative_coverage": None if coverage is None else ratio_or_none(coverage, oracle_coverage),
        "top1_hit": int(best(mass, range(visible), 1)[0] in chosen),
        "pool_recall": None,
        "pool_coverage": None,
        "in_pool_recall": None,
    }
    if pool is not None:
        reachable = wanted & set(pool)
        out["pool_recall"] = len(reachable) / min(topk, visible)
        out["pool_coverage"] = ratio_or_none(total(mass, pool), everything)
        out["in_pool_recall"] = ratio_or_none(len(chosen & wanted), len(reachable))
    return out


def head_groups(h: int, hk: int, share: str) -> list[list[int]]:
    """The query heads of each selection group."""
    if share == "layer":
        return [list(range(h))]
    if share == "kv_head":
        return [[i for i in range(h) if i // (h // hk) == group] for group in range(hk)]
    raise ValueError(f"share={share!r}: expected 'layer' or 'kv_head'")


def measure_row(
    row: int, p, logits, values, sinks, selected: list[int], pool: list[int] | None, *, ratio, topk, window
) -> dict[str, Any]:
    """One row with something visible, one group: p and logits [heads,t], values [heads,t,dv], sinks [heads] or None."""
    visible = (row + 1) // ratio
    token_mass = head_mean(p)
    mass = position_mass(token_mass, ratio, visible)
    oracle = best(mass, range(visible), topk)
    tokens = attended_tokens(row, selected, ratio, window)
    return set_metrics(mass, topk, selected, oracle, pool) | {
        "selected": selected,
        "oracle": oracle,
        "pool": pool,
        "total_coverage": total(token_mass, tokens),
        "density": len(tokens) / (row + 1),
        "worst_head_coverage": worst_head_coverage(p, selected, ratio, visible),
        "output_error": output_error(logits, values, sinks, tokens),
    }


def measure_compressed_row(
    row: int, t: int, p, logits, values, sinks, selected: list[int], pool: list[int] | None, *, ratio, topk, window
) -> dict[str, Any]:
    """The same where the layer attends to compressed keys: p, logits and values hold t raw tokens, then the positions.

    Nothing is attended raw but the window. A compressed position is an entry of its own beside the tokens it stands
    for, and its mass is what that entry gets; `density` counts tokens, each once.
    """
    visible = (row + 1) // ratio
    mass = head_mean(p[:, t : t + visible])
    oracle = best(mass, range(visible), topk)
    raw = list(range(max(0, row - window + 1), row + 1))
    stood_for = {u for j in selected for u in range(j * ratio, (j + 1) * ratio)}
    return set_metrics(mass, topk, selected, oracle, pool) | {
        "selected": selected,
        "oracle": oracle,
        "pool": pool,
        "total_coverage": total(head_mean(p), [*raw, *(t + j for j in selected)]),
        "density": len(stood_for | set(raw)) / (row + 1),
        "worst_head_coverage": worst_head_coverage(p[:, t:], selected, 1, visible),
        "output_error": output_error(logits, values, sinks, [*raw, *(t + j for j in selected)]),
    }


def index_source(layer: int, sources: Sequence[int] | None) -> int | None:
    """The layer whose selection `layer` uses: the latest source at or before it; None: there is none yet."""
    found = layer if sources is None else None
    for source in sources or ():
        if source <= layer:
            found = source
    return found


def measure(
    q,
    k,
    v,
    rows: Sequence[int],
    *,
    scale: float,
    softcap: float | None = None,
    sink=None,
    model_window: int | None = None,
    ratio: int,
    topk: int,
    window: int,
    share: str = "layer",
    index_scores,
    pool_scores=None,
    topk_blocks: int | None = None,
    block_size: int | None = None,
    exclude_window: bool = False,
    sinks: int = 0,
    compressed=None,
) -> list[dict[str, Any]]:
    """Every metric of one layer and one cell: one dict per (group, row), groups outermost.

    q [h,s,d], k [hk,t,d], v [hk,t,dv]; `rows` absolute positions; `index_scores` and `pool_scores` [g, len(rows), n],
    entries at or beyond the visible length ignored. `window` is the cell's (always attended raw); `model_window` is the
    layer's own sliding window, part of the dense probability. `sink` [h] are logits, `sinks` a number of positions.
    `compressed`: keys [hk,n,d] and values [hk,n,dv] that stand beside the raw window in one softmax.
    """
    if topk < 1 or (pool_scores is not None and (not topk_blocks or not block_size)):
        raise ValueError(f"topk={topk}, topk_blocks={topk_blocks}, block_size={block_size}: need at least 1")
    h, hk, t = len(q), len(k), len(k[0])
    logits, values = attention_logits(q, k, scale, softcap, model_window), np.asarray(v, np.float64)
    if compressed is not None:
        more = compressed_logits(q, compressed[0], scale, softcap, ratio)
        logits, values = np.concatenate([logits, more], 2), np.concatenate([values, compressed[1]], 1)
    p, values = probabilities(logits, sink), values[[i // (h // hk) for i in range(h)]]
    cell = {"ratio": ratio, "topk": topk, "window": window, "exclude_window": exclude_window, "sinks": sinks}
    cell |= {"topk_blocks": topk_blocks, "block_size": block_size}
    results = []
    for group, heads in enumerate(head_groups(h, hk, share)):
        for i, row in enumerate(map(int, rows)):
            visible = (row + 1) // ratio
            result = {"row": row, "group": group, "visible": visible, "saturated": visible <= topk}
            result |= {"selected": [], "oracle": [], "pool": None if pool_scores is None else []}
            result |= dict.fromkeys(METRICS)
            results.append(result)
            if visible > 0:
                pool_row = None if pool_scores is None else pool_scores[group][i]
                chosen = select(row, visible, index_scores[group][i], pool_row, **cell)
                sink_row = None if sink is None else [float(sink[head]) for head in heads]
                dense = (p[heads, row], logits[heads, row], values[heads], sink_row)
                options = {"ratio": ratio, "topk": topk, "window": window}
                if compressed is None:
                    result |= measure_row(row, *dense, *chosen, **options)
                else:
                    result |= measure_compressed_row(row, t, *dense, *chosen, **options)
    return results


def average(results: Sequence[dict[str, Any]], metric: str) -> float | None:
    """Mean over the rows that count: unsaturated, something visible, the metric defined. None if there are none."""
    kept = [r[metric] for r in results if not r["saturated"] and r["visible"] > 0 and r[metric] is not None]
    return math.fsum(kept) / len(kept) if kept else None


def position_bucket(row: int) -> int:
    """Largest power of two <= max(row, 1)."""
    bucket = 1
    while bucket * 2 <= row:
        bucket *= 2
    return bucket
