"""Changes to the program under test that a command line cannot make, for `start_command`."""

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from lmforge.data.packing import EMPTY
from lmforge.data.windows import Window, Windows
from lmforge.tasks.update import UpdateTask
from lmforge.training import saving


def slow_writes(seconds: float) -> None:
    """Every file of a checkpoint takes its time, half of it written."""
    write = saving.write_pieces

    def slowly(folder: Path, kind: str, rank: int, pieces: Any) -> Any:
        entry = write(folder, kind, rank, pieces)
        os.truncate(folder / entry["file"], entry["bytes"] // 2)
        time.sleep(seconds)
        return write(folder, kind, rank, pieces)

    saving.write_pieces = slowly


def slow_steps(seconds: float) -> None:
    seed = UpdateTask._seed

    def slowly(task: UpdateTask, step: int) -> None:
        time.sleep(seconds)
        seed(task, step)

    UpdateTask._seed = slowly  # type: ignore[method-assign]


def note_samples(folder: Path) -> None:
    """Every rank writes down which global samples it trains on, and when."""
    fetch = Windows.__getitem__

    def noted(windows: Windows, update: int) -> Window:
        if getattr(windows.order, "shuffle", True):  # not where rows are scored
            numbers = [n for n in windows.numbers(update).ravel().tolist() if n != EMPTY]
            fact = {"time": time.time(), "update": update, "world": windows.plan.world, "numbers": numbers}
            with (folder / f"samples-{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps(fact) + "\n")
        return fetch(windows, update)

    Windows.__getitem__ = noted  # type: ignore[method-assign]


def samples_of(folder: Path) -> dict[int, list[int]]:
    """The samples of every update, over all ranks of the start that did it last."""
    facts = [json.loads(line) for file in folder.glob("samples-*.jsonl") for line in file.read_text().splitlines()]
    found: dict[int, list[int]] = {}
    for update in sorted({fact["update"] for fact in facts}):
        mine = sorted((fact for fact in facts if fact["update"] == update), key=lambda fact: fact["time"])
        found[update] = sorted(number for fact in mine[-mine[-1]["world"] :] for number in fact["numbers"])
    return found


SLOW_WRITES, SLOW_STEPS = partial(slow_writes, 0.3), partial(slow_steps, 0.05)
