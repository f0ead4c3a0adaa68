"""Early stopping: what counts as progress, what is ignored, and that its count survives a resume."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from fits import fit, killed
from lmforge.tasks.update import UpdateTask
from lmforge.training.early_stopping import EarlyStop
from lmforge.training.resume import Restore
from tiny import metrics


class Task(UpdateTask):
    """Says what was measured and notes that it was told to stop."""

    def __init__(self) -> None:
        self.__dict__["latest"] = {}
        self.__dict__["stopped"] = False

    def stop(self) -> None:
        self.__dict__["stopped"] = True


def stopped_after(
    values: list[float], mode: str = "min", patience: int | None = 2, min_delta: float = 0.0
) -> int | None:
    """How many validations the run lasted; None when it was never stopped."""
    stop, task = EarlyStop("val/loss", mode, patience, min_delta), Task()
    trainer: Any = SimpleNamespace(state=SimpleNamespace(fn="fit"))
    for number, value in enumerate(values, 1):
        task.latest["val/loss"] = value
        stop.on_validation_end(trainer, task)
        if task.stopped:
            assert stop.stopped
            return number
    return None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5, 4, 3, 2, 1], None),
        ([5, 4, 4, 4], 4),
        ([5, 6, 4, 5, 3, 4, 5], 7),
        ([5, math.nan, math.nan, math.nan, 4], None),
        ([0.5, -math.inf, 0.4, 0.45, 0.45], 5),
        ([5, math.nan, 6, math.inf, 6], 5),
    ],
)
def test_waits_for_patience_validations_without_progress(values, expected) -> None:
    assert stopped_after(values) == expected


def test_maximising_and_the_smallest_change_that_counts() -> None:
    assert stopped_after([1, 2, 3, 2, 1], mode="max") == 5
    assert stopped_after([5.0, 4.95, 4.91], min_delta=0.1) == 3
    assert stopped_after([5.0, 4.8, 4.6], min_delta=0.1) is None


def test_no_patience_never_stops() -> None:
    assert stopped_after([1.0] * 50, patience=None) is None


STOPPING = (
    "trainer.val_every_n_steps=1",
    "trainer.max_steps=12",
    "callbacks.early_stopping.monitor=val/loss",
    "callbacks.early_stopping.patience=3",
    "callbacks.early_stopping.min_delta=100",
    "callbacks.checkpoint.every_n_steps=1",
)


def test_a_run_ends_early_and_says_why(shards) -> None:
    run = fit(shards, *STOPPING)
    assert (run.summary["steps"], run.summary["reason"]) == (4, "early_stopping")
    assert [row[0] for row in metrics(run.folder, "val/loss")] == [1, 2, 3, 4]


def test_the_count_survives_a_resume(shards, monkeypatch) -> None:
    assert fit(shards, *STOPPING, folder=killed(shards, *STOPPING, step=2)).summary["steps"] == 4
    monkeypatch.setattr(Restore, "on_train_start", lambda *args: None)
    assert fit(shards, *STOPPING, folder=killed(shards, *STOPPING, step=2)).summary["steps"] > 4


def test_a_run_killed_between_the_decision_and_its_end_still_ends(shards) -> None:
    run = fit(shards, *STOPPING)
    files = {path: path.stat().st_mtime_ns for path in (run.folder / "checkpoints").glob("*/*")}
    again = fit(shards, *STOPPING, folder=run.folder)
    assert (again.summary["steps"], again.summary["reason"]) == (4, "early_stopping")
    assert again.summary["val/loss"] == run.summary["val/loss"]
    assert {path: path.stat().st_mtime_ns for path in (run.folder / "checkpoints").glob("*/*")} == files
