"""Packed rows: the documents of a split end to end, cut into rows of `context` tokens, with masks between them."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lmforge.config.errors import UsageError
from lmforge.data.order import Integers

IGNORED = -100  # a label that no loss counts (torch's own default)
EMPTY = -1  # a row number that stands for a row without any target


class Tokens(Protocol):
    """Documents end to end: `offsets` [documents + 1] is where each begins."""

    @property
    def n_tokens(self) -> int: ...

    @property
    def offsets(self) -> Integers: ...

    def rows(self, start: Integers, width: int) -> Integers: ...


class PackedRows:
    """Row `i` holds the `context` tokens from `i * stride` on, and the one after as its last label.

    Every token but each document's first is a target exactly once, whatever the row length and stride: of a row that
    overlaps the one before, only the last `stride` positions have labels. A label never crosses into another document,
    `doc_ids` number the documents of a row, `positions` restart with each of them.
    """

    def __init__(self, shards: Tokens, context: int, limit: int | None = None, stride: int | None = None):
        self.shards, self.context, self.stride = shards, context, context if stride is None else stride
        if not 0 < self.stride <= context:
            raise UsageError(f"stride={stride}: must be at least 1 and at most the context, {context}")
        targets = shards.n_tokens - 1
        rows = 0 if targets < 1 else 1 + max(0, -(-(targets - context) // self.stride))
        self.rows = rows if limit is None else min(rows, limit)
        self.place = np.arange(context)

    def __len__(self) -> int:
        return self.rows

    def batch(self, rows: Integers) -> dict[str, Tensor]:
        """Rows -> `input_ids`, `labels`, `doc_ids`, `positions`, each int64 `[len(rows), context]`.

        A row number of `EMPTY`, and what lies beyond the last token, has ignored labels only.
        """
        start = np.maximum(rows, 0) * self.stride
        labels = self.shards.rows(start + 1, self.context)
        row, column = self._borders(start)
        labels[row, column - 1] = IGNORED
        labels[rows > 0, : self.context - self.stride] = IGNORED  # the row before has scored them
        late = np.flatnonzero(start + self.context >= self.shards.n_tokens)
        labels[late] = np.where(start[late, None] + self.place < self.shards.n_tokens - 1, labels[late], IGNORED)
        labels[rows < 0] = IGNORED
        doc_ids, positions = self._documents(len(rows), row, column)
        tokens = self.shards.rows(start, self.context)
        arrays = {"input_ids": tokens, "labels": labels, "doc_ids": doc_ids, "positions": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _borders(self, start: Integers) -> tuple[Integers, Integers]:
        """Row and column of every document's first token among the `context` tokens after each row's first one."""
        offsets = np.asarray(self.shards.offsets)  # indexes faster than a memory map
        first = np.searchsorted(offsets, start, side="right")
        count = np.searchsorted(offsets, start + self.context, side="right") - first
        row = np.repeat(np.arange(len(start)), count)
        within = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        return row, offsets[first[row] + within] - start[row]

    def _documents(self, rows: int, row: Integers, column: Integers) -> tuple[Integers, Integers]:
        """Document number within the row and position within the document, where documents begin as given."""
        doc_ids = np.zeros((rows, self.context), np.int64)
        positions = np.broadcast_to(self.place, doc_ids.shape).copy()
        row, column = row[column < self.context], column[column < self.context]
        doc_ids[row, column] = 1
        cut, which = np.unique(row, return_inverse=True)  # rows of one document, most of them, are done
        began = np.zeros((len(cut), self.context), np.int64)
        began[which, column] = column
        positions[cut] -= np.maximum.accumulate(began, axis=1)
        doc_ids[cut] = np.cumsum(doc_ids[cut], axis=1)
        return doc_ids, positions
