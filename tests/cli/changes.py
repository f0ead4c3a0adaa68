"""Changes to the program under test that a command line cannot make, for `start_command`."""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

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


SLOW_WRITES, SLOW_STEPS = partial(slow_writes, 0.3), partial(slow_steps, 0.05)
