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

    def gather(self, index: Integers) -> Integers: ...


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

    def __len__(self) -> int:
        return self.rows

    def batch(self, rows: Integers) -> dict[str, Tensor]:
        """Rows -> `input_ids`, `labels`, `doc_ids`, `positions`, each int64 `[len(rows), context]`.

        A row number of `EMPTY`, and what lies beyond the last token, has ignored labels only.
        """
        start = np.maximum(rows, 0)[:, None] * self.stride
        place = start + np.arange(self.context + 1)
        tokens = self.shards.gather(np.minimum(place, self.shards.n_tokens - 1))
        doc_ids, positions = self._documents(start[:, 0])
        target = (doc_ids[:, 1:] == doc_ids[:, :-1]) & (place[:, 1:] < self.shards.n_tokens) & (rows[:, None] >= 0)
        target[rows > 0, : self.context - self.stride] = False  # the row before has scored them
        arrays = {
            "input_ids": tokens[:, :-1],
            "labels": np.where(target, tokens[:, 1:], IGNORED),
            "doc_ids": doc_ids[:, :-1],
            "positions": positions[:, :-1],
        }
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def _documents(self, start: Integers) -> tuple[Integers, Integers]:
        """Document number within the row and position within the document, for `context + 1` places a row."""
        offsets, width = self.shards.offsets, self.context + 1
        first = np.searchsorted(offsets, start, side="right")
        last = np.searchsorted(offsets, start + width, side="left")
        row = np.repeat(np.arange(len(start)), last - first)
        within = np.arange(len(row)) - np.repeat(np.cumsum(last - first) - (last - first), last - first)
        column = offsets[first[row] + within] - start[row]
        begins = np.zeros((len(start), width), dtype=np.int64)
        begins[row, column] = 1
        place = np.arange(width)
        began = np.maximum.accumulate(np.where(begins == 1, place, 0), axis=1)
        return np.cumsum(begins, axis=1), place - began
