"""The same training in one process and spread over ranks, and where their logs differ."""

import math
from pathlib import Path

import jobs
import pytest
from jobs import train_on

from tiny import compose, metrics, new_run, train

COLUMNS = ("train/loss", "train/grad_norm", "val/loss", "val/accuracy")
COMMON = ("batch.sequences=12", "trainer.val_every_n_steps=4", "trainer.max_steps=8")
Rows = list[tuple[float, ...]]


class Alone:
    """The same words in one process, trained once for each set of words that may change numbers."""

    def __init__(self, shards: Path, root: Path):
        self.shards, self.root = shards, root
        self.runs: dict[tuple[str, ...], Path] = {}

    def __call__(self, *words: str) -> Rows:
        if words not in self.runs:
            plain = compose(self.shards, *COMMON, *words, f"paths.root={self.root}")
            self.runs[words] = new_run(plain).path
            train(plain, self.runs[words])
        return metrics(self.runs[words], *COLUMNS)


def spread(shards: Path, words: str, numbers: tuple[str, ...], *changes: jobs.Change) -> Rows:
    plain = compose(shards, *COMMON, *words.split(), *numbers)
    folder = new_run(plain).path
    train_on(plain["trainer"]["devices"], plain, folder, *changes)
    return metrics(folder, *COLUMNS)


def differences(rows: Rows, others: Rows, tolerance: float) -> list[tuple[float, ...]]:
    """Rows that are not alike; every step must be there once, with a finite loss and gradient."""
    assert [row[0] for row in rows] == [row[0] for row in others] == list(range(1, len(others) + 1))
    assert all(map(math.isfinite, (value for row in rows for value in row[1:3])))
    pairs = zip(rows, others, strict=True)
    return [ours for ours, theirs in pairs if ours != pytest.approx(theirs, rel=tolerance, nan_ok=True)]
