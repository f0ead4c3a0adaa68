"""What may happen to a rank while it computes an update. Each is a plain function, so that it reaches it by name."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from jobs import unwritable

from lmforge.tasks.update import UpdateTask


def error_at(rank: int, step: int) -> None:
    """One rank fails with an ordinary error."""
    _at(rank, step, partial(_fail, RuntimeError("told to fail")))


def sleep_at(rank: int, step: int, seconds: float) -> None:
    """One rank does nothing for a while."""
    _at(rank, step, partial(time.sleep, seconds))


def kill_at(rank: int, step: int) -> None:
    """One rank is killed as the kernel does it when memory runs out, once a checkpoint is complete."""
    _at(rank, step, _die)


def _die() -> None:
    _see_a_checkpoint()
    os.kill(os.getpid(), signal.SIGKILL)


def _see_a_checkpoint(seconds: float = 20.0) -> None:
    """Wait for the one that is being written; both its ranks write on meanwhile."""
    deadline = time.monotonic() + seconds
    while not any(Path("runs/default").glob("*/checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.01)


def touch_at(rank: int, step: int, file: Path) -> None:
    _at(rank, step, file.touch)


def leave_at(rank: int, step: int, code: int) -> None:
    """One rank ends with a code of its own, and notes it as the front door does."""
    _at(rank, step, partial(_leave, code))


def _leave(code: int) -> None:
    _see_a_checkpoint()
    (run,) = Path("runs/default").iterdir()
    (run / "exit_code").write_text(f"{code}\n")
    os._exit(code)


def no_memory_at(rank: int, step: int, where: str) -> None:
    """One rank's allocator fails, in a step or while it writes the checkpoint after it."""
    if where == "saving":
        unwritable(rank, MemoryError(), f"step-{step:08d}")
    else:
        error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes")
        _at(rank, step, partial(_fail, error))


def _fail(error: BaseException) -> None:
    raise error


def _at(rank: int, step: int, act: Callable[[], None]) -> None:
    seed = UpdateTask._seed

    def seeded(task: UpdateTask, now: int) -> None:
        seed(task, now)
        task.micro_batch = 1
        if task.global_rank == rank and now == step:
            act()

    UpdateTask._seed = seeded  # type: ignore[method-assign]
