"""Ranks that do not find each other: each ends in time and says which are missing, what was tried, what to check."""

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lmforge.config.errors import NotConnected
from lmforge.parallel import meet as meeting_module
from lmforge.parallel.meet import Door, meet
from lmforge.parallel.unmet import Here, Meeting, some_ranks
from ranks import CONTEXT, free_port

LONG = 20.0  # never waited for


@pytest.fixture
def port() -> int:
    return free_port()


def at_once(*meetings: Meeting) -> tuple[list[str], float]:
    """What each of these ranks says ('' when it has met the others), and how long all took; a thread for each."""
    said, stores = ["hangs"] * len(meetings), []

    def go(number: int) -> None:
        try:
            stores.append(meet(meetings[number]))
            said[number] = ""
        except NotConnected as error:
            said[number] = str(error)

    began = time.monotonic()
    threads = [threading.Thread(target=go, args=(number,), daemon=True) for number in range(len(meetings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if len(stores) > 1:
        stores[0].set("x", "y")
        assert [store.get("x") for store in stores] == [b"y"] * len(stores)
    return said, time.monotonic() - began


def test_all_are_there(port) -> None:
    assert at_once(*(Meeting("127.0.0.1", port, rank, 3, LONG) for rank in range(3)))[0] == ["", "", ""]


def test_a_missing_rank_is_named_by_all_others(port) -> None:
    said, seconds = at_once(*(Meeting("127.0.0.1", port, rank, 4, 1.0) for rank in (0, 2)))
    assert seconds < 5
    assert said[0] == said[1]
    assert said[0].startswith(f"ranks 1, 3 of 4 did not come to 127.0.0.1:{port} within 1 s\n")
    assert "there      rank 0 (process" in said[0]
    assert f"tried      rank 0 listens on port {port} of {socket.gethostname()}; GLOO_SOCKET_IFNAME" in said[0]
    for hint in ("WORLD_SIZE=4?", "MASTER_ADDR and MASTER_PORT", f"`nc -vz 127.0.0.1 {port}`", "timeout_seconds"):
        assert hint in said[0]


def test_rank_0_on_another_machine_than_was_said(port) -> None:
    (said,), _ = at_once(Meeting("192.0.2.1", port, 0, 2, 0.3))
    assert f"listens on port {port} of {socket.gethostname()}, which 192.0.2.1 is not an address of" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_says_for_whom_it_waits(port, monkeypatch, capfd, rank) -> None:
    monkeypatch.setattr(meeting_module, "NOTE_SECONDS", 0.4)
    at_once(Meeting("127.0.0.1", port, rank, 2, 1.0))
    assert f"waiting for rank {1 - rank} of 2 at 127.0.0.1:{port} (0.4 of 1 s)" in capfd.readouterr().err


def test_many_missing_ranks_are_not_all_listed() -> None:
    assert some_ranks([3]) == "rank 3"
    assert some_ranks(list(range(1, 12))) == "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more"


@pytest.mark.parametrize(
    ("address", "why", "means"),
    [
        ("127.0.0.1", "Connection refused", "127.0.0.1"),
        ("no-such-host.invalid", "Name or service not known|failure in name resolution", "the name is unknown here"),
    ],
)
def test_nobody_answers(port, address, why, means) -> None:
    (said,), seconds = at_once(Meeting(address, port, 1, 2, 1.0))
    assert seconds < 5
    first, tried, *checks = said.splitlines()
    assert first.startswith(f"rank 1 of 2 did not reach rank 0 at {address}:{port} within 1 s: ")
    assert any(reason in first for reason in why.split("|"))
    assert first.endswith(" tries)")
    assert means in tried
    assert "is rank 0 running" in checks[0]


def test_a_rank_that_comes_before_rank_0_waits_for_it(port) -> None:
    stores: list[Any] = []
    late = threading.Timer(0.7, lambda: stores.append(meet(Meeting("127.0.0.1", port, 0, 2, LONG))))
    late.start()
    assert at_once(Meeting("127.0.0.1", port, 1, 2, LONG))[0] == [""]
    late.join()


@pytest.fixture
def stranger() -> Iterator[int]:
    """A port that takes connections and says nothing, as that of a process that was stopped."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(8)
        yield listening.getsockname()[1]


def test_a_stranger_at_the_port_is_no_rank_0(stranger) -> None:
    (said,), seconds = at_once(Meeting("127.0.0.1", stranger, 1, 2, 1.0))
    assert seconds < 8
    assert "something listens there, but it is no rank 0 that waits for others" in said
    assert not [thread for thread in threading.enumerate() if thread.name == "meet"]


def test_a_busy_port_is_named(stranger) -> None:
    (said,), seconds = at_once(Meeting("127.0.0.1", stranger, 0, 2, LONG))
    assert seconds < 5
    assert said.startswith(f"rank 0 cannot listen on port {stranger}: another process does; check for a second rank 0")


@pytest.mark.parametrize(("worlds", "first"), [((3, 2), "rank 0 has 3"), ((2, 3), "rank 0 has 2")])
def test_different_world_sizes_are_named(port, worlds, first) -> None:
    meetings = [Meeting("127.0.0.1", port, rank, world, LONG) for rank, world in enumerate(worlds)]
    said, seconds = at_once(*meetings)
    assert seconds < 5
    assert said[0] == said[1]
    assert f"WORLD_SIZE differs: {first}, rank 1 (process" in said[0]


def test_a_rank_beyond_the_world_of_rank_0(port) -> None:
    worlds = (2, 2, 3)
    said, _ = at_once(*(Meeting("127.0.0.1", port, rank, world, 5.0) for rank, world in enumerate(worlds)))
    assert said[2] == "rank 2 has WORLD_SIZE=3, rank 0 has 2"


def another_rank_1(port: int, pipe: Any) -> None:
    try:
        meet(Meeting("127.0.0.1", port, 1, 3, LONG))
    except NotConnected as error:
        pipe.send(str(error))


def test_two_processes_with_one_rank_and_a_dead_one(port) -> None:
    """The second living one ends itself and all; that of a dead one takes its place."""
    halls = [dist.PrefixStore("meeting", dist.TCPStore("localhost", port, 3, True, wait_for_workers=False))]
    host, dead = socket.gethostname(), subprocess.Popen(["true"])
    dead.wait()
    halls[0].set("rank/1/here", json.dumps(asdict(Here(1, 3, dead.pid, host, meeting_module.home()))))
    heard, pipe = CONTEXT.Pipe(duplex=False)
    other = CONTEXT.Process(target=another_rank_1, args=(port, pipe))
    other.start()
    try:
        _until(lambda: json.loads(halls[0].get("rank/1/here"))["pid"] == other.pid)
        (said,), _ = at_once(Meeting("127.0.0.1", port, 1, 3, LONG))
        assert said == (
            f"rank 1 (process {other.pid} on {host}) and process {os.getpid()} on {host} both say RANK=1; "
            "every process needs its own"
        )
        assert halls[0].get("problem").decode() == said
        halls.clear()  # as when rank 0 ends
        assert heard.poll(15)
        assert "has gone before all ranks were there" in heard.recv()
    finally:
        other.kill()
        other.join()


def test_rank_0_hears_of_two_processes_with_one_rank(port) -> None:
    def second() -> None:
        store = dist.TCPStore("127.0.0.1", port, 3, False, timedelta(seconds=10), False)
        hall = dist.PrefixStore("meeting", store)
        hall.wait(["rank/1/here"], timedelta(seconds=10))
        time.sleep(0.6)  # until rank 0 has looked and counts on rank 1 to hear it
        hall.set("problem", "twice the same")

    thread = threading.Thread(target=second)
    thread.start()
    said, seconds = at_once(*(Meeting("127.0.0.1", port, rank, 3, LONG) for rank in (0, 1)))
    thread.join()
    assert said == ["twice the same"] * 2
    assert seconds < 8


def _until(done: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_torchruns_store_brings_ranks_together_again(port) -> None:
    """It outlives the ranks, and what they left in it, some on their way to the others, leads nobody astray."""
    agent = dist.TCPStore("localhost", port, None, True, wait_for_workers=False)
    for world in (3, 2, 3):
        dist.PrefixStore("door", agent).append("arrivals", "0123456789abcdef")  # of one that is no more
        assert (
            at_once(*(Meeting("127.0.0.1", port, rank, world, 5.0, agent=True) for rank in range(world)))[0]
            == [""] * world
        )


def test_one_hall_for_all_starts_would_lead_astray(port, monkeypatch) -> None:
    monkeypatch.setattr(Door, "enter", lambda *args: "meeting")
    monkeypatch.setattr(Door, "answer", lambda self: None)
    agent = dist.TCPStore("localhost", port, None, True, wait_for_workers=False)
    meetings = [Meeting("127.0.0.1", port, rank, 2, 1.0, agent=True) for rank in range(2)]
    assert at_once(*meetings)[0] == ["", ""]
    assert at_once(*(replace(meeting, world=3) for meeting in meetings))[0] != ["", ""]
    assert agent.num_keys()


def test_without_rank_0_in_torchruns_store_the_others_name_it(port, monkeypatch) -> None:
    monkeypatch.setattr(meeting_module, "FAREWELL_SECONDS", 0.5)
    agent = dist.TCPStore("localhost", port, None, True, wait_for_workers=False)
    (said,), seconds = at_once(Meeting("127.0.0.1", port, 1, 2, 0.5, agent=True))
    assert said.startswith(f"rank 0 of 2 did not come to 127.0.0.1:{port} within 0.5 s")
    assert seconds < 8
    assert agent.num_keys()
