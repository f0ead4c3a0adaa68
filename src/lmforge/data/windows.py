"""Windows: everything one rank does for one optimizer update, fetched by its number."""

import sys
import time
from typing import NotRequired, Protocol, TypedDict

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from lmforge.config.batch import BatchPlan
from lmforge.data.order import Integers
from lmforge.data.packing import EMPTY, IGNORED
from lmforge.data.randomness import seed_streams, state_of_streams

AHEAD, MOST = 1 << 17, 64  # tokens that are built at once, and windows


Batch = dict[str, Tensor]


class Rows(Protocol):
    """Rows by number; `EMPTY` is a row without targets."""

    def __len__(self) -> int: ...

    def batch(self, rows: Integers) -> Batch: ...


class Order(Protocol):
    """Global sample number -> row."""

    seed: int

    def __call__(self, numbers: Integers) -> Integers: ...


class Window(TypedDict):
    """One rank's share of one update."""

    micro_batches: list[Batch]
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
        self.built: list[Window] = []
        self.built_from = 0

    def numbers(self, updates: int | Integers) -> Integers:
        """Global sample numbers `[windows * accumulation, micro]` of this rank, `EMPTY` where there is none."""
        plan = self.plan
        slots = np.arange(plan.accumulation * plan.dp * plan.micro)
        first = self.start_sample + (np.atleast_1d(updates)[:, None] - self.start_update) * plan.sequences
        number = np.where(slots < plan.sequences, first + slots, EMPTY)
        if self.samples is not None:
            number = np.where(number < self.samples, number, EMPTY)
        return number.reshape(-1, plan.dp, plan.micro)[:, self.rank]

    def __getitem__(self, update: int) -> Window:
        if not 0 <= (at := update - self.built_from) < len(self.built):
            self.built_from, at = update, 0
            self.built = self._drawn(update) if getattr(self.rows, "draws", False) else self._ahead(update)
        return self.built[at]

    def _drawn(self, update: int) -> list[Window]:
        """One window alone, a call a micro-batch: what its rows draw must hang on its number only."""
        seed_streams(self.order.seed, self.rank, update, 0)
        began = time.perf_counter()
        numbers, rows = self._rows(update, 1)
        micro = [self.rows.batch(row) for row in rows]
        return self._windows(micro, [sum(int((b["labels"] != IGNORED).sum()) for b in micro)], numbers, began)

    def _ahead(self, update: int) -> list[Window]:
        """The windows from `update` on that hold `AHEAD` tokens: calls of numpy, not its work, are what one costs."""
        fitting = AHEAD // (self.plan.accumulation * self.plan.micro * self.plan.context)
        count = 1 if get_worker_info() else max(1, min(fitting, MOST, self._last() - update))
        streams = None if self.built else state_of_streams()
        built = self._together(update, count)
        if streams and streams != state_of_streams():
            raise RuntimeError(f"{type(self.rows).__name__} uses the global random streams; it needs `draws = True`")
        return built

    def _together(self, update: int, count: int) -> list[Window]:
        began = time.perf_counter()
        numbers, rows = self._rows(update, count)
        batch = self.rows.batch(rows.ravel())
        targets = np.count_nonzero(batch["labels"].view(count, -1).numpy() != IGNORED, axis=1).tolist()
        parts = {name: values.split(self.plan.micro) for name, values in batch.items()}
        micro = [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
        return self._windows(micro, targets, numbers, began)

    def _rows(self, update: int, count: int) -> tuple[Integers, Integers]:
        """Sample numbers of `count` windows, and the rows they stand for, each `[count * accumulation, micro]`."""
        numbers = self.numbers(np.arange(update, update + count))
        return numbers, np.where(numbers == EMPTY, EMPTY, self.order(np.maximum(numbers, 0)))

    def _windows(self, micro: list[Batch], targets: list[int], numbers: Integers, began: float) -> list[Window]:
        count, each = len(targets), self.plan.accumulation
        samples = (numbers != EMPTY).reshape(count, -1).sum(1).tolist()
        seconds = (time.perf_counter() - began) / count
        return [
            {"micro_batches": micro[i * each : (i + 1) * each], "targets": t, "samples": s, "seconds": seconds}
            for i, (t, s) in enumerate(zip(targets, samples, strict=True))
        ]

    def __len__(self) -> int:
        if self.samples is None:
            raise TypeError("an endless stream of windows has no length")
        return self._last()

    def _last(self) -> int:
        """The number after the last window's; as good as none in an endless stream."""
        if self.samples is None:
            return sys.maxsize
        return self.start_update + -(-max(0, self.samples - self.start_sample) // self.plan.sequences)
