"""A rank that dies alone, under an outer launcher: the other one says which and of what, and ends in seconds."""

import re
import time
from functools import partial

import jobs
import mishaps
import pytest

from lmforge.runs.folder import list_checkpoints
from ranks import run_ranks
from tiny import compose, new_run


def told(shards, change, *words: str) -> tuple[str, float]:
    """What the failing ranks of a run on two ranks said, and how long all took."""
    plain = compose(shards, "trainer.devices=2", "callbacks.checkpoint.every_n_steps=2", *words)
    folder = new_run(plain).path
    began = time.monotonic()
    with pytest.raises(AssertionError) as error:
        run_ranks(jobs.unwatched, 2, plain, str(folder), change, seconds=40)
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["step-00000002"]
    return str(error.value), time.monotonic() - began


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_with_what_most_likely_killed_it(shards, strategy, rank) -> None:
    said, seconds = told(shards, partial(mishaps.kill_at, rank, 4), f"strategy={strategy}")
    assert f"rank {rank}: died with exit code -9" in said
    death = rf"OutOfMemory: rank {rank} \(process \d+\) (was killed by SIGKILL|is gone without a word) after step 3"
    assert re.search(death, said)
    assert "most likely the kernel did it because memory ran out" in said
    assert "strategy=fsdp " in said if strategy == "ddp" else "strategy=fsdp " not in said
    assert seconds < 30


def test_a_rank_that_ends_with_a_code_of_its_own(shards) -> None:
    """Which it notes in the run folder; whoever started it may have asked for the code before the other rank could."""
    said, _ = told(shards, partial(mishaps.leave_at, 1, 4, 7), "strategy=ddp")
    assert re.search(r"RankLost: rank 1 \(process \d+\) ended with exit code 7 after step 3", said)
    assert "memory ran out" not in said


def test_a_rank_that_does_not_answer(shards) -> None:
    """The other one waits as long as the time-out says, and no longer."""
    said, seconds = told(shards, partial(mishaps.sleep_at, 1, 4, 15.0), "strategy=ddp", "strategy.timeout_seconds=3")
    assert "RankLost: another rank took no part in an exchange over gloo for 3 s (strategy.timeout_seconds)" in said
    assert "Timed out waiting 3000ms" in said
    assert seconds < 30


@pytest.mark.parametrize(
    ("where", "strategy", "part"),
    [
        ("training", "fsdp", "micro-batch 1 of 1"),
        ("training", "pipeline", "2 micro-batches in a pipeline"),
        ("saving", "fsdp", ""),
    ],
)
def test_one_rank_without_memory_ends_both(shards, where, strategy, part) -> None:
    said, seconds = told(shards, partial(mishaps.no_memory_at, 1, 4, where), f"strategy={strategy}")
    assert seconds < 30
    if where == "saving":
        assert "OutOfMemory: rank 1 ran out of memory while it saved step 4" in said
        assert said.count("OutOfMemory: another rank had no memory to write its part of a checkpoint") == 1
    else:
        assert f"OutOfMemory: rank 1 ran out of memory in training: step 4, {part} (" in said
