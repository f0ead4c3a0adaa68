"""Several sources in one stream of rows: which row of which source a sample is, as a function of its number."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lmforge.data.order import Integers, SampleOrder
from lmforge.data.packing import EMPTY, PackedRows


def quota_cycle(counts: Sequence[int]) -> Integers:
    """One cycle of source numbers, `counts[s]` times each `s`, such that after any n of them every source has had its
    share of n rounded down or up, never less and never more.

    The quota method (Balinski and Young 1975): of the sources that are still below their share of n + 1, the one whose
    next turn is due first.
    """
    cycle, had = np.empty(sum(counts), dtype=np.int64), [0] * len(counts)
    for n in range(len(cycle)):
        behind = [s for s, count in enumerate(counts) if had[s] * len(cycle) < count * (n + 1)]
        cycle[n] = due = min(behind, key=lambda s: (had[s] + 1) / counts[s])
        had[due] += 1
    return cycle


class MixedOrder:
    """Global sample number -> row of `MixedRows`: cycles of the shares, and in them each source's own epochs, every one
    of which holds each of its rows once in an order of its own. With one source the same as `SampleOrder`."""

    def __init__(self, sizes: Sequence[int], counts: Sequence[int], seed: int):
        self.seed = seed
        self.orders = [SampleOrder(size, seed) for size in sizes]
        self.first = np.cumsum([0, *sizes])
        self.counts = np.array(counts, dtype=np.int64)
        self.cycle = quota_cycle(counts)
        turns = self.cycle[:, None] == np.arange(len(counts))
        self.earlier = (np.cumsum(turns, axis=0) - turns)[turns]  # turns of the same source before this one

    def place(self, numbers: Integers) -> tuple[Integers, Integers]:
        """Source of each sample, and its number among the samples of that source."""
        cycles, at = np.divmod(numbers, len(self.cycle))
        source = self.cycle[at]
        return source, cycles * self.counts[source] + self.earlier[at]

    def __call__(self, numbers: Integers) -> Integers:
        source, own = self.place(numbers)
        rows = np.empty_like(numbers)
        for number in np.unique(source):
            here = source == number
            rows[here] = self.first[number] + self.orders[number](own[here])
        return rows

    def taken(self, samples: int) -> Integers:
        """Rows of each source among the first `samples`."""
        cycles, at = divmod(samples, len(self.cycle))
        return cycles * self.counts + np.bincount(self.cycle[:at], minlength=len(self.counts))


class MixedRows:
    """The rows of several sources one after the other."""

    def __init__(self, parts: Sequence[PackedRows]):
        self.parts = list(parts)
        self.first = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self.first[-1])

    def batch(self, rows: Integers) -> dict[str, Tensor]:
        """As `PackedRows.batch`; an `EMPTY` row is anybody's."""
        owner = np.searchsorted(self.first, np.maximum(rows, 0), side="right") - 1
        found: dict[str, Tensor] = {}
        for number in np.unique(owner):
            here = owner == number
            own = np.where(rows[here] == EMPTY, EMPTY, rows[here] - self.first[number])
            for name, values in self.parts[number].batch(own).items():
                if name not in found:
                    found[name] = values.new_empty((len(rows), *values.shape[1:]))
                found[name][torch.from_numpy(here)] = values
        return found
