"""ZeRO on real ranks: trains as one process does, holds its cut of everything, shares checkpoints with the others."""

import math
from functools import partial
from pathlib import Path

import jobs
import pytest
from jobs import Facts, digits, stop_after, train_on
from parity import COLUMNS, Alone, Rows, differences, spread

from lmforge.parallel import deepspeed
from tiny import compose, metrics, new_run

SINGLE, HALF = ("precision=32-true",), ("precision=bf16-mixed",)
slow = partial(pytest.param, marks=pytest.mark.slow)


def cut_all() -> None:
    """Not even the smallest parameters stay whole, as they would in networks of this size."""
    deepspeed.WHOLE = 0


def zero(stage: int, *more: str, world: int = 2) -> str:
    return " ".join([f"strategy=deepspeed strategy.stage={stage} trainer.devices={world} trainer.max_steps=8", *more])


@pytest.fixture(scope="module")
def alone(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(shards, tmp_path_factory.mktemp("alone"))


SPREAD = [
    (zero(2, "batch.micro_sequences=2"), SINGLE, 1e-5),
    slow(zero(1, "batch.micro_sequences=2 trainer.activation_checkpointing=1"), SINGLE, 1e-5),
    slow(zero(3, "batch.micro_sequences=2 trainer.activation_checkpointing=1"), SINGLE, 1e-5),
    slow(zero(3, "trainer.loss_chunk=16", world=3), (*SINGLE, "model.tied=false"), 1e-5),
    slow(zero(2, "compile=eager"), SINGLE, 1e-5),
    *(slow(zero(stage, "batch.micro_sequences=2"), HALF, 5e-2) for stage in (1, 2, 3)),
]


@pytest.mark.parametrize(("words", "numbers", "tolerance"), SPREAD)
def test_ranks_equal_one_process(shards, alone, words, numbers, tolerance) -> None:
    columns = slice(None) if tolerance < 1e-2 else slice(-1)  # one token more or less is a jump in accuracy
    rows, expected = spread(shards, words, numbers, cut_all), alone(*numbers)
    assert differences([row[columns] for row in rows], [row[columns] for row in expected], tolerance) == []


@pytest.mark.parametrize("mutation", [jobs.wrong_scale, slow(jobs.dropped_rank), slow(jobs.mean_of_means)])
def test_a_wrong_step_is_noticed(shards, alone, mutation) -> None:
    wrong = spread(shards, zero(2, "trainer.max_steps=2"), SINGLE, mutation)
    assert differences(wrong, alone(*SINGLE)[:2], 1e-5)


def go_on(shards: Path, *starts: str, changes: tuple[jobs.Change, ...] = ()) -> tuple[Path, list[list[Facts]]]:
    """Stop after every two updates and go on with the next words; `changes` spoil the last start."""
    folder, seen = None, []
    for number, words in enumerate(starts):
        plain = compose(shards, "batch.sequences=12", "trainer.val_every_n_steps=4", *words.split(), *SINGLE)
        folder = folder or new_run(plain).path
        last = number == len(starts) - 1
        spoilt = (cut_all, *changes) if last else (cut_all, stop_after(2 * number + 2))
        seen.append(train_on(plain["trainer"]["devices"], plain, folder, *spoilt))
    assert folder is not None
    return folder, seen


EIGHT = "trainer.max_steps=8"


@pytest.mark.parametrize(
    "starts",
    [
        (zero(2), f"strategy=ddp trainer.devices=2 {EIGHT}", zero(2)),
        slow((f"strategy=single {EIGHT}", zero(3, world=3), zero(1), f"strategy=fsdp trainer.devices=2 {EIGHT}")),
    ],
)
def test_goes_on_where_others_stopped(shards, alone, starts) -> None:
    folder, _ = go_on(shards, *starts)
    assert differences(metrics(folder, *COLUMNS), alone(*SINGLE), 1e-5) == []


@pytest.mark.parametrize("forget", [jobs.forget_moments, slow(jobs.forget_position)])
def test_what_a_resume_forgets_is_noticed(shards, alone, forget) -> None:
    folder, _ = go_on(shards, zero(2), zero(2), changes=(forget,))
    assert differences(metrics(folder, *COLUMNS), alone(*SINGLE), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "more"), [(1, ""), (2, "precision=bf16-mixed"), (3, "")])
def test_the_same_digits(shards, stage, more) -> None:
    """With dropout: the log, the weights and the optimizer's state to the last digit."""
    plain = compose(shards, *zero(stage, "model.dropout=0.1 batch.sequences=12", more).split())
    whole, parts = new_run(plain).path, new_run(plain).path
    train_on(2, plain, whole, cut_all)
    train_on(2, plain, parts, cut_all, stop_after(3))
    train_on(2, plain, parts, cut_all)
    assert digits(parts) == digits(whole)


@pytest.mark.parametrize("stage", [2, slow(3)])
def test_each_rank_holds_its_share(shards, stage) -> None:
    """And one rank's loss that is not finite leaves the update out on both."""
    plain = compose(shards, *zero(stage, "trainer.max_steps=3").split())
    folder = new_run(plain).path
    facts = train_on(2, plain, folder, cut_all, partial(jobs.nan_at, 1, 2))
    total = sum(value.numel() for value in jobs.weights(folder).values())
    assert all(total <= rank["moments"] <= 1.01 * total for rank in facts)  # two of them, on two ranks
    if stage == 3:
        assert all(whole == 0 for rank in facts for _, whole in rank["parameters"].values())
    assert [rank["skipped"] for rank in facts] == [1, 1]
    norms: Rows = metrics(folder, "train/grad_norm")
    assert [math.isfinite(norm) for _, norm in norms] == [True, False, True]
