"""DDP and FSDP on real ranks train exactly as one process does."""

from pathlib import Path

import pytest

from ranks import run_ranks
from tiny import compose, metrics, new_run, train

COLUMNS = ("train/loss", "train/grad_norm", "val/loss", "val/accuracy")


def run(shards: Path, *words: str) -> list[tuple[float, ...]]:
    plain = compose(shards, "precision=64-true", *words)
    folder = new_run(plain).path
    world = plain["trainer"]["devices"]
    run_ranks(train, world, plain, folder) if world > 1 else train(plain, folder)
    return metrics(folder, *COLUMNS)


@pytest.fixture(scope="module")
def alone(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, ...]]:
    root = tmp_path_factory.mktemp("alone")
    return run(shards, f"paths.root={root}")


@pytest.mark.parametrize(
    "words",
    [
        "strategy=ddp trainer.devices=2",
        "strategy=fsdp trainer.devices=2",
        "strategy=ddp trainer.devices=2 batch.micro_sequences=1",
        "strategy=fsdp trainer.devices=2 batch.micro_sequences=2 trainer.activation_checkpointing=1",
        "strategy=ddp trainer.devices=4",
    ],
)
def test_ranks_equal_one_process(shards, alone, words) -> None:
    rows = run(shards, *words.split())
    assert len(rows) == len(alone) == 6
    for ours, theirs in zip(rows, alone, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, nan_ok=True)
