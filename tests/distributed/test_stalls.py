"""Ranks that live and do not move: the run ends with code 5 and names the one that the others wait for."""

import re
from collections import Counter
from functools import partial
from pathlib import Path

import hangs
import jobs
import pytest

from lmforge.config.errors import Exit
from lmforge.runs.folder import RunFolder
from ranks import run_ranks
from tiny import compose, metrics, new_run

WORDS = (
    "trainer.devices=2",
    "callbacks.checkpoint.every_n_steps=2",
    "callbacks.stall.step_seconds=2",
    "callbacks.stall.first_seconds=30",
)


class Runs:
    """Runs on two ranks and what they say."""

    def __init__(self, shards: Path):
        self.shards = shards

    def start(self, *changes: jobs.Change, words: tuple[str, ...], seconds: float = 40.0) -> tuple[RunFolder, str]:
        """The folder, and why a rank did not come to its end."""
        plain = compose(self.shards, *WORDS, *words)
        run = new_run(plain)
        try:
            spoken = partial(hangs.speak_into, str(run.path))
            run_ranks(jobs.unwatched, 2, plain, str(run.path), spoken, *changes, seconds=seconds)
        except AssertionError as error:
            return run, str(error)
        return run, ""

    def stalled(self, *changes: jobs.Change, words: tuple[str, ...] = ("strategy=ddp",)) -> tuple[RunFolder, str]:
        """A run that ends with code 5, and its report, which one rank has printed."""
        run, failure = self.start(*changes, words=words)
        said = [file.read_text() for file in sorted(run.path.glob("said-*"))]
        assert "died with exit code 5" in failure, said
        assert "Traceback" not in failure
        assert run.noted_end() == Exit.STALL
        (report,) = run.path.glob("stall-*/report.txt")
        assert [text.count(report.read_text()) for text in said].count(1) == 1
        return run, report.read_text()


@pytest.fixture
def runs(shards: Path) -> Runs:
    return Runs(shards)


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("hang", "strategy", "place", "cause"),
    [
        (
            hangs.asleep_in_data,
            "ddp",
            r"waiting for the data of step 4, hangs.py:\d+ in hanging_fetch",
            "data loading:",
        ),
        (hangs.asleep_in_forward, "ddp", r"the forward pass of step 4, hangs.py:\d+ in ", "this rank's own computing"),
        slow(hangs.asleep_in_forward, "fsdp", r"the forward pass of step 4, hangs.py:\d+ in ", "this rank's own"),
        slow(hangs.asleep_in_forward, "pipeline", r"the forward pass of step 4, hangs.py:\d+ in ", "this rank's own"),
        slow(hangs.asleep_in_forward, "tensor", r"the forward pass of step 4, hangs.py:\d+ in ", "this rank's own"),
        slow(hangs.asleep_in_backward, "ddp", r"the backward pass .* of step 4, hangs.py:\d+ in ", "this rank's own"),
        slow(hangs.busy_in_forward, "ddp", r"the forward pass of step 4, hangs.py:\d+ in spin", "this rank's own"),
        slow(hangs.asleep_in_callback, "ddp", r"a callback after step 4, hangs.py:\d+ in hanging", "the callback on"),
    ],
)
def test_the_rank_that_hangs_is_named(runs, hang, strategy, place, cause) -> None:
    run, said = runs.stalled(partial(hang, 1, 4), words=(f"strategy={strategy}", "model.n_kv_head=2"))
    assert re.search(rf"\n  rank 1 lags \(process \d+ on .+\): {place}", said)
    collective = r"(gloo:\w+ number \d+ of \d+ values|a message of another rank)"
    assert re.search(rf"\n  rank 0 waits: .+, in {collective}\n", said), said
    assert f"\n  probable cause: {cause}" in said
    assert f"the run goes on from step-00000002: python train.py resume={run.path}" in said
    stacks = {file.name: file.read_text() for file in run.path.glob("stall-*/rank-*.txt")}
    assert sorted(stacks) == ["rank-00000.txt", "rank-00001.txt"]
    assert "hangs.py" in stacks["rank-00001.txt"]
    assert all("(stall-watch)" in text and "(MainThread)" in text for text in stacks.values())


def test_a_stopped_rank_is_named_by_the_other_and_the_run_goes_on(runs) -> None:
    run, said = runs.stalled(hangs.short_grace, partial(hangs.stopped_at, 1, 4))
    assert "\n  rank 1 lags: no answer\n  rank 0 waits: the backward pass and gradient reduction of step 4, " in said
    assert "probable cause: the process is stopped or frozen" in said
    assert [file.name for file in run.path.glob("stall-*/rank-*.txt")] == ["rank-00000.txt"]
    run_ranks(jobs.unwatched, 2, compose(runs.shards, *WORDS, "strategy=ddp"), str(run.path))
    assert run.summary()["steps"] == 6
    assert [step for (step,) in metrics(run.path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_validation_that_hangs(runs) -> None:
    words = ("strategy=ddp", "trainer.val_every_n_steps=3", "callbacks.stall.first_seconds=2")
    _, said = runs.stalled(partial(hangs.slow_validation, 1, hangs.FOR_EVER), words=words)
    assert re.search(r"rank 1 lags .*: the validation after step 3, hangs.py:\d+ in pause", said)


def test_without_the_watch_the_ranks_would_wait(runs) -> None:
    hang = partial(hangs.asleep_in_data, 1, 2)
    _, failure = runs.start(hangs.unwatched_thread, hang, words=("strategy=ddp",), seconds=8.0)
    assert failure.count("did not end in time") == 2


# Each longer than step_seconds: the first step, a validation of short batches, and a save.
SLOWNESS = (
    partial(hangs.asleep_in_forward, 1, 1, 3.0),
    partial(hangs.slow_validation, 1, 1.0),
    partial(hangs.slow_writes, 1, 2.5),
)
SLOW = ("strategy=ddp", "trainer.max_steps=2", "batch.sequences=2", "trainer.limit_val_batches=4")


def test_slow_is_not_hung(runs) -> None:
    run, failure = runs.start(*SLOWNESS, words=SLOW, seconds=60.0)
    assert not failure
    assert run.summary()["steps"] == 2
    assert list(run.path.glob("stall-*")) == []
    slept = [line for line in (run.path / "said-1").read_text().splitlines() if line.startswith("asleep in ")]
    assert Counter(slept) == {"asleep in forward": 1, "asleep in validation": 4, "asleep in saving": 1}


@pytest.mark.parametrize(
    "change", [(), pytest.param((hangs.no_beats_in_validation,), marks=pytest.mark.slow)], ids=["first", "validation"]
)
def test_it_would_be_without_the_longer_limit_or_the_beats(runs, change) -> None:
    words = (*SLOW, f"callbacks.stall.first_seconds={30 if change else 2}")
    _, said = runs.stalled(*SLOWNESS, *change, words=words)
    assert f"no progress for 2 s after step {2 if change else 0}" in said
