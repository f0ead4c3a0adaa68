"""Noticing at once that another rank of this machine has died, and of what, so that none waits for what never comes."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lmforge.config.errors import Exit
from lmforge.parallel.control import Control

GRACE = 15.0  # seconds in which a rank can end by itself after another has died: it may have a checkpoint to finish


class Death(NamedTuple):
    """A rank that has ended. `code` is its exit code, negative for a signal, None when nobody could tell."""

    rank: int
    pid: int
    code: int | None

    def __str__(self) -> str:
        who = f"rank {self.rank} (process {self.pid})"
        if self.code is None:
            return f"{who} is gone without a word"
        if self.code < 0:
            return f"{who} was killed by {signal.Signals(-self.code).name}"
        return f"{who} ended with exit code {self.code}"


class Watch:
    """Waits for the other ranks' ends, a sleeping thread for each; costs nothing while they live.

    A rank that still is there `GRACE` seconds after another has failed hangs in a collective, and `give_up` decides its
    exit code. Only ranks of the same machine can be watched.
    """

    def __init__(self) -> None:
        self.deaths: list[Death] = []
        self.watched: set[int] = set()
        self.children: list[subprocess.Popen[bytes]] = []
        self.changed = threading.Condition()
        self.done = False  # the connection is taken down, so nothing can hang in it
        self.give_up: Callable[[Death], int] = _say_and_fail

    def add(self, rank: int, pid: int, process: "subprocess.Popen[bytes] | None" = None) -> None:
        """Watch a rank; `process` when it is a child of this one."""
        if rank not in self.watched:
            self.watched.add(rank)
            self.children += [process] if process else []
            name = f"rank-{rank}-watch"
            threading.Thread(target=self._follow, args=(rank, pid, process), name=name, daemon=True).start()

    def add_neighbours(self, control: Control) -> None:
        """Watch all ranks of this machine. Every rank calls this at the same point."""
        pids, homes = control.gather(os.getpid()), control.gather(home())
        for rank, (pid, where) in enumerate(zip(pids, homes, strict=True)):
            if where == homes[control.rank] and rank != control.rank:
                self.add(rank, pid)

    def cause(self, seconds: float) -> Death | None:
        """The rank whose end explains a broken connection: waits until one has ended. None when none did so badly."""
        with self.changed:
            self.changed.wait_for(lambda: self.deaths, seconds)
            bad = [death for death in self.deaths if death.code != 0]
        killed = [death for death in bad if death.code is None or death.code < 0]
        return next(iter(killed + bad), None)

    def leave_within(self, seconds: float, last_words: Callable[[], int]) -> None:
        """End this process then with the code of `last_words`, if it still hangs: to take a connection down can mean
        to wait for ranks that hang themselves."""

        def leave() -> None:
            time.sleep(seconds)
            if not self.done:
                os._exit(last_words())

        threading.Thread(target=leave, name="last-resort", daemon=True).start()

    def end_children(self, seconds: float) -> None:
        """Kill the ranks that this process has started and that are still there after that time: a stopped process
        outlives its parent."""
        deadline = time.monotonic() + seconds
        while any(child.poll() is None for child in self.children) and time.monotonic() < deadline:
            time.sleep(0.05)
        for child in self.children:
            child.kill()

    def _follow(self, rank: int, pid: int, process: "subprocess.Popen[bytes] | None") -> None:
        death = Death(rank, pid, _end_of(pid, process))
        with self.changed:
            self.deaths.append(death)
            self.changed.notify_all()
        if death.code != 0:
            time.sleep(GRACE)
            if not self.done:
                os._exit(self.give_up(death))


def _say_and_fail(death: Death) -> int:
    print(f"{death}, and this one waits for it in vain", file=sys.stderr, flush=True)
    return int(Exit.FAILED)


def _end_of(pid: int, process: "subprocess.Popen[bytes] | None") -> int | None:
    """Waits for a process's end; its exit code, which for a process that is no child stands in /proc until its parent
    has asked for it."""
    try:
        handle = os.pidfd_open(pid)
    except (OSError, AttributeError):  # gone already, or not this kind of system
        while process is None and alive(pid):
            time.sleep(0.5)
        return process.wait() if process else None
    with suppress(OSError):
        select.select([handle], [], [])
    os.close(handle)
    return process.wait() if process else _zombie_code(pid)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _zombie_code(pid: int) -> int | None:
    try:
        state, *_, status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return os.waitstatus_to_exitcode(int(status)) if state == "Z" else None
    except (OSError, ValueError):
        return None


def home() -> int:
    """A number that is the same for processes that see each other: one machine, one space of process numbers."""
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return zlib.crc32("\n".join(facts).encode())


# Where the kernel counts such kills: of the machine, of a container (cgroup v2, v1).
KILL_COUNTS = ("/proc/vmstat", "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


def oom_kills() -> int:
    """Processes that the kernel has killed on this machine, or in this container, because memory ran out."""
    lines: list[str] = []
    for file in KILL_COUNTS:
        with suppress(OSError):
            lines += Path(file).read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
