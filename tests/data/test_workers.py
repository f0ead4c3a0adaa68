"""A loader worker that hangs says where, and goes on; other children are left alone."""

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

import pytest

from lmforge.data.workers import ask_workers, make_worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks through /proc")


def hang(pipe: Connection, as_worker: bool) -> None:
    if as_worker:
        make_worker(0)
    pipe.send("ready")
    pipe.recv()  # where it is asked
    pipe.send("still there")


def test_a_worker_is_asked_where_it_hangs() -> None:
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(2)]
    children = [
        context.Process(target=hang, args=(theirs, number == 0), daemon=True)
        for number, (_, theirs) in enumerate(pipes)
    ]
    for child in children:
        child.start()
    try:
        assert [ours.recv() for ours, _ in pipes] == ["ready", "ready"]
        asked = ask_workers()
        assert list(asked) == [children[0].pid]
        assert "test_workers.py" in asked[children[0].pid or 0]
        assert "in hang" in asked[children[0].pid or 0]
        for ours, _ in pipes:
            ours.send("go on")
        assert [ours.recv() for ours, _ in pipes] == ["still there", "still there"]
    finally:
        for child in children:
            child.kill()
            child.join()


def test_without_workers_nothing_is_waited_for() -> None:
    began = time.perf_counter()
    assert ask_workers() == {}
    assert time.perf_counter() - began < 0.4
