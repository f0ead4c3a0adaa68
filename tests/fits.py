"""Runs in this process whose trainer and task a test may look at, and that it may stop or spoil on the way."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl

from lmforge.config.plain import to_config
from lmforge.export import command
from lmforge.runs.folder import RunFolder
from lmforge.tasks.update import UpdateTask
from lmforge.training import assemble
from tiny import compose, compose_on, evaluate, new_run, train


class Killed(Exception):
    """Stands for whatever ends a process between two steps."""


class After(pl.Callback):
    """Calls `act(trainer, task)` after update number `step`, behind all other callbacks."""

    def __init__(self, step: int, act: Callable[[pl.Trainer, UpdateTask], Any]):
        self.step, self.act = step, act

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            self.act(trainer, pl_module)


@dataclass
class Fit:
    folder: Path
    summary: dict[str, Any]
    trainer: pl.Trainer

    @property
    def task(self) -> UpdateTask:
        assert isinstance(self.trainer.lightning_module, UpdateTask)
        return self.trainer.lightning_module


def fit(shards: Path | None, *words: str, folder: Path | None = None, also: tuple[pl.Callback, ...] = ()) -> Fit:
    """Train a small run on `shards`, or go on with the one in `folder`, with more callbacks behind its own."""
    plain = compose(shards, *words)
    folder = folder or new_run(plain).path
    made: list[pl.Trainer] = []
    make = assemble.make_trainer

    def watched(cfg: Any, path: Path, callbacks: list[pl.Callback], *args: Any, **options: Any) -> pl.Trainer:
        made.append(make(cfg, path, [*callbacks, *also], *args, **options))
        return made[-1]

    with patch.object(assemble, "make_trainer", watched):
        summary = train(plain, folder)
    return Fit(folder, summary, made[-1])


def killed(shards: Path | None, *words: str, step: int) -> Path:
    """The folder of a run that ended without a goodbye after `step` updates."""
    folder = new_run(compose(shards, *words)).path

    def die(trainer: pl.Trainer, task: UpdateTask) -> None:
        raise Killed

    try:
        fit(shards, *words, folder=folder, also=(After(step, die),))
    except Killed:
        return folder
    raise AssertionError(f"the run did not get as far as step {step}")


def score(folder: Path, *words: str) -> dict[str, Any]:
    """evaluate.py on a run or an export."""
    return evaluate(compose_on("evaluate", folder, "trainer.threads=1", *words), folder)


def export(folder: Path, *words: str) -> Path:
    """`lmforge export` on a run; the exported folder."""
    result = command.export(to_config(compose_on("export", folder, *words)), RunFolder(folder))
    return Path(result["folder"])
