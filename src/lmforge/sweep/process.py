"""The process of one job: its output goes to job.log of its run folder, and to the terminal when it runs alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from lmforge.config.errors import HINT, Exit
from lmforge.config.launch import RUN_VARIABLE
from lmforge.runs.folder import RunFolder
from lmforge.sweep.job import Job
from lmforge.sweep.slots import Slot

STOPPED_BY = {
    signal.SIGTERM: Exit.SIGTERM,
    signal.SIGUSR1: Exit.REQUEUE,
    signal.SIGINT: Exit.INTERRUPTED,
}


class JobProcess:
    """Started by its making. The process leads a group of its own, so that a terminal's Ctrl-C reaches it once,
    through the sweep, and so that what it started ends with it."""

    def __init__(self, job: Job, run: RunFolder, script: str, slot: Slot, echo: bool) -> None:
        self.job, self.run, self.slot, self.echo = job, run, slot, echo
        self.log = run.path / "job.log"
        self.shown = self.log.stat().st_size if self.log.exists() else 0
        self.started = time.monotonic()
        self.kill_at: float | None = None
        environ = {**os.environ, **slot.environment, "PYTHONUNBUFFERED": "1"}
        environ[RUN_VARIABLE] = str(run.path.resolve())
        environ.pop("MASTER_PORT", None)  # the ranks of jobs side by side must not meet at one port
        with slot.cores_held(), self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, script],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def ended(self) -> int | None:
        """Its exit code, None while it runs. Shows new output; kills what outlived `end_within`, and what a process
        that failed left behind."""
        if self.kill_at is not None and time.monotonic() > self.kill_at:
            self.kill()
        code = self.process.poll()
        self._show()
        if code:
            self.kill()
        return code

    def _show(self) -> None:
        if not self.echo or self.log.stat().st_size <= self.shown:
            return
        with self.log.open("rb") as log:
            log.seek(self.shown)
            new = log.read()
        self.shown += len(new)
        sys.stdout.flush()
        sys.stdout.buffer.write(new)
        sys.stdout.buffer.flush()

    def send(self, number: int) -> None:
        self.process.send_signal(number)  # does nothing once it has ended

    def end_within(self, seconds: float) -> None:
        """SIGTERM, after which it saves and leaves; killed when that takes longer."""
        if self.kill_at is None:
            self.send(signal.SIGTERM)
            self.kill_at = time.monotonic() + seconds

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Stop:
    """The signal that ends the sweep, handed on to the jobs that are running; none is started after it. A second
    Ctrl-C kills them."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.processes: list[JobProcess] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._note) for number in STOPPED_BY}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def start(self, make: Callable[[], JobProcess]) -> JobProcess:
        process = make()
        self.processes.append(process)
        if self.signal is not None:  # it came while the process was being started
            process.send(self.signal)
        return process

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self.signal == signal.SIGINT == number
        self.signal = signal.Signals(number)
        for process in self.processes:
            process.kill() if again else process.send(number)


def meaning(code: int) -> str:
    name = next((item.name.lower().replace("_", " ") for item in Exit if item == code), "")
    return f"exit {code} {name}".strip() if code > 0 else f"killed by signal {-code}"


def last_line(log: Path, code: int) -> str:
    """What a failed job said last. A report of memory says it first, before the advice."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if not line.endswith(HINT)]
    titles = [line for line in lines if line.startswith("OutOfMemory: ")] if code == Exit.OUT_OF_MEMORY else []
    return next(reversed(titles or lines), "no output")
