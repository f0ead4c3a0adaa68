"""An endless stream of tokens out of rows that are read on the way, which can go on from any place it was at."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypedDict

import numpy as np

from lmforge.config.errors import UsageError
from lmforge.data.order import Integers, SampleOrder


class Resumable(Protocol):
    """Rows in an order that stays; `state_dict` is where they are read up to, in plain numbers and texts."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Position(TypedDict):
    """The next token to be read: in which block of documents, which of them, where in it."""

    epoch: int
    block: int
    rows: dict[str, Any] | None  # state of the rows where the block begins; None at the beginning of an epoch
    document: int  # of the block, in the order in which they are read
    token: int


def read_position(found: Any) -> Position:
    """A position out of a file that may hold anything; ValueError when it is none."""
    names = ("epoch", "block", "document", "token")
    right = isinstance(found, dict) and set(found) == {*names, "rows"} and isinstance(found["rows"], dict | None)
    if not right or any(type(found[name]) is not int or found[name] < 0 for name in names):
        raise ValueError(f"{str(found)[:100]} is no position in a stream")
    return found


START: Position = {"epoch": 0, "block": 0, "rows": None, "document": 0, "token": 0}


class HeldTokens(NamedTuple):
    """Some tokens in memory, as `PackedRows` reads them from shards; a document may begin before the first."""

    ids: Integers
    offsets: Integers

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    def rows(self, start: Integers, width: int) -> Integers:
        return self.ids[np.minimum(start[:, None] + np.arange(width), self.n_tokens - 1)]


class _Held(NamedTuple):
    at: Position  # of its first token
    ids: Integers


class TokenStream:
    """Documents are read in blocks of `block`, and each block is read in an order that is a function of (seed, epoch,
    block). So a position is a few numbers, whatever the block holds: a stream that goes on from one reads its block
    again and is where the other was.
    """

    def __init__(
        self,
        rows: Callable[[], Resumable],
        texts: Callable[[Iterator[Any]], Iterator[str]],
        encode: Callable[[str], Integers],
        seed: int,
        block: int,
        position: Position = START,
    ) -> None:
        """`rows` opens the rows from the beginning, `texts` gives those of them to be trained on, `encode` the ids of
        one with its marks."""
        self.rows, self.texts, self.encode, self.seed, self.block = rows, texts, encode, seed, block
        self.position = position
        self._held: deque[_Held] = deque()
        self._documents = self._read(position)

    def take(self, count: int) -> HeldTokens:
        """The next `count` tokens and the one after them, which the next call begins with."""
        skip = self.position["token"]
        while sum(len(held.ids) for held in self._held) - skip <= count:
            self._held.append(next(self._documents))
        ids = np.concatenate([held.ids for held in self._held])[skip : skip + count + 1]
        starts = np.cumsum([len(held.ids) for held in self._held]) - skip
        self._advance(skip + count)
        inside = starts[(starts > 0) & (starts <= count)]
        return HeldTokens(ids, np.array([0, *inside, count + 1], dtype=np.int64))

    def _advance(self, token: int) -> None:
        while token >= len(self._held[0].ids):
            token -= len(self._held.popleft().ids)
        self.position = {**self._held[0].at, "token": token}

    def _read(self, at: Position) -> Generator[_Held, None, None]:
        epoch, block, state, first = at["epoch"], at["block"], at["rows"], at["document"]
        while True:
            rows = self.rows()
            if state is not None:
                rows.load_state_dict(state)
            texts = self.texts(iter(rows))
            while found := list(islice(texts, self.block)):
                order = self._shuffled(len(found), epoch, block)
                for index in range(first, len(found)):
                    place: Position = {"epoch": epoch, "block": block, "rows": state, "document": index, "token": 0}
                    yield _Held(place, self.encode(found[order[index]]))
                first, block, state = 0, block + 1, rows.state_dict()
            if block == 0:
                raise UsageError("data.streaming=true: a rank finds no document; use fewer devices, or more files")
            epoch, block, state = epoch + 1, 0, None

    def _shuffled(self, size: int, epoch: int, block: int) -> Integers:
        return SampleOrder(size, self.seed)(np.arange(size) + size * ((epoch << 32) + block))

    def close(self) -> None:
        """Let go of open files, now and not when the interpreter is half gone."""
        self._documents.close()
