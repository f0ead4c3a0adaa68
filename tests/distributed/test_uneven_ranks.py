"""A run goes on with processes that its batch does not divide by: the batch stays, and some places in it are empty."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import Change, Facts, stop_after, train_on, weights

from lmforge.data.packing import EMPTY
from lmforge.data.windows import Windows
from tiny import compose, metrics, new_run

STEPS, SEQUENCES = 9, 8
COLUMNS = ("train/loss", "train/grad_norm", "val/loss")


def settings(shards: Path, *words: str) -> dict[str, Any]:
    common = (f"batch.sequences={SEQUENCES}", f"trainer.max_steps={STEPS}", "trainer.val_every_n_steps=4")
    return compose(shards, *common, "precision=64-true", "batch.micro_sequences=2", *words)


@pytest.fixture(scope="module")
def alone(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = new_run(plain := settings(shards, f"paths.root={tmp_path_factory.mktemp('alone')}")).path
    train_on(1, plain, folder)
    return folder


def two_three_two(shards: Path, strategy: str, *changes: Change) -> tuple[Path, list[list[Facts]]]:
    """Three steps on two ranks, three on three, the rest on two again."""
    folder = new_run(settings(shards, f"strategy={strategy}", "trainer.devices=2")).path
    seen = []
    for number, world in enumerate((2, 3, 2)):
        words = (f"strategy={strategy}", f"trainer.devices={world}", *([f"resume={folder}"] if number else []))
        stop = [stop_after(3 * number + 3)] if number < 2 else []
        seen.append(train_on(world, settings(shards, *words), folder, *changes, *stop))
    return folder, seen


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_three_two(shards, alone, strategy) -> None:
    folder, seen = two_three_two(shards, strategy)
    for step in range(STEPS):
        fetched = [rank["numbers"][step] for start in seen for rank in start if step in rank["numbers"]]
        real = sorted(number for numbers in fetched for number in numbers if number >= 0)
        assert real == list(range(SEQUENCES * step, SEQUENCES * (step + 1)))
    assert [len(rank["numbers"][4]) for rank in seen[1]] == [4, 4, 4]  # equal shapes: four places are empty
    for ours, theirs in zip(metrics(folder, *COLUMNS), metrics(alone, *COLUMNS), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, nan_ok=True)
    expected = weights(alone)
    assert all((value - expected[name]).abs().max() < 1e-9 for name, value in weights(folder).items())


def no_empty_places() -> None:
    """Ranks are made even with rows that are there already, as a distributed sampler does it."""
    numbers = Windows.numbers

    def repeated(windows: Windows, updates: Any) -> Any:
        found = numbers(windows, updates)
        return np.where(found == EMPTY, np.min(updates) * windows.plan.sequences, found)

    Windows.numbers = repeated  # type: ignore[method-assign]


def test_places_that_are_filled_again_are_noticed(shards, alone) -> None:
    folder, _ = two_three_two(shards, "ddp", no_empty_places)
    losses = [row[1] for row in metrics(folder, "train/loss")]
    expected = [row[1] for row in metrics(alone, "train/loss")]
    assert losses[:3] == pytest.approx(expected[:3], rel=1e-9)
    assert losses[4] != pytest.approx(expected[4], rel=1e-9)
