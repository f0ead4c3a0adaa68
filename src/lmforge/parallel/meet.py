"""Where ranks meet: a store held by rank 0, or by torchrun's agent, in which every rank says that it is there.

torch's own rendezvous counts who came but cannot say who did not, waits twice its time-out for an address that nobody
answers at, and for ever at one that answers nothing.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist

from lmforge.config.errors import NotConnected
from lmforge.parallel.unmet import Here, Meeting, missing_ranks, other_world, some_ranks, unreachable
from lmforge.parallel.watch import alive, home

NOTE_SECONDS = 30.0  # how often rank 0 says for whom it waits; the others say it once
FAREWELL_SECONDS = 3.0  # how long rank 0 keeps the store for ranks that still have to hear why nothing starts


def meet(meeting: Meeting) -> dist.Store:
    """Returns when all ranks are there, with a store that only they know. Raises NotConnected within the time-out."""
    deadline = time.monotonic() + meeting.seconds
    store = _open_store(meeting, deadline)
    door = Door(store) if meeting.agent else None
    name = door.enter(meeting, deadline) if door else "meeting"
    hall = dist.PrefixStore(name, store)
    me = Here(meeting.rank, meeting.world, os.getpid(), socket.gethostname(), home())
    _announce(hall, meeting, me)
    if meeting.rank == 0:
        _gather(hall, meeting, deadline, door)
    else:
        _follow(hall, meeting, deadline)
    return dist.PrefixStore(f"{name}/group", store)


class Door:
    """How ranks find the hall of their own start in torchrun's store, which keeps what earlier starts left in it.

    Every rank shows a number of its own. Rank 0 answers each with the name of its hall, those of ranks now dead too,
    so no answer to a number of today can be one of yesterday.
    """

    SIZE = 16  # letters of a number

    def __init__(self, store: dist.Store) -> None:
        self.store = dist.PrefixStore("door", store)
        self.name, self.answered = secrets.token_hex(self.SIZE // 2), 0

    def enter(self, meeting: Meeting, deadline: float) -> str:
        """The name of the hall."""
        if meeting.rank == 0:
            self.store.append("arrivals", "")  # type: ignore[attr-defined]
            return self.name
        self.store.append("arrivals", self.name)  # type: ignore[attr-defined]
        key = f"answer/{self.name}"
        try:
            self.store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        except RuntimeError:
            raise NotConnected(missing_ranks(meeting, [0], [])) from None
        return self.store.get(key).decode()

    def answer(self) -> None:
        """Rank 0: to be called again and again while it waits."""
        arrivals = self.store.get("arrivals").decode()
        for at in range(self.answered, len(arrivals), self.SIZE):
            self.store.set(f"answer/{arrivals[at : at + self.SIZE]}", self.name)
        self.answered = len(arrivals)


def _open_store(meeting: Meeting, deadline: float) -> dist.Store:
    if meeting.rank == 0 and not meeting.agent:
        return _serve(meeting)
    _reach(meeting, deadline)
    return _client(meeting, deadline)


def _serve(meeting: Meeting) -> dist.Store:
    waits = timedelta(seconds=meeting.seconds)
    try:
        return dist.TCPStore("localhost", meeting.port, meeting.world, True, waits, wait_for_workers=False)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise NotConnected(
            f"rank 0 cannot listen on port {meeting.port}: another process does; check for a second rank 0, or an "
            "earlier run that has not ended; or choose another port (MASTER_PORT or strategy.init_method)"
        ) from None


def _reach(meeting: Meeting, deadline: float) -> None:
    """Returns when something answers at the address."""
    began, tries, pause, noted = time.monotonic(), 0, 0.05, False
    while True:
        tries += 1
        if not noted and time.monotonic() - began > NOTE_SECONDS:
            noted = True
            _say_waiting(meeting, [0], NOTE_SECONDS)
        try:
            left = max(0.1, deadline - time.monotonic())
            socket.create_connection((meeting.address, meeting.port), timeout=left).close()
            return
        except OSError as error:
            if time.monotonic() + pause >= deadline:
                raise NotConnected(unreachable(meeting, f"{error.strerror or error} ({tries} tries)")) from None
        time.sleep(pause)
        pause = min(1.0, pause * 1.5)


def _client(meeting: Meeting, deadline: float) -> dist.Store:
    """The store behind the address; in a thread, since torch waits without end for one that says nothing."""
    found: list[dist.Store | Exception] = []
    left = max(1.0, deadline - time.monotonic())

    def enter() -> None:
        waits = timedelta(seconds=left)
        try:
            found.append(dist.TCPStore(meeting.address, meeting.port, meeting.world, False, waits, False))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=enter, name="meet", daemon=True)
    thread.start()
    thread.join(left)
    if not found:
        _hang_up(meeting.port)
        thread.join(left)
    if found and isinstance(found[0], dist.Store):
        return found[0]
    why = f" ({str(found[0]).splitlines()[0][:200]})" if found and str(found[0]) else ""
    raise NotConnected(unreachable(meeting, f"something listens there, but it is no rank 0 that waits for others{why}"))


def _hang_up(port: int) -> None:
    """Ends connections of this process to a port, for a thread that reads from one in vain."""
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            if connection.getpeername()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)


def _key(rank: int) -> str:
    return f"rank/{rank}/here"


def _announce(hall: dist.Store, meeting: Meeting, me: Here) -> None:
    """Says that this rank is there; raises NotConnected when another process already said so and lives."""
    text = json.dumps(asdict(me))
    if meeting.agent:
        hall.set(_key(me.rank), text)
        return
    first = _read(hall.compare_set(_key(me.rank), "", text))
    if first == me:
        return
    if first.home == me.home and not alive(first.pid):
        hall.set(_key(me.rank), text)
        return
    problem = f"{first} and process {me.pid} on {me.host} both say RANK={me.rank}; every process needs its own"
    hall.set("problem", problem)
    raise NotConnected(problem)


def _read(value: bytes) -> Here:
    return Here(**json.loads(value))


def _gather(hall: dist.Store, meeting: Meeting, deadline: float, door: Door | None) -> None:
    """Rank 0: waits for all and tells them what is wrong, or that nothing is."""
    here, problem = _wait_for_all(hall, meeting, deadline, door)
    hall.set("verdict", json.dumps({"world": meeting.world, "problem": problem}))
    if not problem:
        return
    until = time.monotonic() + FAREWELL_SECONDS
    while hall.add("heard", 0) < len(here) - 1 and time.monotonic() < until:
        time.sleep(0.05)
    raise NotConnected(problem)


def _wait_for_all(hall: dist.Store, meeting: Meeting, deadline: float, door: Door | None) -> tuple[list[Here], str]:
    """Those who came, and what is wrong with them or with those who did not ('' when nothing is)."""
    here: list[Here] = []
    began, pause, notes, missing = time.monotonic(), 0.01, 1, list(range(meeting.world))
    while True:
        if door is not None:
            door.answer()
        came = [rank for rank in missing if hall.check([_key(rank)])]
        here += [_read(hall.get(_key(rank))) for rank in came]
        missing = [rank for rank in missing if rank not in came]
        if wrong := [other for other in here if other.world != meeting.world]:
            return here, other_world(meeting, wrong)
        if hall.check(["problem"]):
            return here, hall.get("problem").decode()
        if not missing:
            return here, ""
        if time.monotonic() >= deadline:
            return here, missing_ranks(meeting, missing, here)
        if time.monotonic() - began > notes * NOTE_SECONDS:
            _say_waiting(meeting, missing, notes * NOTE_SECONDS)
            notes += 1
        time.sleep(pause)
        pause = min(0.5, pause * 1.3)


def _say_waiting(meeting: Meeting, missing: list[int], seconds: float) -> None:
    what = f"waiting for {some_ranks(missing)} of {meeting.world} at {meeting.point}"
    print(f"{what} ({seconds:g} of {meeting.seconds:g} s)", file=sys.stderr, flush=True)


def _follow(hall: dist.Store, meeting: Meeting, deadline: float) -> None:
    """Every other rank: hears the verdict."""
    left = max(0.0, deadline - time.monotonic()) + FAREWELL_SECONDS
    try:
        hall.wait(["verdict"], timedelta(seconds=left))
        verdict = json.loads(hall.get("verdict"))
        hall.add("heard", 1)
    except RuntimeError:
        raise NotConnected(_left_alone(hall, meeting)) from None
    if verdict["problem"]:
        raise NotConnected(verdict["problem"])
    if verdict["world"] != meeting.world:
        raise NotConnected(f"rank {meeting.rank} has WORLD_SIZE={meeting.world}, rank 0 has {verdict['world']}")


def _left_alone(hall: dist.Store, meeting: Meeting) -> str:
    try:
        missing = [rank for rank in range(meeting.world) if not hall.check([_key(rank)])]
    except RuntimeError:
        return f"rank 0 was at {meeting.point} and has gone before all ranks were there; its own message tells why"
    return missing_ranks(meeting, missing or [0], [])
