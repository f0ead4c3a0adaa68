"""The rank that keeps the others waiting is named, with about what it takes longer."""

from functools import partial
from statistics import median

import hangs
import jobs
import pytest

from ranks import run_ranks
from tiny import compose, metrics, new_run

WORDS = ("trainer.devices=2", "trainer.max_steps=20", "trainer.log_every_n_steps=5", "callbacks.checkpoint=null")
COLUMNS = ("speed/straggler_rank", "speed/straggler_excess")
# Both ranks sleep 50 ms a step, beside which noise is small; one sleeps 50 ms more.
BASE = (partial(hangs.slow_forward, 0, 0.05), partial(hangs.slow_forward, 1, 0.05))
FORWARD, DATA = partial(hangs.slow_forward, 1, 0.05), partial(hangs.slow_data, 1, 0.05)

slow = partial(pytest.param, marks=pytest.mark.slow)


def measured(shards, strategy: str, *changes: jobs.Change) -> tuple[list[float], float, list[str], str]:
    """The slowest rank by interval, the median excess, the summary's words about it, and what was said meanwhile."""
    plain = compose(shards, *WORDS, f"strategy={strategy}")
    run = new_run(plain)
    run_ranks(jobs.unwatched, 2, plain, str(run.path), partial(hangs.speak_into, str(run.path)), *BASE, *changes)
    found = [row[1:] for row in metrics(run.path, *COLUMNS) if row[0] % 5 == 0]
    assert len(found) == 4
    warnings = [text for text in run.summary()["warnings"] if "longer than the others" in text]
    excess = median(each for _, each in found)
    return [rank for rank, _ in found], excess, warnings, (run.path / "said-0").read_text()


@pytest.mark.parametrize(
    ("strategy", "where"), [("ddp", FORWARD), ("fsdp", FORWARD), slow("ddp", DATA), slow("fsdp", DATA)]
)
def test_a_rank_that_sleeps_50_ms_a_step(shards, strategy, where) -> None:
    ranks, excess, warnings, said = measured(shards, strategy, where)
    assert ranks.count(1.0) >= 3
    assert 0.3 < excess < 1.2
    assert len(warnings) == 1
    assert warnings[0].startswith("rank 1 computed ")
    assert said.count("warning: rank 1 computes ") <= 1


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("ddp", ()),
        slow("fsdp", ()),
        slow("ddp", (FORWARD, hangs.reduction_counts_as_computing)),
        slow("fsdp", (FORWARD, hangs.gathering_counts_as_computing)),
    ],
    ids=["ddp", "fsdp", "blind to reduction", "blind to gathering"],
)
def test_ranks_that_take_the_same_time_or_seem_to(shards, strategy, changes) -> None:
    _, excess, warnings, said = measured(shards, strategy, *changes)
    assert excess < 0.25
    assert warnings == []
    assert "longer than the others" not in said
