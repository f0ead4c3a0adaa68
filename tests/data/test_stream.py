"""Streams of tokens: every document once an epoch in an order of its own, and the same again from any position."""

import copy
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lmforge.config.errors import UsageError
from lmforge.data.packing import PackedRows
from lmforge.data.stream import START, Position, TokenStream, read_position

LENGTHS = [3, 9, 1, 30, 5, 5, 2, 7, 12, 4, 6]


class Rows:
    """Numbers of documents, as a data set gives its rows."""

    def __init__(self, count: int):
        self.count, self.at, self.start = count, 0, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.start, self.count):
            self.at = number + 1
            yield number

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = self.start = state["at"]


def stream(position: Position = START, count: int = len(LENGTHS), block: int = 4, seed: int = 0) -> TokenStream:
    """Document k is made of the ids 100 k, 100 k + 1 ...; the odd ones of the last three are left out."""

    def texts(rows: Iterator[int]) -> Iterator[str]:
        return (str(k) for k in rows if k not in (8, 10))

    def encode(text: str) -> np.ndarray:
        return 100 * int(text) + np.arange(LENGTHS[int(text)], dtype=np.int64)

    return TokenStream(lambda: Rows(count), texts, encode, seed, block, position)


KEPT = [length for k, length in enumerate(LENGTHS) if k not in (8, 10)]


def test_an_epoch_holds_every_document_once_in_an_order_of_its_own() -> None:
    reader, epochs = stream(), []
    for _ in range(3):
        ids = reader.take(sum(KEPT)).ids[:-1]
        assert Counter(ids.tolist()) == Counter(100 * k + i for k, n in enumerate(LENGTHS) for i in range(n)
                                                if k not in (8, 10))  # fmt: skip
        epochs.append([k // 100 for k in ids if k % 100 == 0])
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch[:4]) == [0, 1, 2, 3] for epoch in epochs)  # the first block
    assert reader.position["epoch"] == 3
    assert [k // 100 for k in stream(block=1).take(sum(KEPT)).ids[:-1] if k % 100 == 0] == [*range(8), 9]
    other = stream(seed=1).take(sum(KEPT)).ids
    assert other.tolist() != stream().take(sum(KEPT)).ids.tolist()


@pytest.mark.parametrize("count", [1, 7, 23, 100])
def test_it_goes_on_from_every_position_as_if_it_had_never_stopped(count: int) -> None:
    reader = stream()
    for _ in range(25):
        position = json.loads(json.dumps(reader.position))
        expected = [copy.deepcopy(reader.take(count)) for _ in range(3)]
        again = stream(read_position(position))
        for held in expected:
            found = again.take(count)
            assert found.ids.tolist() == held.ids.tolist()
            assert found.offsets.tolist() == held.offsets.tolist()
        assert again.position == reader.position
    behind = stream({**read_position(position), "document": 0, "token": 0})  # type: ignore[typeddict-item]
    moved = position["document"] or position["token"]
    assert not moved or behind.take(count).ids.tolist() != expected[0].ids.tolist()


def test_taken_tokens_become_rows_as_those_of_shards_do() -> None:
    held = stream(block=1).take(12)
    assert held.ids.tolist() == [0, 1, 2, 100, 101, 102, 103, 104, 105, 106, 107, 108, 200]
    batch = PackedRows(held, 6).batch(np.arange(2))
    assert batch["input_ids"].tolist() == [[0, 1, 2, 100, 101, 102], [103, 104, 105, 106, 107, 108]]
    assert batch["labels"].tolist() == [[1, 2, -100, 101, 102, 103], [104, 105, 106, 107, 108, -100]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]


def test_a_share_without_documents_is_refused_and_not_waited_for() -> None:
    with pytest.raises(UsageError, match="a rank finds no document"):
        stream(count=0).take(1)


@pytest.mark.parametrize(
    "found", [None, [], {}, {**START, "token": -1}, {**START, "block": "0"}, {**START, "rows": 3}, {**START, "x": 1}]
)
def test_a_file_that_holds_no_position_is_refused(found: Any) -> None:
    with pytest.raises(ValueError, match="is no position"):
        read_position(found)
