"""A stopped run goes on as if nothing had happened, on as many ranks as there are then and under any strategy."""

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from jobs import Facts, digits, last_checkpoint, stop_after, train_on, weights

from lmforge.data.shards import write_shards
from tiny import compose, metrics, new_run

COLUMNS = ("train/loss", "train/grad_norm", "val/loss", "val/bits_per_byte")
STEPS = 12
slow = partial(pytest.param, marks=pytest.mark.slow)
SEQUENCES = 12


def fetched(starts: list[list[Facts]]) -> dict[int, list[int]]:
    """Global sample numbers of every update, over all ranks of all starts of a run; those that share the work on the
    very same samples count once."""
    numbers = defaultdict(set)
    for facts in starts:
        for rank in facts:
            for update, mine in rank["numbers"].items():
                numbers[update].add(tuple(mine))
    return {update: sorted(n for mine in found for n in mine) for update, found in numbers.items()}


def settings(shards: Path, strategy: str, *words: str) -> dict[str, Any]:
    common = (f"batch.sequences={SEQUENCES}", f"trainer.max_steps={STEPS}", "trainer.val_every_n_steps=4")
    shape = ("model.n_kv_head=2", "model.tied=true")  # that tensor parallel ranks and both ends of a pipeline share
    return compose(shards, *common, *shape, *f"strategy={strategy}".split(), *words)


@pytest.mark.parametrize(
    "starts",
    [
        [("fsdp", 2), ("single", 1), ("ddp", 3)],
        [("single", 1), ("fsdp", 2)],
        [("3d", 4), ("context", 2), ("single", 1)],
        [("tensor", 2), ("pipeline", 2), ("hsdp strategy.shard=1", 2)],
        slow([("ddp", 2), ("fsdp", 3), ("fsdp", 1)]),
    ],
)
def test_on_other_ranks(shards, alone, starts) -> None:
    """Stopped after 4 and 8 updates; nothing is left out or done twice and every number is the uninterrupted run's."""
    words = ("precision=64-true", "batch.micro_sequences=2")
    folder = new_run(settings(shards, starts[0][0], *words)).path
    seen = []
    for number, (strategy, world) in enumerate(starts):
        changes = [stop_after(4 * number + 4, rank=world - 1)] if number < len(starts) - 1 else []
        seen.append(train_on(world, settings(shards, strategy, *words), folder, *changes))
    numbers = {step: list(range(SEQUENCES * step, SEQUENCES * (step + 1))) for step in range(STEPS)}
    assert fetched(seen) == numbers
    for ours, theirs in zip(metrics(folder, *COLUMNS), metrics(alone, *COLUMNS), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, nan_ok=True)
    expected = weights(alone)
    assert all((value - expected[name]).abs().max() < 1e-9 for name, value in weights(folder).items())


@pytest.fixture(scope="module")
def alone(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    plain = settings(shards, "single", "precision=64-true", f"paths.root={tmp_path_factory.mktemp('alone')}")
    folder = new_run(plain).path
    train_on(1, plain, folder)
    return folder


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor", "pipeline", slow("context")])
def test_the_same_digits(shards, strategy) -> None:
    """With dropout, on as many ranks as before: the log, the weights and the optimizer's state to the last digit."""
    plain = dropping_out(shards, strategy)
    whole, parts = new_run(plain).path, new_run(plain).path
    first, _ = train_on(2, plain, whole)
    train_on(2, plain, parts, stop_after(3))
    assert last_checkpoint(parts).step == 3
    second, _ = train_on(2, plain, parts)
    assert digits(parts) == digits(whole)
    assert [first["draws"][step] for step in range(4, 9)] == list(second["draws"].values())


@pytest.mark.parametrize("forget", [jobs.forget_position, slow(jobs.forget_moments), slow(jobs.forget_step_in_draws)])
def test_what_a_resume_forgets_is_noticed(shards, forget) -> None:
    plain = dropping_out(shards, "ddp")
    whole, parts = new_run(plain).path, new_run(plain).path
    train_on(2, plain, whole)
    train_on(2, plain, parts, stop_after(3))
    train_on(2, plain, parts, forget)
    assert digits(parts)[1] != digits(whole)[1]


def dropping_out(shards: Path, strategy: str) -> dict[str, Any]:
    return settings(shards, strategy, "model.dropout=0.1", "trainer.max_steps=8", "optimizer=muon")


@pytest.mark.parametrize("accumulation", [1, slow(2)])
def test_six_samples(tmp_path, accumulation) -> None:
    """Six rows, one a micro-batch, on two ranks: after a stop in mid-epoch exactly the unseen rows follow."""
    documents = [np.full(16, number + 2) for number in range(6)]
    shards = write_shards(tmp_path / "six", {"train": documents, "val": documents[:1]}, vocab_size=50)
    words = ("model.context=16", "batch.micro_sequences=1", f"batch.sequences={2 * accumulation}", "strategy=ddp")
    plain = compose(shards, *words, "trainer.max_epochs=2", "trainer.max_steps=null")
    whole, parts = new_run(plain).path, new_run(plain).path
    expected = rows_of([train_on(2, plain, whole)])
    found = rows_of([train_on(2, plain, parts, stop_after(2)), train_on(2, plain, parts)])
    assert found == expected
    assert sorted(found[:6]) == sorted(found[6:]) == list(range(6))
    assert metrics(parts, "train/loss") == metrics(whole, "train/loss")


def rows_of(starts: list[list[Facts]]) -> list[int]:
    """Rows in the order of the global batches, those of one micro-batch by rank."""
    rows = {}
    for facts in starts:
        for rank in facts:
            for update, numbers in rank["numbers"].items():
                rows |= dict(zip(numbers, rank["rows"][update], strict=True))
    return [rows[number] for number in sorted(rows)]
