"""Windows: the same global batches for any number of ranks and workers, from any step on."""

import random
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from builders import batch_plan, packed
from lmforge.data.module import TokenWindows
from lmforge.data.order import SampleOrder
from lmforge.data.packing import EMPTY, IGNORED, PackedRows
from lmforge.data.windows import Windows


@pytest.fixture
def rows(tmp_path: Path) -> PackedRows:
    """11 rows; row `i` begins with id `8 * i`."""
    return packed(tmp_path / "rows", [list(range(89))], 8)


def windows(
    rows: PackedRows, sequences: int, micro: int = 1, world: int = 1, rank: int = 0, samples: int | None = None
) -> Windows:
    return Windows(rows, SampleOrder(len(rows), seed=3), batch_plan(sequences, micro, world), rank, samples)


def seen(rows: PackedRows, update: int, world: int, samples: int | None = None, sequences: int = 4) -> list[int]:
    """Rows of one global batch in the order micro-batch, rank, place; `EMPTY` ones left out."""
    parts = [windows(rows, sequences, 1, world, rank, samples)[update]["micro_batches"] for rank in range(world)]
    batches = [batch for micro in zip(*parts, strict=True) for batch in micro]
    return [int(batch["input_ids"][0, 0]) // 8 for batch in batches if (batch["labels"] != IGNORED).any()]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_together_see_the_batches_of_one_process_in_its_order(rows, world) -> None:
    for update in range(7):
        assert seen(rows, update, world) == seen(rows, update, 1)


def test_a_rank_that_takes_anothers_share_is_noticed(rows, monkeypatch) -> None:
    numbers = Windows.numbers
    monkeypatch.setattr(
        Windows, "numbers", lambda self, u: numbers(self, u) if self.rank == 0 else numbers(self, u + 1)
    )
    assert seen(rows, 0, 2) != seen(rows, 0, 1)


def test_a_window_straddles_two_epochs_and_loses_nothing(rows) -> None:
    order = SampleOrder(len(rows), seed=3)(np.arange(22))
    stream = [row for update in range(5) for row in seen(rows, update, 1)]
    assert stream == order[:20].tolist()
    assert sorted(stream[:11]) == list(range(11))


def test_only_the_last_window_is_short(rows) -> None:
    assert len(windows(rows, 4, samples=22)) == 6
    assert [windows(rows, 4, samples=22)[u]["samples"] for u in range(6)] == [4, 4, 4, 4, 4, 2]
    assert [row for u in range(6) for row in seen(rows, u, 3, samples=22)] == [
        row for u in range(6) for row in seen(rows, u, 1, samples=22)
    ]


def test_every_rank_runs_the_same_shapes_also_without_samples(rows) -> None:
    parts = [windows(rows, 4, 1, world=3, rank=rank, samples=1)[0] for rank in range(3)]
    shapes = [[tuple(batch["input_ids"].shape) for batch in part["micro_batches"]] for part in parts]
    assert shapes == [[(1, 8)] * 2] * 3
    assert [part["samples"] for part in parts] == [1, 0, 0]
    assert [part["targets"] > 0 for part in parts] == [True, False, False]


def test_the_stated_count_of_targets_is_that_of_the_labels(rows) -> None:
    window = windows(rows, 6, micro=2)[0]
    assert len(window["micro_batches"]) == 3
    assert window["targets"] == sum(int((b["labels"] != IGNORED).sum()) for b in window["micro_batches"])


def test_an_endless_stream_has_no_length(rows) -> None:
    with pytest.raises(TypeError, match="endless"):
        len(windows(rows, 4))


def test_a_resumed_stream_goes_on_after_a_short_window(rows) -> None:
    """A run of one epoch (11 samples, the third window short) that is made longer repeats and skips nothing."""
    order, plan = SampleOrder(len(rows), seed=3), batch_plan(4)
    longer = Windows(rows, order, plan, 0, samples=22, start=(3, 11))
    assert longer.numbers(3).ravel().tolist() == [11, 12, 13, 14]
    assert len(longer) == 3 + 3
    assert longer.numbers(5).ravel().tolist() == [19, 20, 21, EMPTY]


def loaded(folder: Path, start: int, sequences: int, workers: int = 0) -> list[list[int]]:
    """First ids of every window that a fresh loader yields from update `start` to the end of the first epoch."""
    data = TokenWindows(folder, context=8, num_workers=workers)
    data.connect(batch_plan(sequences), seed=5, samples=len(data.train), start=(start, start * sequences))
    return [
        [int(batch["input_ids"][0, 0]) for batch in window["micro_batches"] if (batch["labels"] != IGNORED).any()]
        for window in data.train_dataloader()
    ]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_six_samples_resumed_in_the_middle_leave_exactly_the_unseen_ones(tmp_path, accumulation) -> None:
    packed(tmp_path / "six", [list(range(49))], 8)
    whole = loaded(tmp_path / "six", 0, accumulation)
    assert sorted(row for window in whole for row in window) == [0, 8, 16, 24, 32, 40]
    done = 3 // accumulation
    assert loaded(tmp_path / "six", done, accumulation) == whole[done:]
    assert loaded(tmp_path / "six", done - 1, accumulation) != whole[done:]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
def test_workers_yield_what_the_process_itself_does(tmp_path) -> None:
    packed(tmp_path / "s", [list(range(89))], 8)
    assert loaded(tmp_path / "s", 0, 3, workers=0) == loaded(tmp_path / "s", 0, 3, workers=4)


class RandomRows(PackedRows):
    """Rows that a fork might write: one number from each global random stream in place of tokens."""

    draws = True

    def batch(self, rows: np.ndarray) -> dict[str, Tensor]:
        numbers = torch.tensor([[random.random(), np.random.random(), torch.rand(()).item()]] * len(rows))
        return {**super().batch(rows), "numbers": numbers}


def draws(folder: Path, workers: int, rank: int = 0, seed: int = 5, start: int = 0) -> list[list[float]]:
    """What the rows of one rank of two drew, one list an update, over the two epochs of 8 updates."""
    data = TokenWindows(folder, context=8, num_workers=workers)
    data.connect(batch_plan(2, world=2), seed, samples=2 * len(data.train))
    stream = Windows(RandomRows(data.train.shards, 8), SampleOrder(8, seed), data.plan, rank, data.samples)
    loader = data._loader(stream, range(start, len(stream)))
    return [window["micro_batches"][0]["numbers"][0].tolist() for window in loader]


def test_random_streams_differ_by_rank_and_epoch_and_repeat_by_seed(tmp_path) -> None:
    packed(tmp_path / "s", [list(range(65))], 8)
    zero, one = draws(tmp_path / "s", workers=2), draws(tmp_path / "s", workers=2, rank=1)
    streams = [zero[:4], zero[4:], one[:4], one[4:]]
    assert all(a != b for first, second in combinations(streams, 2) for a in first for b in second)
    assert len({number for stream in streams for update in stream for number in update}) == 16 * 3
    assert zero == draws(tmp_path / "s", workers=2)
    assert zero != draws(tmp_path / "s", workers=2, seed=6)


def test_random_streams_depend_neither_on_workers_nor_on_where_a_run_was_resumed(tmp_path, monkeypatch) -> None:
    packed(tmp_path / "s", [list(range(65))], 8)
    alone = draws(tmp_path / "s", workers=0)
    assert alone == draws(tmp_path / "s", workers=2)
    assert alone[3:] == draws(tmp_path / "s", workers=0, start=3)
    monkeypatch.setattr("lmforge.data.windows.seed_streams", lambda *key: None)
    assert alone != draws(tmp_path / "s", workers=2)


def test_rows_that_draw_without_saying_so_are_refused(tmp_path, monkeypatch) -> None:
    """Several windows are built at once, so a number that one of them drew would hang on the others."""
    packed(tmp_path / "s", [list(range(65))], 8)
    monkeypatch.setattr(RandomRows, "draws", False)
    with pytest.raises(RuntimeError, match="RandomRows uses the global random streams"):
        draws(tmp_path / "s", workers=0)


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_windows_do_not_depend_on_how_many_are_built_at_once(rows, monkeypatch, at_once) -> None:
    monkeypatch.setattr("lmforge.data.windows.MOST", at_once)
    stream = windows(rows, 4, micro=2, samples=22)
    for update in (0, 1, 2, 5, 4, 3):
        alone = windows(rows, 4, micro=2, samples=22)[update]
        found = stream[update]
        assert (found["targets"], found["samples"]) == (alone["targets"], alone["samples"])
        for batch, other in zip(found["micro_batches"], alone["micro_batches"], strict=True):
            assert all(batch[name].equal(other[name]) for name in other)
