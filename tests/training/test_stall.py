"""The watch of one process: what is a stall and what is not, what it leaves behind, and storage that hangs too."""

import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fits import After, fit
from lmforge.config.errors import Exit
from lmforge.parallel.control import Control
from lmforge.runs.folder import RunFolder
from lmforge.tasks.update import UpdateTask
from lmforge.training import stall
from lmforge.training.stall import StallWatch
from lmforge.training.stall_place import Place
from lmforge.training.stall_verdict import Note, read_notes
from tiny import compose


class Ended(BaseException):
    """Stands for the end of the process."""


class Beside:
    """A watch of `world` ranks, without its thread; `look` is what the thread does after `seconds` more."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int = 0, world: int = 1):
        self.watch = StallWatch(RunFolder(folder), step_seconds=10.0, first_seconds=100.0)
        watch: Any = self.watch
        watch.task = UpdateTask.__new__(UpdateTask)
        watch.task.__dict__ |= {"micro_batch": 1, "control": Control()}
        watch.trainer = SimpleNamespace(global_step=7, validating=False, strategy=SimpleNamespace())
        watch.rank, watch.world, watch.trained = rank, world, 0
        watch.folder = folder / "stall-now"
        watch.report = watch.folder / "report.txt"
        watch.stepped = True
        self.phase("forward")
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(stall, "find_place", lambda thread: self.place)
        monkeypatch.setattr(stall.os, "_exit", self._end)

    def phase(self, name: str, waits: bool = False) -> None:
        self.place = Place(name, "own.py:1 in f", waits)

    def _end(self, code: int) -> None:
        raise Ended(code)

    def look(self, seconds: float) -> None:
        self.watch.idle += seconds
        self.watch._look()


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Beside:
    (tmp_path / "checkpoints").mkdir()
    return Beside(tmp_path, monkeypatch)


def ends(beside: Beside, seconds: float) -> bool:
    try:
        beside.look(seconds)
    except Ended as ended:
        return ended.args == (Exit.STALL,)
    return False


def test_the_limit_of_a_step(beside, capfd) -> None:
    assert not ends(beside, 9.9)
    assert not beside.watch.folder.exists()
    assert ends(beside, 0.2)
    said = capfd.readouterr().err
    assert said.startswith("Stall: no progress for 10 s after step 7\n  rank 0 lags (process ")
    assert said == beside.watch.report.read_text()
    assert said.endswith("  nothing was saved yet\n")
    assert beside.watch.run.noted_end() == Exit.STALL
    assert {file.name for file in beside.watch.folder.iterdir()} == {
        "rank-00000.txt",
        "rank-00000.json",
        "collectives-00000.json",
        "report.txt",
    }


@pytest.mark.parametrize(
    ("facts", "phase", "waits", "limit"),
    [
        ({"stepped": False}, "forward", False, 100.0),
        ({"validating": True}, "validation", False, 100.0),
        ({"validating": True, "validated": True, "stepped": False}, "validation", False, 10.0),
        ({}, "saving", False, 100.0),
        ({}, "saving", True, 10.0),  # another rank is the one that writes
        ({}, "debugger", False, math.inf),
    ],
)
def test_longer_limits(beside, facts, phase, waits, limit) -> None:
    watch = beside.watch
    watch.stepped, watch.validated = facts.get("stepped", True), facts.get("validated", False)
    watch.trainer.validating = facts.get("validating", False)
    beside.phase(phase, waits)
    assert not ends(beside, min(limit, 1e6) - 0.1)
    assert not watch.folder.exists()
    assert ends(beside, 0.2) == (limit < math.inf)


def other(beside: Beside, rank: int = 1, **facts: Any) -> None:
    """Another rank's word."""
    beside.watch.looks += 1
    note = replace(beside.watch._note(), rank=rank, **facts)
    note.write(beside.watch.folder)


def test_nobody_is_ended_while_one_rank_has_time_left(tmp_path, monkeypatch) -> None:
    (tmp_path / "checkpoints").mkdir()
    beside = Beside(tmp_path, monkeypatch, world=2)
    assert not ends(beside, 11.0)
    other(beside, idle=50.0, limit=100.0)  # it saves
    assert not ends(beside, 40.0)
    other(beside, idle=101.0, limit=100.0)
    assert ends(beside, 1.0)


def test_a_rank_that_is_asked_answers_and_leaves_with_the_report(tmp_path, monkeypatch) -> None:
    beside = Beside(tmp_path, monkeypatch, rank=1, world=2)
    beside.watch.folder.mkdir()
    assert not ends(beside, 0.0)  # it moves, and says so
    assert not read_notes(beside.watch.folder, 2)[1].hangs
    assert not ends(beside, 11.0)  # it hangs, but rank 0 is the one to say what happened
    beside.monkeypatch.setattr(stall, "read_notes", lambda folder, below: {})
    beside.watch.report.write_text("over")
    assert ends(beside, 0.0)


def test_one_of_many_reads_the_first_ranks_notes_only(tmp_path, monkeypatch) -> None:
    """All of them once these are silent."""
    (tmp_path / "checkpoints").mkdir()
    beside = Beside(tmp_path, monkeypatch, rank=8, world=1000)
    asked: list[int] = []

    def read(folder: Path, below: int) -> dict[int, Note]:
        asked.append(below)
        return read_notes(folder, below)

    monkeypatch.setattr(stall, "read_notes", read)
    beside.watch.folder.mkdir()
    other(beside, 7, idle=50.0)
    other(beside, 999, idle=50.0)
    assert not ends(beside, 11.0)
    assert asked == [8]
    monkeypatch.setattr(stall, "GRACE", 0.0)
    assert not ends(beside, 1.0)  # its own word would be too old too
    assert asked == [8, 8, 1000]


def test_what_goes_on_leaves_nothing(tmp_path, monkeypatch) -> None:
    (tmp_path / "checkpoints").mkdir()
    beside = Beside(tmp_path, monkeypatch, world=2)
    assert not ends(beside, 11.0)
    assert beside.watch.folder.exists()
    beside.watch.idle = 0.0
    assert not ends(beside, 0.0)
    assert not beside.watch.folder.exists()
    assert beside.watch.hung_since is None


def test_a_collective_that_is_entered_is_progress(beside, monkeypatch) -> None:
    """A rank that comes out of a long save and waits for the others only from then on."""
    beside.phase("saving")
    counts = iter([{"0": 5}, {"0": 5}, {"0": 6}, {"0": 6}])
    monkeypatch.setattr(stall.flight, "reached", lambda entries: next(counts))
    assert not ends(beside, 50.0)
    assert not ends(beside, 20.0)
    beside.phase("saving", waits=True)
    assert not ends(beside, 1.0)
    assert beside.watch.idle == 0.0


def test_a_process_that_was_stopped_has_not_hung(tmp_path, monkeypatch) -> None:
    """Between two of its looks an hour goes by; they add up to two pauses."""
    beside = Beside(tmp_path, monkeypatch, world=2)
    clock = iter([0.0, 3600.0, 7200.0])
    monkeypatch.setattr(stall.time, "monotonic", lambda: next(clock))
    idle: list[float] = []

    def look() -> None:
        idle.append(beside.watch.idle)
        if len(idle) == 2:
            beside.watch.over.set()

    beside.watch.pause = 0.01
    monkeypatch.setattr(beside.watch, "_look", look)
    beside.watch._follow()
    assert idle == [0.0, 0.02]


def test_a_process_that_is_alone_touches_no_file_while_it_moves(tmp_path, monkeypatch) -> None:
    beside = Beside(tmp_path, monkeypatch)
    looked: list[float] = []

    def look() -> None:
        looked.append(beside.watch.idle)
        beside.watch.over.set()

    beside.watch.pause, beside.watch.step_seconds = 0.01, 0.05
    monkeypatch.setattr(beside.watch, "_look", look)
    beside.watch._follow()
    assert looked[0] >= 0.05


@pytest.mark.parametrize("moves", [False, True])
def test_storage_that_hangs_too(tmp_path, monkeypatch, capfd, moves) -> None:
    beside = Beside(tmp_path, monkeypatch)
    codes: list[int] = []
    monkeypatch.setattr(stall.os, "_exit", codes.append)
    monkeypatch.setattr(stall, "GRACE", 0.05)
    beside.watch.first_seconds = 0.1
    with beside.watch._even_if_storage_hangs():
        beside.watch.beats += moves
        time.sleep(0.4)
    assert codes == ([] if moves else [Exit.STALL])
    assert ("the run folder does not answer" in capfd.readouterr().err) == (not moves)


def test_a_disk_that_is_full(tmp_path, monkeypatch, capfd) -> None:
    """Nothing can be written, so nobody can be told; it ends all the same, but not for a folder that has just gone."""
    beside = Beside(tmp_path, monkeypatch)
    monkeypatch.setattr(stall, "GRACE", 0.01)
    beside.watch.first_seconds = 0.2
    error = OSError(28, "No space left on device")
    beside.watch._bear(error)
    beside.watch.hung_since = time.monotonic()
    beside.watch._bear(error)
    time.sleep(0.3)
    with pytest.raises(Ended):
        beside.watch._bear(error)
    assert "Stall: rank 0 has no progress, and the run folder cannot be written: [Errno 28]" in capfd.readouterr().err


def test_a_run_with_and_without(shards) -> None:
    """On by default; its thread ends with the training."""
    found: list[Any] = []

    def note(trainer: Any, task: Any) -> None:
        found.extend(each for each in trainer.callbacks if isinstance(each, StallWatch))
        assert [each.thread.is_alive() for each in found] == [True] * len(found)

    run = fit(shards, also=(After(3, note),))
    (watch,) = found
    assert not watch.thread.is_alive()
    assert (watch.stepped, watch.validated) == (True, True)
    assert watch.beats > 2 * 6  # and those of the validation
    assert list(run.folder.glob("stall-*")) == []
    found.clear()
    fit(shards, "callbacks.stall=null", also=(After(3, note),))
    assert found == []
    assert compose(shards)["callbacks"]["stall"]["step_seconds"] == 300
