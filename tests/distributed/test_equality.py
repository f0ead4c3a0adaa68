"""DDP and FSDP on real ranks train exactly as one process does, and the comparison would notice if they did not."""

from functools import partial
from pathlib import Path

import jobs
import pytest
import spoiled
from parity import Alone, differences, spread


@pytest.fixture(scope="module")
def alone(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(shards, tmp_path_factory.mktemp("alone"))


DOUBLE, SINGLE, HALF = ("precision=64-true",), ("precision=32-true",), ("precision=bf16-mixed",)
LONG = "trainer.max_steps=20"
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("words", "numbers", "tolerance"),
    [
        ("strategy=ddp trainer.devices=2", (*DOUBLE, LONG), 1e-9),
        ("strategy=fsdp trainer.devices=2", (*DOUBLE, LONG), 1e-9),
        ("strategy=ddp trainer.devices=2 batch.micro_sequences=2", (*SINGLE, LONG), 1e-5),
        ("strategy=fsdp trainer.devices=2 batch.micro_sequences=1", (*SINGLE, LONG), 1e-5),
        ("strategy=ddp trainer.devices=3 batch.micro_sequences=1", DOUBLE, 1e-9),
        ("strategy=fsdp trainer.devices=3 trainer.activation_checkpointing=2", DOUBLE, 1e-9),
        ("strategy=ddp trainer.devices=4 trainer.activation_checkpointing=1", DOUBLE, 1e-9),
        slow(
            "strategy=fsdp trainer.devices=4 batch.micro_sequences=1 strategy.reshard_after_forward=false", DOUBLE, 1e-9
        ),
        ("strategy=fsdp trainer.devices=1", DOUBLE, 1e-9),
        ("strategy=ddp trainer.devices=2", (*DOUBLE, "optimizer=muon"), 1e-9),
        ("strategy=fsdp trainer.devices=2", (*DOUBLE, "optimizer=muon"), 1e-9),
        slow("strategy=fsdp trainer.devices=3", (*SINGLE, "optimizer=muon"), 1e-3),
        ("strategy=ddp trainer.devices=2", HALF, 5e-2),
        ("strategy=fsdp trainer.devices=2", HALF, 5e-2),
        slow("strategy=fsdp trainer.devices=2", ("precision=bf16-true",), 5e-2),
    ],
)
def test_ranks_equal_one_process(shards, alone, words, numbers, tolerance) -> None:
    columns = slice(None) if tolerance < 1e-2 else slice(-1)  # one token more or less is a jump in accuracy
    rows, expected = spread(shards, words, numbers), alone(*numbers)
    assert differences([row[columns] for row in rows], [row[columns] for row in expected], tolerance) == []


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "mutation", [jobs.wrong_scale, jobs.dropped_rank, jobs.mean_of_means, spoiled.no_mask, spoiled.swapped_mask]
)
def test_a_wrong_step_is_noticed(shards, alone, kind, mutation) -> None:
    words = f"strategy={kind} trainer.devices=2 trainer.max_steps=2"
    wrong = spread(shards, words, DOUBLE, mutation)
    assert differences(wrong, alone(*DOUBLE)[:2], 1e-9)


def test_gradients_that_stay_at_home_are_noticed(shards, alone) -> None:
    wrong = spread(shards, "strategy=ddp trainer.devices=2 trainer.max_steps=2", DOUBLE, jobs.unsynchronised)
    assert differences(wrong, alone(*DOUBLE)[:2], 1e-9)
