"""Who lags and why, from the ranks' notes."""

from pathlib import Path
from typing import Any

import pytest

from lmforge.training.stall_place import STEP, WORDS
from lmforge.training.stall_verdict import Note, find_lagging, names, read_notes, verdict

STEPS = 41


def note(rank: int, phase: str, waits: str | None = None, **facts: Any) -> Note:
    inside = phase in STEP
    known = {
        "host": f"node{rank}",
        "pid": 100 + rank,
        "step": STEPS,
        "line": "own.py:7 in f",
        "said": WORDS[phase].format(STEPS + inside),
        "position": (STEPS + 1, STEP.index(phase)) if inside else (STEPS, len(STEP)),
        "reached": {"1": 7},
        "look": 3,
        "idle": 300.0,
        "limit": 300.0,
    }
    return Note(**{"rank": rank, "phase": phase, "waits": waits, **known, **facts})


SUM = "gloo:all_reduce number 7 of 4 values"


@pytest.mark.parametrize(
    ("notes", "lagging", "cause"),
    [
        # a rank that says nothing comes before all else
        ([note(0, "agreement", SUM), note(2, "data")], [1], "silent"),
        ([note(0, "agreement", SUM), note(1, "data"), note(2, "agreement", SUM)], [1], "data"),
        ([note(0, "backward", SUM), note(1, "backward"), note(2, "backward", SUM)], [1], "own"),
        ([note(0, "forward"), note(1, "agreement", SUM), note(2, "callback")], [2], "callback"),
        ([note(0, "saving"), note(1, "saving", SUM), note(2, "saving", SUM)], [0], "saving"),
        ([note(0, "validation", SUM), note(1, "validation"), note(2, "validation")], [1, 2], "validation"),
        # nobody is free, and all have come equally far: the network
        ([note(0, "backward", SUM), note(1, "backward", SUM), note(2, "backward", SUM)], [], "network"),
        # nobody is free, but one has entered fewer collectives: they take different ways
        ([note(0, "norm", SUM), note(1, "agreement", SUM, reached={"1": 6}), note(2, "norm", SUM)], [1], "apart"),
        # where nothing is recorded the place in the step decides
        ([note(0, "backward"), note(1, "forward"), note(2, "backward")], [1], "own"),
    ],
)  # fmt: skip
def test_the_lagging_rank_and_the_cause(notes, lagging, cause) -> None:
    assert find_lagging(notes, 3) == (lagging, cause)


def test_groups_are_compared_only_among_their_own_ranks() -> None:
    notes = [note(0, "norm", SUM, reached={"a": 5}), note(1, "norm", SUM, reached={"b": 9})]
    assert find_lagging(notes, 2) == ([], "network")


def test_a_process_that_is_alone() -> None:
    assert find_lagging([note(0, "forward")], 1) == ([0], "alone")
    assert find_lagging([note(0, "data")], 1) == ([0], "data")


def test_the_report() -> None:
    notes = [note(rank, "agreement", SUM) for rank in range(6) if rank != 3] + [note(3, "data")]
    assert verdict(sorted(notes, key=lambda each: each.rank), 6) == [
        "rank 3 lags (process 103 on node3): waiting for the data of step 42, own.py:7 in f",
        f"ranks 0-2, 4-5 wait: the agreement of step 42, own.py:7 in f, in {SUM}",
        "probable cause: data loading: the storage that it reads, or a loader's worker (data.num_workers)",
    ]
    silent = verdict([note(0, "agreement", SUM)], 3)
    assert silent[:2] == [
        "ranks 1-2 lag: no answer",
        f"rank 0 waits: the agreement of step 42, own.py:7 in f, in {SUM}",
    ]
    all_wait = verdict([note(rank, "agreement", SUM) for rank in (0, 1)], 2)
    assert all_wait[0].startswith("ranks 0-1 wait: ")
    assert all_wait[1].startswith("probable cause: network or reduction: ")


def test_names() -> None:
    assert [names(ranks) for ranks in ([3], [0, 1], [5, 0, 2, 3])] == ["rank 3", "ranks 0-1", "ranks 0, 2-3, 5"]


def test_notes_on_disk(tmp_path: Path) -> None:
    """What is torn, strange or not yet there is no note."""
    mine = note(4, "data")
    mine.write(tmp_path)
    (tmp_path / "rank-00001.json").write_text('{"rank": 1, "ho')
    (tmp_path / "rank-00002.json").write_text('{"rank": 2}')
    (tmp_path / "rank-00003.txt").write_text("stack")
    assert read_notes(tmp_path, 5) == {4: mine}
    assert read_notes(tmp_path / "absent", 5) == {}
