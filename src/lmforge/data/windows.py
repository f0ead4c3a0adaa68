"""Windows: everything one rank does for one optimizer update, fetched by its number."""

import time
from typing import TypedDict

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from lmforge.config.batch import BatchPlan
from lmforge.data.order import Integers, SampleOrder
from lmforge.data.packing import EMPTY, IGNORED, PackedRows


class Window(TypedDict):
    """One rank's share of one update."""

    micro_batches: list[dict[str, Tensor]]
    targets: int  # target tokens in these micro-batches
    samples: int  # rows with content
    seconds: float  # time taken to build it


class Windows(Dataset[Window]):
    """Window number `u` covers global samples `[u * sequences, (u + 1) * sequences)`, cut at `samples`.

    The endless stream of epochs is cut without regard to their borders, so a batch may straddle two epochs; only the
    very last window of a run may be short. Slots without a sample hold an `EMPTY` row, so that every rank runs the
    same number of equally shaped micro-batches. The union over ranks is the same for any number of ranks or workers.
    """

    def __init__(self, rows: PackedRows, order: SampleOrder, plan: BatchPlan, rank: int, samples: int | None = None):
        self.rows, self.order, self.plan, self.rank, self.samples = rows, order, plan, rank, samples

    def numbers(self, update: int) -> Integers:
        """Global sample numbers `[accumulation, micro]` of this rank, `EMPTY` where there is none."""
        plan = self.plan
        slots = np.arange(plan.accumulation * plan.world * plan.micro)
        number = np.where(slots < plan.sequences, update * plan.sequences + slots, EMPTY)
        if self.samples is not None:
            number = np.where(number < self.samples, number, EMPTY)
        return number.reshape(plan.accumulation, plan.world, plan.micro)[:, self.rank]

    def __getitem__(self, update: int) -> Window:
        began = time.perf_counter()
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
        return -(-self.samples // self.plan.sequences)
