"""Processes that work on parts. Their functions stand at module level, since fresh interpreters import them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmforge.config.errors import ExitError, UsageError
from lmforge.data.pool import pool


def _square(number):
    return number * number, os.getpid()


def _fails(number):
    if number == 3:
        raise UsageError(["one", "two"])
    return number


def _dies(number):
    os.kill(os.getpid(), signal.SIGKILL)


def _alive(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("workers", [1, 2])
def test_all_is_done_and_nobody_stays(workers):
    with pool(workers, 0) as processes:
        results = list(processes.map(_square, ((i,) for i in range(30))))
    assert sorted(value for value, _ in results) == [i * i for i in range(30)]
    pids = {pid for _, pid in results}
    assert pids == {os.getpid()} if workers == 1 else 1 <= len(pids) <= 2
    assert not _alive(pids - {os.getpid()})


def test_auto_is_one_process_for_a_small_corpus():
    with pool("auto", 1000) as small, pool("auto", 1 << 40) as large, pool("auto", 0) as unknown:
        assert small.workers == 1
        assert large.workers == unknown.workers == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_worker_is_the_error(workers):
    with pytest.raises(UsageError) as caught, pool(workers, 0) as processes:
        list(processes.map(_fails, ((i,) for i in range(100))))
    assert str(caught.value) == "one\ntwo"


def test_a_killed_worker_is_named():
    with pytest.raises(ExitError, match=r"was killed.*same words again"), pool(2, 0) as processes:
        list(processes.map(_dies, ((i,) for i in range(3))))


ORPHANS = """
import os, sys, time
sys.path[:0] = sys.argv[1:]
from test_pool import _square
from lmforge.data.pool import pool
if __name__ == "__main__":
    with pool(2, 0) as processes:
        print(*{pid for _, pid in processes.map(_square, ((i,) for i in range(30)))}, flush=True)
        time.sleep(60)
"""


def test_workers_do_not_outlive_a_killed_parent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ORPHANS)
    command = [sys.executable, str(script), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert pids
        assert _alive(pids) == pids
        process.kill()
    deadline = time.monotonic() + 20
    while _alive(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(pids)
