"""kill -9 before every single file operation of a save: the checkpoint before it or the new one is whole, always."""

import os
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from kills import die_at
from lmforge.training.checkpoint import Piece
from lmforge.training.saving import Keep, Saver, whole_checkpoints
from ranks import run_ranks

PATIENCE = 0.3  # seconds that rank 0 waits for the part of a rank that will be dead


def save(folder: Path, rank: int, world: int, step: int, patience: float) -> None:
    """One rank's save of a matrix whose rows the ranks share."""
    rows = torch.arange(8.0).reshape(4, 2)[rank * 4 // world : (rank + 1) * 4 // world] + step
    piece = {"matrix": Piece(rows, (rank * 4 // world, 0), (4, 2))}
    local = {"sum": Piece(torch.tensor(float(step + rank)), (), ())}
    writer = Saver(folder, rank, world, Keep(1, 1, "val/loss", "min"))
    writer.patience = patience
    state: dict[str, Any] = {"step": step, "metrics": {"val/loss": 1.0 / step}}
    writer.save(state, {"weights": piece, "optimizer": piece, "local": local}, position=[rank, step])
    writer.wait()


def all_save(folder: Path, world: int, step: int, victim: int = -1, number: int = 0) -> bool:
    """Save on `world` processes, of which one dies before its operation `number`; whether it lived to the end."""
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _and_leave(number if rank == victim else 0, folder, rank, world, step, PATIENCE if victim == 1 else 60.0)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return codes[victim] != -9


def _and_leave(number: int, folder: Path, *save_of: Any) -> None:
    try:
        if number:
            die_at(number, folder)
        save(folder, *save_of)
    finally:
        os._exit(0)


def every_moment(base: Path, world: int, victim: int, careless: bool = False) -> list[list[int]]:
    """Kill a rank before each operation of the save of step 2, in a process of its own; the steps that were whole
    after each kill. Every time the save done again must give the same files."""
    os.fsync = lambda descriptor: None  # type: ignore[assignment]
    if careless:
        Saver._publish = careless_publish  # type: ignore[method-assign]
    first, found = base / "first", []
    all_save(first, world, 1)
    all_save(shutil.copytree(first, base / "whole"), world, 2)
    (expected,) = whole_checkpoints(base / "whole")
    for number in count(1):
        folder = Path(shutil.copytree(first, base / f"killed-{number}"))
        lived = all_save(folder, world, 2, victim, number)
        whole = whole_checkpoints(folder)
        for checkpoint in whole:
            checkpoint.verify()
        found.append([checkpoint.step for checkpoint in whole])
        if not whole:
            return found
        Saver(folder, 0, world, Keep(1, 1, "val/loss", "min")).clean(print)
        all_save(folder, world, 2)
        (again,) = whole_checkpoints(folder)
        assert (again.step, again.files) == (2, expected.files)
        assert [path.name for path in folder.iterdir()] == ["step-00000002"]
        if lived:
            return found
    raise AssertionError


def careless_publish(
    self: Saver, aside: Path, final: Path, state: dict[str, Any], publish: Any = Saver._publish
) -> None:
    """Mutation: room is made before the new checkpoint is there."""
    for old in whole_checkpoints(self.folder):
        shutil.rmtree(old.folder)
    publish(self, aside, final, state)


@pytest.mark.parametrize(("world", "victim"), [(1, 0), (2, 0), (2, 1)])
def test_one_of_the_two_is_whole_whenever_it_comes(tmp_path, world, victim) -> None:
    (found,) = run_ranks(every_moment, 1, tmp_path, world, victim)
    assert found[-1] == [2]  # not killed at all
    assert all(steps in ([1], [1, 2], [2]) for steps in found)
    assert [max(steps) for steps in found] == sorted(max(steps) for steps in found)
    assert len(found) > (25 if victim else 50)
    if victim == 0:  # who publishes and removes: at some moment there were both
        assert [1, 2] in found


def test_a_save_that_makes_room_first_is_caught(tmp_path) -> None:
    (found,) = run_ranks(every_moment, 1, tmp_path, 1, 0, True)
    assert found[-1] == []
