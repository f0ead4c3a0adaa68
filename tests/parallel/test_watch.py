"""A rank's end is noticed at once, with its code, and a rank that hangs afterwards is ended."""

import os
import signal
import subprocess
import time

import pytest

from lmforge.config.errors import Exit
from lmforge.parallel import watch
from lmforge.parallel.watch import Death, Watch, oom_kills
from ranks import CONTEXT


def started(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", script])


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -9 $$", -9), ("exit 0", 0)])
def test_the_code_of_a_child_and_of_a_process_nobody_has_asked_for(own, script, code) -> None:
    process = started(f"sleep 0.2; {script}")
    seen = Watch()
    seen.add(3, process.pid, process if own else None)
    seen.add(3, process.pid)  # once more is no second watch
    seen.done = True
    with seen.changed:
        assert seen.changed.wait_for(lambda: seen.deaths, 10)
    assert seen.deaths == [Death(3, process.pid, code)]
    assert seen.cause(0.0) == (seen.deaths[0] if code else None)
    assert process.wait() == code


def test_a_process_that_is_gone_left_no_word() -> None:
    process = started("exit 7")
    process.wait()
    seen = Watch()
    seen.done = True
    seen.add(1, process.pid)
    assert str(seen.cause(10.0)) == f"rank 1 (process {process.pid}) is gone without a word"


def test_the_killed_rank_is_the_cause_not_those_that_fell_with_it() -> None:
    seen = Watch()
    seen.deaths = [Death(2, 20, 1), Death(0, 10, 0), Death(1, 15, -signal.SIGKILL)]
    assert seen.cause(0.0) == Death(1, 15, -signal.SIGKILL)
    assert str(seen.deaths[2]) == "rank 1 (process 15) was killed by SIGKILL"
    assert str(seen.deaths[0]) == "rank 2 (process 20) ended with exit code 1"


def hang(mine: str) -> None:
    watch.GRACE = 0.2
    seen = Watch()
    if mine == "own":
        seen.leave_within(0.2, lambda: 4)
    else:
        seen.add(1, started("exit 7").pid)
        seen.done = mine == "done"
    if mine == "told":
        seen.give_up = lambda death: int(Exit.OUT_OF_MEMORY)
    time.sleep(3.0)
    os._exit(0)


@pytest.mark.parametrize(("mine", "code"), [("lost", 1), ("told", 4), ("own", 4), ("done", 0)])
def test_a_rank_that_hangs_is_ended(mine, code) -> None:
    process = CONTEXT.Process(target=hang, args=(mine,))
    process.start()
    process.join(30)
    assert process.exitcode == code


def test_the_kernels_kills_are_counted_from_all_its_files(tmp_path, monkeypatch) -> None:
    (tmp_path / "events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 9\n")
    (tmp_path / "vmstat").write_text("nr_free 1\noom_kill 5\n")
    monkeypatch.setattr(watch, "KILL_COUNTS", [str(tmp_path / name) for name in ("events", "vmstat", "absent")])
    assert oom_kills() == 7
