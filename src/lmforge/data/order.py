"""The order of samples as a pure function of (seed, global sample number): no state, O(1) seek, any number of ranks."""

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
_ROUNDS = 6
TOGETHER = 2048  # samples: numpy's calls, not its work, are what a few of them cost


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele et al. 2014): every input bit changes about half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: Integers, size: int, key: NDArray[np.uint64]) -> Integers:
    """Place of each `index` in a pseudo-random permutation of `range(size)`; `key` may differ per element.

    A Feistel network over the next even power of two, walked along its cycle until it falls inside the range
    (Black & Rogaway 2002). Costs the same wherever it starts; nothing of length `size` is stored.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    value = index.astype(np.uint64).ravel()
    keys = [np.broadcast_to(mix(key + np.uint64(step)), index.shape).ravel() for step in range(_ROUNDS)]
    walking = np.arange(value.size)
    while walking.size:
        left, right = value[walking] >> shift, value[walking] & mask
        for each in keys:
            left, right = right, left ^ (mix(right ^ each[walking]) & mask)
        value[walking] = (left << shift) | right
        walking = walking[value[walking] >= np.uint64(size)]
    return value.astype(np.int64).reshape(index.shape)


class SampleOrder:
    """Global sample number -> row: every epoch holds each of `size` rows once, in an order of its own."""

    def __init__(self, size: int, seed: int, shuffle: bool = True):
        self.size, self.seed, self.shuffle = size, seed, shuffle

        self.known: tuple[int, Integers] = (0, np.empty(0, np.int64))

    def __call__(self, numbers: Integers) -> Integers:
        """The rows of any samples; those around the last ones asked for are at hand."""
        if not numbers.size:
            return numbers
        first, last = int(numbers.min()), int(numbers.max())
        if last - first > TOGETHER:
            return self._rows(numbers)
        start, rows = self.known
        if not start <= first <= last < start + len(rows):
            self.known = start, rows = first, self._rows(np.arange(first, first + 2 * TOGETHER))
        return rows[numbers - start]

    def _rows(self, numbers: Integers) -> Integers:
        epoch, index = np.divmod(numbers, self.size)
        if not self.shuffle:
            return index
        with np.errstate(over="ignore"):
            key = mix(mix(np.uint64(self.seed) + np.zeros(1, np.uint64)) + epoch.astype(np.uint64))
            return permute(index, self.size, key)
