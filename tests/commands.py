"""Command lines run as a shell would, in processes forked from a server that has already imported torch.

Much cheaper than a fresh interpreter (a second instead of ten), and otherwise the same: arguments, working folder,
environment, output and exit code. What the command starts itself (ranks, sweep jobs) are fresh interpreters.
"""

import atexit
import contextlib
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ranks import CONTEXT

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Outcome:
    code: int
    output: str  # standard output and standard error as they came


class Running:
    """A command at work, the leader of a process group that holds all it starts."""

    def __init__(self, words: list[str], cwd: Path, changes: Sequence[Callable[[], None]], environment: dict[str, str]):
        self.words, self.log = words, cwd / f"command-{time.monotonic_ns()}.log"
        self.process = CONTEXT.Process(target=_command, args=(words, str(cwd), changes, environment, str(self.log)))
        self.process.start()

    def send(self, number: int) -> None:
        """A signal to the command itself, not to what it has started."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL to the command and all it has started, as when the machine goes down."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()

    def wait_for(self, done: Callable[[], object], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline or not self.process.is_alive():
                self.kill()
                raise AssertionError(f"{' '.join(self.words)} did not get there:\n{self.output}")
            time.sleep(0.01)

    def finish(self, seconds: float = 120.0) -> Outcome:
        """Its end; a command that hangs is killed and fails the test."""
        self.process.join(seconds)
        hung = self.process.is_alive()
        if hung:
            self.kill()
        assert not hung, f"{' '.join(self.words)} did not end in {seconds} s:\n{self.output}"
        return Outcome(self.process.exitcode if self.process.exitcode is not None else -1, self.output)

    def children(self) -> list[int]:
        """What the command has started and is still there."""
        return [pid for pid in group(self.process.pid or 0) if pid != self.process.pid]

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def left_behind(self, seconds: float = 10.0) -> list[int]:
        """Processes of the group that are still there some time after its leader has gone; kills them."""
        deadline = time.monotonic() + seconds
        while (alive := group(self.process.pid or 0)) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()
        return alive


def group(leader: int) -> list[int]:
    """Living processes of a process group."""
    alive = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, number = file.read_text().rpartition(")")[2].split()[:3]
            if int(number) == leader and state != "Z":
                alive.append(int(file.parent.name))
    return alive


def start_command(words: list[str], cwd: Path, *changes: Callable[[], None], **environment: str) -> Running:
    """Start `python train.py ...`, `python evaluate.py ...` or `lmforge ...` in a process changed by `changes`."""
    return Running(words, cwd, changes, environment)


def run_command(words: list[str], cwd: Path, seconds: float = 120.0, **environment: str) -> Outcome:
    """Run a command to its end; kills its whole group when it hangs."""
    return start_command(words, cwd, **environment).finish(seconds)


def _command(
    words: list[str], cwd: str, changes: Sequence[Callable[[], None]], environment: dict[str, str], log: str
) -> None:
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
    os.chdir(cwd)
    os.environ |= environment
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    for change in changes:
        change()
    script = words[1] if words[0] == "python" else words[0]
    arguments = words[2:] if words[0] == "python" else words[1:]
    sys.argv = [str(ROOT / script) if script.endswith(".py") else script, *arguments]
    try:
        if script.endswith(".py"):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            runpy.run_module("lmforge.cli", run_name="__main__", alter_sys=False)
    finally:
        atexit._run_exitfuncs()  # which a forked process would leave out
