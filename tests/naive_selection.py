"""Slow, obvious references of visibility, pool and top-k: Python loops over one row of scores at a time."""

import math


def visible(position: int, ratio: int) -> int:
    """Groups whose last token is at or before `position`, counted one by one."""
    return sum(1 for j in range(position + 1) if j * ratio + ratio - 1 <= position)


def order(scores: list[float], allowed: set[int]) -> list[int]:
    """Allowed positions with a finite-or-+inf score, best first, ties to the lowest position."""
    return sorted((j for j in allowed if scores[j] != -math.inf), key=lambda j: (-scores[j], j))


def topk(scores: list[float], length: int, k: int, pool: set[int] | None = None) -> set[int]:
    """The k best of the first `length` positions, inside the pool if there is one."""
    allowed = set(range(length)) if pool is None else set(range(length)) & pool
    return set(order(scores, allowed)[:k])


def pool(scores: list[float], length: int, topk_blocks: int, block_size: int) -> set[int]:
    """Positions (visible or not) of the kept blocks; the block of position length - 1 takes the first place."""
    best: dict[int, float] = {}
    for j in range(length):
        best[j // block_size] = max(best.get(j // block_size, -math.inf), scores[j])
    ranked = sorted((b for b in best if best[b] != -math.inf), key=lambda b: (-best[b], b))
    newest = (length - 1) // block_size
    if length:
        ranked = [newest] + [b for b in ranked if b != newest]
    return {j for b in ranked[:topk_blocks] for j in range(b * block_size, (b + 1) * block_size) if j < len(scores)}
