"""Two jobs at a time."""

import json
import os

import pytest


def facts(sweep, job):
    return json.loads((sweep.path / str(job) / "seen.jsonl").read_text().splitlines()[0])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_jobs_at_a_time(sweep):
    """Each with half of the cores and as many threads; their output stays in their logs."""
    output = sweep("-m", "seed=0,1,2", "sweep.jobs=2", code=1, FAIL="1")
    assert sweep.column("status") == ["done", "failed", "done"]
    first, second = facts(sweep, 0), facts(sweep, 1)
    assert not set(first["cores"]) & set(second["cores"])
    assert first["threads"] == len(first["cores"])
    lines = output.splitlines()
    assert [line.split()[1] for line in lines[1:3]] == ["0", "1"]  # both start before one ends
    assert all(" starts on cores " in line for line in lines[1:3])
    assert "Traceback" not in output
    assert "Traceback" in (sweep.path / "1" / "job.log").read_text()


def test_typed_threads_stay(sweep):
    sweep("-m", "seed=0,1", "sweep.jobs=2", "trainer.threads=7")
    assert [facts(sweep, job)["threads"] for job in (0, 1)] == [7, 7]


def test_parallel_search(sweep):
    output = sweep("sweep=optuna", "optimizer.lr=interval(1e-4, 1e-2)", "sweep.trials=3", "sweep.jobs=2")
    assert sweep.column("status") == ["done"] * 3
    assert len(set(sweep.column("optimizer.lr"))) == 3
    assert [line.split()[2] for line in output.splitlines() if " starts" in line]


def test_sweeps_started_at_once_have_folders_of_their_own(sweep):
    both = [sweep.start("-m", f"seed={seed},{seed + 10}") for seed in (1, 2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    tables = sorted((sweep.folder / "runs" / "default").glob("*/table.csv"))
    assert sorted(file.read_text().splitlines()[1].split(",")[1] for file in tables) == ["1", "2"]
