"""Finding copies: exact ones by hash, near ones by MinHash with banding (Broder 1997), checked by true Jaccard.

A document is the set of its runs of five words. Two documents are near-copies when the sets overlap
(|A & B| / |A | B|) by at least the threshold.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

_WORDS_A_SHINGLE = 5
_ROWS, _BANDS = 3, 42  # a pair with Jaccard 0.5 is compared with probability 0.996, one of 0.2 with 0.29
_REPRESENTATIVES = 8  # groups of one bucket a member is compared with; caps the work on huge clusters
# Scripts written without blanks give one word a character, or a whole sentence would be one word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")

_BLANK = re.compile(r"\s")
_PART = 1 << 20


def text_digest(text: str) -> bytes:
    """sha256 of the UTF-8 text."""
    return hashlib.sha256(text.encode("utf-8")).digest()


def first_copies(texts: Iterable[str]) -> tuple[list[int], int]:
    """Positions of the first copy of every different text, and how many texts had further copies (groups)."""
    seen: dict[bytes, int] = {}
    copies: dict[bytes, int] = {}
    for position, text in enumerate(texts):
        digest = text_digest(text)
        seen.setdefault(digest, position)
        copies[digest] = copies.get(digest, 0) + 1
    return list(seen.values()), sum(count > 1 for count in copies.values())


class Groups:
    """Disjoint sets of 0..n-1 that can be united; the label of a set is its smallest member."""

    def __init__(self, n: int) -> None:
        self._parent = list(range(n))

    def find(self, item: int) -> int:
        """The label of the item's set."""
        parent = self._parent
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def unite(self, a: int, b: int) -> None:
        """Makes the two items' sets one."""
        low, high = sorted((self.find(a), self.find(b)))
        self._parent[high] = low

    def labels(self) -> list[int]:
        """One label an item."""
        return [self.find(item) for item in range(len(self._parent))]


def near_duplicates(texts: Sequence[str], threshold: float) -> list[int]:
    """A group label for each text: near-copies share it, also through a chain of near-copies.

    Deterministic. The label is the position of the group's first text. Costs about 0.2 CPU-seconds a MB.
    """
    words = _Words()
    signatures = np.stack([_signature(words.shingles(text)) for text in texts]) if texts else np.empty((0, 0))

    @lru_cache(maxsize=4096)
    def shingles(position: int) -> np.ndarray:
        return words.shingles(texts[position])

    groups = Groups(len(texts))
    for bucket in _buckets(signatures):
        _unite_bucket(bucket, groups, lambda a, b: jaccard(shingles(a), shingles(b)) >= threshold)
    return groups.labels()


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Overlap of two sorted arrays of different values: shared / all."""
    shared = len(np.intersect1d(a, b, assume_unique=True))
    return shared / (len(a) + len(b) - shared)


def _unite_bucket(bucket: list[int], groups: Groups, alike: Callable[[int, int], bool]) -> None:
    """Unites the members of a bucket that are alike; each is compared with one member a group, not with all."""
    representatives: list[int] = []
    for member in bucket:
        if any(groups.find(member) == groups.find(other) for other in representatives):
            continue
        match = next((other for other in representatives[:_REPRESENTATIVES] if alike(member, other)), None)
        if match is None:
            representatives.append(member)
        else:
            groups.unite(member, match)


def _buckets(signatures: np.ndarray) -> Iterator[list[int]]:
    """Positions that agree in all rows of a band, band by band; only buckets of two or more."""
    for band in range(_BANDS if len(signatures) > 1 else 0):
        rows = np.ascontiguousarray(signatures[:, band * _ROWS : (band + 1) * _ROWS])
        keys = rows.view([("", rows.dtype)] * _ROWS).ravel()
        _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
        order = np.argsort(inverse, kind="stable")
        starts = np.concatenate([[0], np.cumsum(counts)])
        for bucket in np.flatnonzero(counts > 1):
            yield order[starts[bucket] : starts[bucket + 1]].tolist()


def _cuts(text: str) -> Iterator[int]:
    """Borders of parts of about a million characters that cut no word: a list of all words of a huge text is large."""
    at = 0
    while at < len(text):
        yield at
        blank = _BLANK.search(text, at + _PART)
        at = blank.start() if blank else len(text)
    yield len(text)


class _Words(dict[str, int]):
    """Word -> 64-bit hash, the same in every process (Python's own hash is salted)."""

    def __missing__(self, word: str) -> int:
        value = int.from_bytes(hashlib.blake2b(word.encode("utf-8"), digest_size=8).digest(), "little")
        self[word] = value
        return value

    def _hashes(self, text: str) -> np.ndarray:
        return np.array([self[word] for word in _WORD.findall(text)], dtype=np.uint64)

    def shingles(self, text: str) -> np.ndarray:
        """The sorted, different hashes (uint64) of the text's runs of words; never empty."""
        hashes = np.concatenate([self._hashes(text[a:b]) for a, b in pairwise(_cuts(text))] or [self._hashes("")])
        if not len(hashes):
            hashes = np.array([self[text]], dtype=np.uint64)
        width = min(_WORDS_A_SHINGLE, len(hashes))
        count = len(hashes) - width + 1
        runs = np.zeros(count, dtype=np.uint64)
        for offset in range(width):
            runs = runs * np.uint64(0x9E3779B97F4A7C15) + hashes[offset : offset + count]
        runs = np.sort(_mix(runs))
        return runs[np.concatenate([[True], runs[1:] != runs[:-1]])]  # np.unique hashes, 5 times slower here


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: spreads every bit over the whole word."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _hash_family() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(20240917))
    scale, shift = rng.integers(0, 2**64, size=(2, _ROWS * _BANDS, 1), dtype=np.uint64)
    return scale | np.uint64(1), shift


_SCALE, _SHIFT = _hash_family()


def _signature(shingles: np.ndarray, block: int = 2048) -> np.ndarray:
    """The smallest value (uint32) of each hash function over the shingles; blocks keep the work inside the cache."""
    smallest = np.full(len(_SCALE), 2**32 - 1, dtype=np.uint32)
    for start in range(0, len(shingles), block):
        hashed = (shingles[start : start + block] * _SCALE + _SHIFT) >> np.uint64(32)
        np.minimum(smallest, hashed.min(axis=1).astype(np.uint32), out=smallest)
    return smallest
