"""Changes that keep one rank from moving on, or make it slow; plain functions, so that they reach the ranks."""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from lmforge.data.windows import Window, Windows
from lmforge.models.gpt import Block
from lmforge.parallel.waits import Waits
from lmforge.tasks.update import UpdateTask
from lmforge.training import saving, stall
from lmforge.training.logbook import Logbook
from lmforge.training.straggler import Straggler

FOR_EVER = 600.0


def here(rank: int) -> bool:
    return int(os.environ["RANK"]) == rank


def pause(seconds: float, where: str) -> None:
    """Sleep, and prove it."""
    print(f"asleep in {where}", file=sys.stderr, flush=True)
    time.sleep(seconds)


def speak_into(folder: str) -> None:
    """Standard error of each rank into a file of its own."""
    file = os.open(f"{folder}/said-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)


def short_grace(seconds: float = 4.0) -> None:
    stall.GRACE = seconds


def unwatched_thread() -> None:
    """The watch never looks."""
    stall.StallWatch._follow = lambda self: None  # type: ignore[method-assign]


def no_beats_in_validation() -> None:
    """A validation's batches do not count as progress."""

    def silent(watch: stall.StallWatch, *args: Any) -> None:
        watch.validated = True

    stall.StallWatch.on_validation_batch_end = silent  # type: ignore[method-assign]


def asleep_in_data(rank: int, step: int) -> None:
    fetch = Windows.__getitem__

    def hanging_fetch(windows: Windows, update: int) -> Window:
        if here(rank) and update == step - 1 and getattr(windows.order, "shuffle", True):
            time.sleep(FOR_EVER)
        return fetch(windows, update)

    Windows.__getitem__ = hanging_fetch  # type: ignore[method-assign]


def asleep_in_forward(rank: int, step: int, seconds: float = FOR_EVER) -> None:
    in_forward(rank, lambda now: now == step, lambda: pause(seconds, "forward"))


def busy_in_forward(rank: int, step: int) -> None:
    def spin() -> None:
        while True:
            pass

    in_forward(rank, lambda now: now == step, spin)


def stopped_at(rank: int, step: int) -> None:
    """As SIGSTOP does it: no thread of the process runs any more."""
    in_forward(rank, lambda now: now == step, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def slow_forward(rank: int, seconds: float) -> None:
    in_forward(rank, lambda now: True, lambda: time.sleep(seconds))


def in_forward(rank: int, when: Callable[[int], bool], act: Callable[[], None]) -> None:
    """Act once in the training forward passes of the steps asked for."""

    def acting(hidden: torch.Tensor) -> torch.Tensor:
        act()
        return hidden

    _after_a_block(rank, when, acting)


def _after_a_block(rank: int, when: Callable[[int], bool], act: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Something done to what the step's first block gives; blocks are there under every layout."""
    seed, forward, todo = UpdateTask._seed, Block.forward, [False]

    def noted(task: UpdateTask, now: int) -> None:
        seed(task, now)
        todo[0] = here(rank) and when(now)

    def acting(block: Block, *args: Any, **more: Any) -> Any:
        hidden = forward(block, *args, **more)
        if not (todo[0] and block.training):
            return hidden
        todo[0] = False
        return act(hidden)

    UpdateTask._seed, Block.forward = noted, acting  # type: ignore[method-assign]


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(FOR_EVER)
        return gradient


def asleep_in_backward(rank: int, step: int) -> None:
    _after_a_block(rank, lambda now: now == step, lambda hidden: _Asleep.apply(hidden))


def asleep_in_callback(rank: int, step: int) -> None:
    end = Logbook.on_train_batch_end

    def hanging(logbook: Logbook, trainer: Any, *args: Any) -> None:
        end(logbook, trainer, *args)
        if here(rank) and trainer.global_step == step:
            time.sleep(FOR_EVER)

    Logbook.on_train_batch_end = hanging  # type: ignore[method-assign]


def slow_validation(rank: int, seconds: float) -> None:
    """Every validation batch takes its time on one rank."""
    score = UpdateTask.validation_step

    def slowly(task: UpdateTask, *args: Any) -> None:
        if here(rank):
            pause(seconds, "validation")
        score(task, *args)

    UpdateTask.validation_step = slowly  # type: ignore[method-assign]


def slow_writes(rank: int, seconds: float) -> None:
    """A checkpoint's files take their time on one rank."""
    write = saving.write_pieces

    def slowly(*args: Any) -> Any:
        if here(rank):
            pause(seconds, "saving")
        return write(*args)

    saving.write_pieces = slowly


def slow_data(rank: int, seconds: float) -> None:
    fetch = Windows.__getitem__

    def slowly(windows: Windows, update: int) -> Window:
        if here(rank):
            time.sleep(seconds)
        return fetch(windows, update)

    Windows.__getitem__ = slowly  # type: ignore[method-assign]


def reduction_counts_as_computing() -> None:
    """The gradient is taken to be complete when all ranks' are."""
    update = Straggler._note_update

    def late(watched: Straggler) -> None:
        watched._note_gradient(torch.zeros(()))
        update(watched)

    Straggler._note_update = late  # type: ignore[method-assign]


def gathering_counts_as_computing() -> None:
    """What FSDP's collectives wait is not taken off."""
    Waits.watch = lambda waits, network: None  # type: ignore[method-assign]
