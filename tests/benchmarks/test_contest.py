"""Contenders that take turns, and the table made of them."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tiny import ROOT

sys.path.insert(0, str(ROOT))  # benchmarks/ lies beside src/ and is not part of the package

from benchmarks.rows import NAMES

from benchmarks import contest, report


def spinning(turn: contest.Turn, seconds: float, log: str) -> None:
    """Uses so much CPU time a turn, after a preparation that must not count."""
    _spin(0.05)
    turn()
    while True:
        _spin(seconds)
        with open(log, "a") as file:
            file.write(f"{seconds} ")
        turn(seconds=seconds)


def _spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def failing(turn: contest.Turn) -> None:
    turn()
    raise ValueError("no batch left")


def test_turns_alternate_and_cpu_time_is_that_of_the_turn_alone(tmp_path) -> None:
    log = str(tmp_path / "log")
    options: dict[str, Any] = {
        "short": (spinning, {"seconds": 0.01, "log": log}),
        "long": (spinning, {"seconds": 0.03, "log": log}),
    }
    lanes = contest.compete(options, rounds=3, warmup=1, folder=tmp_path)
    assert (tmp_path / "log").read_text().split() == ["0.01", "0.03", "0.03", "0.01"] * 2
    ratio = contest.Ratio.of(lanes["long"].seconds, lanes["short"].seconds)
    assert 1.5 < ratio.best < 4.5
    assert [said["seconds"] for said in lanes["short"].said] == [0.01] * 3
    assert lanes["short"].peak > 1e6


def test_a_contender_that_fails_is_named_with_its_error(tmp_path) -> None:
    with pytest.raises(contest.Failed, match=r"(?s)bad: .*no batch left"):
        contest.compete({"bad": (failing, {})}, rounds=1, warmup=0, folder=tmp_path)


@pytest.mark.parametrize(
    ("reached", "again", "expected"),
    [
        (True, None, "PASS"),
        (False, None, "FAIL"),
        (True, 1.02, "PASS"),
        (True, 1.04, "NOISY (PASS)"),
        (False, 0.9, "NOISY (FAIL)"),
    ],
)
def test_a_row_is_as_noisy_as_a_contender_against_itself(reached, again, expected) -> None:
    assert report.verdict(reached, again) == expected


def test_long_cells_are_wrapped_and_nothing_of_them_is_lost() -> None:
    row = report.Row("a " * 40, "goal", "measured " * 20, report.PASS)
    words = " ".join(report.lines([row])).split()
    assert words.count("a") == 40
    assert words.count("measured") == 20 + 1


def run(folder: Path, *words: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--out", str(folder / "bench.json"), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "bench.json").read_text())
    assert found["machine"]["cores"] >= 1
    assert all(row["what"] in " ".join(done.stdout.split()) or len(row["what"]) > 30 for row in found["rows"])
    return {row["what"]: row for row in found["rows"]}


def test_a_quick_row_runs_and_says_so_in_table_and_file(tmp_path) -> None:
    rows = run(tmp_path, "--rows", "checkpoint,tokenising")
    assert "the same ids" in rows["tokenising, one core"]["measured"]
    assert rows["checkpoint, time blocked"]["verdict"] in ("PASS", "FAIL")


@pytest.mark.slow
def test_every_row_runs(tmp_path) -> None:
    rows = run(tmp_path)
    assert len(rows) >= len(NAMES)
    assert all(row["verdict"] != report.BROKEN for row in rows.values())
