"""What a rank does in these tests: a whole training, watched (`facts`) or deliberately made wrong (`mutate`)."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import tiny
from lmforge.config.errors import ExitError
from lmforge.data.windows import Window, Windows
from lmforge.parallel import plan as plans
from lmforge.parallel.control import Agreed, Control
from lmforge.tasks.causal_lm import CausalLM
from lmforge.tasks.update import UpdateTask
from lmforge.training import saving, summary
from lmforge.training.logbook import Logbook
from ranks import run_ranks

Facts = dict[str, Any]


def ranks(plain: dict[str, Any], folder: str | Path, *steps: Callable[[], None], **more: Any) -> list[Facts]:
    """`watched` on as many ranks as the config says; their facts in order of rank."""
    return run_ranks(watched, plain["trainer"]["devices"], plain, str(folder), *steps, **more)


def watched(plain: dict[str, Any], folder: str, *changes: Callable[[], None]) -> Facts:
    """Train after `changes` to this process and report what this rank saw; ends early when it was told to stop."""
    seen: Facts = {"numbers": {}, "draws": {}, "stopped": None}
    _watch(seen)
    for change in changes:
        change()
    try:
        tiny.train(plain, folder)
    except ExitError as error:
        seen["stopped"] = type(error).__name__
    return seen


def _watch(seen: Facts) -> None:
    fetch, seed, summarise = Windows.__getitem__, UpdateTask._seed, summary.summarise

    def noted_fetch(windows: Windows, update: int) -> Window:
        if windows.order.shuffle:
            seen["numbers"][update] = windows.numbers(update).ravel().tolist()
        return fetch(windows, update)

    def noted_seed(task: UpdateTask, step: int) -> None:
        seed(task, step)
        seen["draws"][step] = torch.rand(()).item()
        seen["task"] = None

    def noted_summary(trainer: Any, task: UpdateTask, data: Any, reason: str) -> dict[str, Any]:
        seen.update(final_facts(trainer, task))
        return summarise(trainer, task, data, reason)

    Windows.__getitem__, UpdateTask._seed, summary.summarise = noted_fetch, noted_seed, noted_summary
