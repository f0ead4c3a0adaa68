"""Near names for misspelt words."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

CUTOFF = 0.5


def edit_distance(a: str, b: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbours that turn `a` into `b` (optimal string alignment)."""
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]


def similarity(a: str, b: str) -> float:
    """0 = nothing in common, 1 = equal, upper and lower case alike."""
    a, b = a.lower(), b.lower()
    longest = max(len(a), len(b)) or 1
    return max(SequenceMatcher(None, a, b).ratio(), 1 - edit_distance(a, b) / longest)


def nearest(word: str, options: Iterable[str], cutoff: float = CUTOFF) -> str | None:
    """The option most like `word`, or None when none is near. Ties go to the option that comes first."""
    return _best([(similarity(word, option), option) for option in options], cutoff)


def nearest_key(key: str, keys: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Like `nearest` for dotted keys: a bare or misplaced last part (`lr`, `model.lr`) finds `optimizer.lr` too."""
    leaf = key.rpartition(".")[2]
    scored = []
    for option in keys:
        same_leaf = 0.9 * similarity(leaf, option.rpartition(".")[2])
        scored.append((max(similarity(key, option), same_leaf), option))
    return _best(scored, cutoff)


def did_you_mean(name: str | None) -> str:
    return f"; did you mean {name}?" if name else ""


def _best(scored: list[tuple[float, str]], cutoff: float) -> str | None:
    score, option = max(scored, key=lambda pair: pair[0], default=(0.0, ""))
    return option if score >= cutoff else None
