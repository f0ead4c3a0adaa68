"""A run that is told to stop while it validates saves at once and ends with that step."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from fits import Killed, fit
from lmforge.config.errors import Terminated
from lmforge.runs.folder import list_checkpoints
from lmforge.training import checkpointing
from lmforge.training.checkpoint import Checkpoint
from lmforge.training.checkpointing import CheckpointCallback
from ranks import run_ranks
from tiny import compose, metrics, new_run, train

WORDS = ("trainer.val_every_n_steps=2", "batch.micro_sequences=1")  # seven batches to validate


class Told(pl.Callback):
    """SIGTERM behind a batch of the validation after step 2, on one rank; what is on disk behind a later one."""

    def __init__(self, batch: int, rank: int = 0, dies: bool = False):
        self.batch, self.rank, self.dies = batch, rank, dies
        self.saved: list[str] = []

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        if trainer.global_step != 2:
            return
        if batch_idx == self.batch and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)
        if batch_idx == self.batch + 2:
            self.saved = self._on_disk(trainer)
            if self.dies:
                raise Killed

    @staticmethod
    def _on_disk(trainer: pl.Trainer) -> list[str]:
        (callback,) = (c for c in trainer.callbacks if isinstance(c, CheckpointCallback))  # type: ignore[attr-defined]
        deadline = time.monotonic() + 20
        while not list_checkpoints(callback.folder) and time.monotonic() < deadline:
            time.sleep(0.02)
        return [path.name for path in list_checkpoints(callback.folder)]


@pytest.fixture(autouse=True)
def heard_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "HEARD_EVERY", 2)


def folder_of(shards: Path, *words: str) -> Path:
    return new_run(compose(shards, *WORDS, *words)).path


def test_it_saves_before_the_validation_is_over_and_again_with_its_metrics(shards) -> None:
    told, folder = Told(1), folder_of(shards)
    with pytest.raises(Terminated, match="stopped at step 2 and saved"):
        fit(shards, *WORDS, folder=folder, also=(told,))
    assert told.saved == ["step-00000002"]
    (checkpoint,) = list_checkpoints(folder / "checkpoints")
    assert Checkpoint(checkpoint).state["metrics"]["val/loss"] == metrics(folder, "val/loss")[1][1]
    assert fit(shards, *WORDS, folder=folder).summary["steps"] == 6


def test_what_it_saved_stands_when_it_is_killed_there(shards) -> None:
    told, folder = Told(1, dies=True), folder_of(shards)
    with pytest.raises(Killed):
        fit(shards, *WORDS, folder=folder, also=(told,))
    (checkpoint,) = list_checkpoints(folder / "checkpoints")
    assert (checkpoint.name, Checkpoint(checkpoint).state["metrics"]) == ("step-00000002", {})
    whole = fit(shards, *WORDS)
    fit(shards, *WORDS, folder=folder)
    assert metrics(folder, "train/loss") == metrics(whole.folder, "train/loss")


def test_told_at_the_very_end_of_it(shards) -> None:
    folder = folder_of(shards)
    with pytest.raises(Terminated, match="stopped at step 2 and saved"):
        fit(shards, *WORDS, folder=folder, also=(Told(6),))
    (checkpoint,) = list_checkpoints(folder / "checkpoints")
    assert "val/loss" in Checkpoint(checkpoint).state["metrics"]


def told_rank(plain: dict[str, Any], folder: str) -> tuple[str, list[str]]:
    checkpointing.HEARD_EVERY = 1
    told = Told(0, rank=1)
    from lmforge.training import assemble

    make = assemble.make_trainer
    assemble.make_trainer = lambda cfg, path, callbacks, *args, **more: make(
        cfg, path, [*callbacks, told], *args, **more
    )
    try:
        train(plain, folder)
    except Terminated as error:
        return str(error), told.saved
    return "", told.saved


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_one_rank_is_enough(shards, strategy) -> None:
    plain = compose(shards, *WORDS, f"strategy={strategy}", "trainer.devices=2")
    folder = new_run(plain).path
    for said, saved in run_ranks(told_rank, 2, plain, str(folder)):
        assert said.startswith("stopped at step 2 and saved")
        assert saved == ["step-00000002"]
    (checkpoint,) = list_checkpoints(folder / "checkpoints")
    Checkpoint(checkpoint).verify()
