"""A run that is requeued or killed and goes on is one run in every tracker, with each step once."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from changes import SLOW_STEPS

from lmforge.training.csvlog import read_rows

WORDS = ("logger=many", "trainer.max_steps=12", "callbacks.samples=null")
STEPS = list(range(1, 13))
BLOCK, WHOLE, LAST = 32768, 1, 4  # of a log in LevelDB's format


def tensorboard_steps(run: Path, tag: str = "train/loss") -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


def records(file: Path) -> Iterator[bytes]:
    """The records of a .wandb file: a head of 7 bytes, then LevelDB's log format, which a kill may have cut short."""
    content, place, parts = file.read_bytes(), 7, []
    while place + 7 <= len(content):
        if BLOCK - place % BLOCK < 7:  # too little for a head: padding
            place += BLOCK - place % BLOCK
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts.append(content[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (WHOLE, LAST) and place <= len(content):
            yield b"".join(parts)
            parts = []


def wandb_parts(run: Path) -> list[tuple[str, list[dict[str, str]]]]:
    """(run id, rows as logged) of every start, the first start first."""
    from wandb.proto import wandb_internal_pb2

    parts = []
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        rows = []
        for data in records(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                rows.append({item.key or item.nested_key[0]: item.value_json for item in record.history.item})
        parts.append((file.stem.removeprefix("run-"), rows))
    return parts


def logged(program) -> int:
    return len(read_rows(program.run() / "metrics.csv")) if program.runs() else 0


def trained(rows: list[dict[str, str]]) -> list[int]:
    """Steps of the rows that hold a training loss, by wandb's own count, which must be ours."""
    assert all(row["_step"] == row["trainer/global_step"] for row in rows if "trainer/global_step" in row)
    return [int(row["_step"]) for row in rows if "train/loss" in row]


@pytest.mark.parametrize("stop", [signal.SIGUSR1, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_one_run_everywhere(program, stop) -> None:
    running = program.start(*WORDS, changes=(SLOW_STEPS,))
    running.wait_for(lambda: logged(program) >= 7)
    if stop == signal.SIGKILL:
        running.kill()
    else:
        running.send(stop)
        assert running.finish(60).code == 85
    again = program.train(*WORDS, "resume=auto")
    assert again.code == 0, again.output
    run = program.run()  # the same folder
    assert tensorboard_steps(run) == STEPS
    assert [int(row["step"]) for row in read_rows(run / "metrics.csv")] == STEPS
    (first, before), (second, after) = wandb_parts(run)
    assert first == second == run.name
    for rows in (before, after):
        assert trained(rows) == sorted(set(trained(rows)))  # never backwards, so nothing is dropped
    assert trained(after)[-1] == 12
    if stop == signal.SIGUSR1:
        assert trained(before) + trained(after) == STEPS
    losses = {row["_step"]: row["train/loss"] for row in before if "train/loss" in row}
    for row in after:  # what is done again after a kill has the same digits, so a tracker may keep either
        assert losses.get(row["_step"], row.get("train/loss")) == row.get("train/loss")
