"""Windows: everything one rank does for one optimizer update, fetched by its number."""

import time
from typing import NotRequired, Protocol, TypedDict

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from lmforge.config.batch import BatchPlan
from lmforge.data.order import Integers
from lmforge.data.packing import EMPTY, IGNORED
from lmforge.data.randomness import seed_streams


class Rows(Protocol):
    """Rows by number; `EMPTY` is a row without targets."""

    def __len__(self) -> int: ...

    def batch(self, rows: Integers) -> dict[str, Tensor]: ...


class Order(Protocol):
    """Global sample number -> row."""

    seed: int
    shuffle: bool

    def __call__(self, numbers: Integers) -> Integers: ...


class Window(TypedDict):
    """One rank's share of one update."""

    micro_batches: list[dict[str, Tensor]]
    targets: int  # target tokens in these micro-batches
    samples: int  # rows with content
    seconds: float  # time taken to build it
    source: NotRequired[str]  # where all of its rows come from, when that is to be scored apart


class Windows(Dataset[Window]):
    """Window number `u` covers the next `sequences` global samples after window `u - 1`, cut at `samples`.

    The endless stream of epochs is cut without regard to their borders, so a batch may straddle two epochs; only the
    very last window of a run may be short. Slots without a sample hold an `EMPTY` row, so that every rank runs the
    same number of equally shaped micro-batches. The union over ranks is the same for any number of ranks or workers.
    `start` = (window, sample): where a resumed run goes on, which is not a multiple of `sequences` when its last window
    was a short one. Rows that draw from the global random streams get numbers of (seed, rank, window) alone.
    """

    def __init__(
        self,
        rows: Rows,
        order: Order,
        plan: BatchPlan,
        rank: int,
        samples: int | None = None,
        start: tuple[int, int] = (0, 0),
    ):
        self.rows, self.order, self.plan, self.rank, self.samples = rows, order, plan, rank, samples
        self.start_update, self.start_sample = start

    def numbers(self, update: int) -> Integers:
        """Global sample numbers `[accumulation, micro]` of this rank, `EMPTY` where there is none."""
        plan = self.plan
        slots = np.arange(plan.accumulation * plan.world * plan.micro)
        first = self.start_sample + (update - self.start_update) * plan.sequences
        number = np.where(slots < plan.sequences, first + slots, EMPTY)
        if self.samples is not None:
            number = np.where(number < self.samples, number, EMPTY)
        return number.reshape(plan.accumulation, plan.world, plan.micro)[:, self.rank]

    def __getitem__(self, update: int) -> Window:
        began = time.perf_counter()
        seed_streams(self.order.seed, self.rank, update, 0)
        numbers = self.numbers(update)
        rows = np.where(numbers == EMPTY, EMPTY, self.order(np.maximum(numbers, 0).ravel()).reshape(numbers.shape))
        micro_batches = [self.rows.batch(row) for row in rows]
        return {
            "micro_batches": micro_batches,
            "targets": sum(int((batch["labels"] != IGNORED).sum()) for batch in micro_batches),
            "samples": int((numbers != EMPTY).sum()),
            "seconds": time.perf_counter() - began,
        }

    def __len__(self) -> int:
        if self.samples is None:
            raise TypeError("an endless stream of windows has no length")
        return self.start_update + -(-max(0, self.samples - self.start_sample) // self.plan.sequences)
