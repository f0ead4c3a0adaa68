"""Finding copies: exact ones by hash, near ones by MinHash with banding (Broder 1997), checked by true Jaccard.

A document is the set of its runs of five words. Two documents are near-copies when the sets overlap
(|A & B| / |A | B|) by at least the threshold.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lmforge.data.order import mix

_WORDS_A_SHINGLE = 5
_ROWS, BANDS = 3, 42  # a pair with Jaccard 0.5 is compared with probability 0.996, one of 0.2 with 0.29
_REPRESENTATIVES = 8  # groups of one bucket a member is compared with; caps the work on huge clusters
# Scripts written without blanks give one word a character, or a whole sentence would be one word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")

_BLANK = re.compile(r"\s")
_PART = 1 << 20
_HELD = 64 << 20  # bytes of shingles kept for comparing
_REMEMBERED = 1 << 18  # words whose hashes are kept


def first_copies(digests: np.ndarray) -> tuple[np.ndarray, int]:
    """Positions of the first copy of every different digest, rising, and how many had further copies (groups)."""
    order = np.argsort(digests, kind="stable")
    first, counts = _runs(digests[order])
    return np.sort(order[first]), int((counts > 1).sum())


def _runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and length of each run of equal values."""
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])) if len(values) else np.empty(0, int)
    return starts, np.diff(np.append(starts, len(values)))


class Groups:
    """Disjoint sets of 0..n-1 that can be united; the label of a set is its smallest member."""

    def __init__(self, n: int) -> None:
        self._parent = np.arange(n)

    def find(self, item: int) -> int:
        """The label of the item's set."""
        parent = self._parent
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = int(parent[item])
        return item

    def unite(self, a: int, b: int) -> None:
        """Makes the two items' sets one."""
        low, high = sorted((self.find(a), self.find(b)))
        self._parent[high] = low

    def unite_equal(self, values: np.ndarray) -> None:
        """Unites all items whose values are equal."""
        order = np.argsort(values, kind="stable")
        for start, count in zip(*_runs(values[order]), strict=True):
            for other in order[start + 1 : start + count]:
                self.unite(int(order[start]), int(other))

    def labels(self) -> np.ndarray:
        """One label an item, int64."""
        labels = self._parent
        while not np.array_equal(labels, labels[labels]):
            labels = labels[labels]
        return labels


class Bands(NamedTuple):
    """How near-copies are searched: `keys` gives one band's uint64 value of each document, `shingles` the words of one
    document."""

    keys: Callable[[int], np.ndarray]
    shingles: Callable[[int], np.ndarray]


def near_duplicates(n: int, bands: Bands, threshold: float) -> np.ndarray:
    """A group label (int64) for each of `n` documents: near-copies share it, also through a chain of near-copies.

    Deterministic. The label is the position of the group's first document. Memory: some arrays of n numbers.
    """
    groups, shingles = Groups(n), _Recent(bands.shingles)
    for band in range(BANDS if n > 1 else 0):
        for bucket in _buckets(bands.keys(band)):
            _unite_bucket(bucket, groups, lambda a, b: jaccard(shingles(a), shingles(b)) >= threshold)
    return groups.labels()


class _Recent:
    """The arrays asked for last, kept while they are small together."""

    def __init__(self, make: Callable[[int], np.ndarray]) -> None:
        self._make, self._size = make, 0
        self._held: OrderedDict[int, np.ndarray] = OrderedDict()

    def __call__(self, position: int) -> np.ndarray:
        if position in self._held:
            self._held.move_to_end(position)
            return self._held[position]
        array = self._held[position] = self._make(position)
        self._size += array.nbytes
        while self._size > _HELD and len(self._held) > 1:
            self._size -= self._held.popitem(last=False)[1].nbytes
        return array


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
        match = next((other for other in representatives if alike(member, other)), None)
        if match is not None:
            groups.unite(member, match)
        elif len(representatives) < _REPRESENTATIVES:
            representatives.append(member)


def _buckets(keys: np.ndarray) -> Iterator[list[int]]:
    """Positions with equal keys, rising; only buckets of two or more."""
    order = np.argsort(keys, kind="stable")
    starts, counts = _runs(keys[order])
    for bucket in np.flatnonzero(counts > 1):
        yield order[starts[bucket] : starts[bucket] + counts[bucket]].tolist()


def _cuts(text: str) -> Iterator[int]:
    """Borders of parts of about a million characters that cut no word: a list of all words of a huge text is large."""
    at = 0
    while at < len(text):
        yield at
        blank = _BLANK.search(text, at + _PART)
        at = blank.start() if blank else len(text)
    yield len(text)


class Words(dict[str, int]):
    """Word -> 64-bit hash, the same in every process (Python's own hash is salted). Forgets when it grows large."""

    def __missing__(self, word: str) -> int:
        if len(self) >= _REMEMBERED:
            self.clear()
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
        runs = np.sort(mix(runs))
        return runs[np.concatenate([[True], runs[1:] != runs[:-1]])]  # np.unique hashes, 5 times slower here


def _hash_family() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(20240917))
    scale, shift = rng.integers(0, 2**64, size=(2, _ROWS * BANDS, 1), dtype=np.uint64)
    return scale | np.uint64(1), shift


_SCALE, _SHIFT = _hash_family()


def band_keys(shingles: np.ndarray) -> np.ndarray:
    """One uint64 a band, equal where the smallest values of the band's hash functions are."""
    rows = _smallest(shingles).reshape(BANDS, _ROWS).astype(np.uint64)
    keys = np.zeros(BANDS, dtype=np.uint64)
    for row in rows.T:
        keys = mix(keys * np.uint64(0x9E3779B97F4A7C15) + row)
    return keys


def _smallest(shingles: np.ndarray, block: int = 2048) -> np.ndarray:
    """The smallest value (uint32) of each hash function over the shingles; blocks keep the work inside the cache."""
    smallest = np.full(len(_SCALE), 2**32 - 1, dtype=np.uint32)
    for start in range(0, len(shingles), block):
        hashed = (shingles[start : start + block] * _SCALE + _SHIFT) >> np.uint64(32)
        np.minimum(smallest, hashed.min(axis=1).astype(np.uint32), out=smallest)
    return smallest
