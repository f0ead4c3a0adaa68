"""What happens to one rank happens to all: a NaN, a full disk, a signal, an error."""

import math
import signal
import time
from functools import partial

import jobs
import mishaps
import pytest
from jobs import last_checkpoint, train_on

from lmforge.runs.folder import list_checkpoints
from ranks import run_ranks
from tiny import compose, metrics, new_run

slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_nan_on_one_rank_skips_the_update_on_all(shards, strategy) -> None:
    plain = compose(shards, f"strategy={strategy}", "trainer.devices=2")
    folder = new_run(plain).path
    facts = train_on(2, plain, folder, partial(jobs.nan_at, 1, 3))
    assert [(rank["step"], rank["skipped"], rank["finite"]) for rank in facts] == [(6, 1, True)] * 2
    rows = metrics(folder, "train/loss", "train/skipped")
    assert [step for step, loss, _ in rows if math.isnan(loss)] == [3]  # nothing was learnt there
    assert [skipped for _, _, skipped in rows[2:]] == [1.0] * 4
    assert last_checkpoint(folder).state["skipped"] == 1


def test_too_many_in_a_row_end_all_ranks(shards) -> None:
    plain = compose(shards, "strategy=fsdp", "trainer.devices=2", "optimizer.lr=1e30", "trainer.max_steps=20")
    facts = train_on(2, plain, new_run(plain).path)
    assert [rank["stopped"] for rank in facts] == ["NonFinite"] * 2


@pytest.mark.parametrize(
    ("strategy", "number", "stopped"),
    [
        ("fsdp", signal.SIGTERM, "Terminated"),
        ("ddp", signal.SIGUSR1, "Requeue"),
        slow("ddp", signal.SIGTERM, "Terminated"),
        slow("fsdp", signal.SIGUSR1, "Requeue"),
    ],
)
def test_a_signal_to_one_rank_stops_all_at_one_step(shards, strategy, number, stopped) -> None:
    plain = compose(shards, f"strategy={strategy}", "trainer.devices=2", "trainer.max_steps=50")
    folder = new_run(plain).path
    facts = train_on(2, plain, folder, partial(jobs.signal_at, 1, 4, number))
    assert [(rank["stopped"], rank["step"]) for rank in facts] == [(stopped, 5)] * 2
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000005"]
    last_checkpoint(folder).verify()
    assert [row[0] for row in metrics(folder)] == [1, 2, 3, 4, 5]


def test_a_notice_on_one_node_stops_all_ranks_with_one_checkpoint(shards, tmp_path) -> None:
    file = tmp_path / "going"
    words = (f"callbacks.preemption.notice_file={file}", "callbacks.preemption.notice_seconds=0.01")
    plain = compose(shards, "strategy=fsdp", "trainer.devices=2", "trainer.max_steps=100000", *words)
    folder = new_run(plain).path
    facts = train_on(2, plain, folder, partial(mishaps.touch_at, 1, 4, file))
    (step,) = {rank["step"] for rank in facts}
    assert [rank["stopped"] for rank in facts] == ["Requeue"] * 2
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{step:08d}"]
    assert 4 <= step < 100000


@pytest.mark.parametrize(("rank", "every"), [(1, 2), (1, 100), slow(0, 2), slow(0, 100)])
def test_a_full_disk_on_one_rank_ends_all(shards, rank, every) -> None:
    """No rank waits for the part of a checkpoint that will never come, and what was saved before stays."""
    plain = compose(shards, "strategy=fsdp", "trainer.devices=2", f"callbacks.checkpoint.every_n_steps={every}")
    folder = new_run(plain).path
    began = time.monotonic()
    with pytest.raises(AssertionError) as error:
        run_ranks(jobs.unwatched, 2, plain, str(folder), partial(jobs.unwritable, rank), seconds=30)
    assert time.monotonic() - began < 25
    assert "No space left on device" in str(error.value)
    assert "another rank could not write" in str(error.value)
    assert list_checkpoints(folder / "checkpoints") == []


def test_an_error_on_one_rank_does_not_leave_the_other_waiting(shards) -> None:
    plain = compose(shards, "strategy=fsdp", "trainer.devices=2", "callbacks.checkpoint.every_n_steps=1")
    began = time.monotonic()
    with pytest.raises(AssertionError, match="told to fail") as error:
        train_on(2, plain, new_run(plain).path, partial(mishaps.error_at, 1, 4), seconds=30)
    assert "did not end in time" not in str(error.value)
    assert time.monotonic() - began < 25
