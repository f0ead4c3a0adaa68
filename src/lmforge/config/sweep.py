"""A sweep (-m): every job's config is composed, checked and stored before the first starts; each job is a process."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from lmforge.config.compose import Composer
from lmforge.config.errors import Exit, UsageError
from lmforge.config.launch import RUN_VARIABLE, Launch
from lmforge.config.parse import Word
from lmforge.config.prepare import compose_train, continue_run, open_run, plan_train
from lmforge.config.runs import RunFolder


@dataclass
class SweepJob:
    """One row of the table."""

    number: int
    words: list[Word]
    swept: str
    run: RunFolder | None = None
    status: str = "waiting"
    code: int | None = None


STOPPED_BY = {
    signal.SIGTERM: Exit.SIGTERM,
    signal.SIGUSR1: Exit.REQUEUE,
    signal.SIGINT: Exit.INTERRUPTED,
}


class Stop:
    """The signal that ends the sweep, handed on to the job that is running; no further job starts after it."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._note) for number in STOPPED_BY}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def watch(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        if self.signal is not None:  # it came while the process was being started
            process.send_signal(self.signal)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        if self.process is not None:
            self.process.send_signal(number)  # does nothing once the process has ended


def run(composer: Composer, words: Sequence[Word], broken: Sequence[str], problems: list[str], argv: list[str]) -> int:
    """Runs all jobs one after another; a failing one does not stop the rest. Returns 0 when every job is done."""
    jobs = expand(words)
    _check_values(composer, jobs, broken, problems)
    for job in jobs:
        _freeze(composer, job, broken, argv)
    if all(job.run is None and job.code for job in jobs):
        raise UsageError([f"job {job.number} ({job.swept}): {job.status}" for job in jobs])
    stop = Stop()
    try:
        with stop.listening():
            for job in jobs:
                _run_job(job, argv[0], stop)
    finally:
        print(table(jobs), flush=True)
    if stop.signal is not None:
        return STOPPED_BY[stop.signal]
    return Exit.FAILED if any(job.code for job in jobs) else Exit.DONE


def expand(words: Sequence[Word]) -> list[SweepJob]:
    """The grid: one job for each combination, the last swept word changing fastest."""
    jobs = []
    for number, values in enumerate(itertools.product(*(word.values for word in words))):
        single = [
            word.single(value) if len(word.values) > 1 else word for word, value in zip(words, values, strict=True)
        ]
        swept = " ".join(one.raw for one, word in zip(single, words, strict=True) if len(word.values) > 1)
        jobs.append(SweepJob(number, single, swept))
    return jobs


def _check_values(composer: Composer, jobs: Sequence[SweepJob], broken: Sequence[str], problems: list[str]) -> None:
    """A word that no job could use ends the sweep before it starts."""
    for job in jobs:
        composed, _ = compose_train(composer, job.words, broken)
        problems += composed.problems.values()
    if problems:
        raise UsageError(list(dict.fromkeys(problems)))


def _freeze(composer: Composer, job: SweepJob, broken: Sequence[str], argv: list[str]) -> None:
    """Stores the job's config in its run folder; a combination that cannot be is this job's failure alone."""
    try:
        plan = plan_train(composer, job.words, broken, Launch())
        continue_run(plan)
        if plan.done:
            job.status, job.code = f"done before: {plan.done}", 0
            return
        job.run = open_run(plan, [word.raw for word in job.words], argv, lock=False)
    except UsageError as error:
        job.status, job.code = f"refused: {'; '.join(error.problems)}", int(Exit.WRONG_INPUT)
        print(f"job {job.number} ({job.swept}) {job.status}", file=sys.stderr)


def _run_job(job: SweepJob, script: str, stop: Stop) -> None:
    """Runs one job in a process of its own, its output on the terminal and in job.log of its run folder.

    The process has its own group, so that a terminal's Ctrl-C reaches it once, through this process.
    """
    if job.run is None:
        return
    if stop.signal is not None:
        job.status = f"not started ({stop.signal.name})"
        return
    print(f"job {job.number} ({job.swept}) -> {job.run.path}", flush=True)
    environ = {**os.environ, RUN_VARIABLE: str(job.run.path.resolve()), "PYTHONUNBUFFERED": "1"}
    with (job.run.path / "job.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, script],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            process_group=0,
        )
        stop.watch(process)
        assert process.stdout is not None
        while chunk := process.stdout.read(65536):
            log.write(chunk)
            log.flush()
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
        job.code = process.wait()
    job.status = "done" if job.code == 0 else f"failed ({_meaning(job.code)}): {_last_line(job.run.path / 'job.log')}"


def _meaning(code: int) -> str:
    name = next((item.name.lower().replace("_", " ") for item in Exit if item == code), "")
    return f"exit {code} {name}".strip() if code > 0 else f"killed by signal {-code}"


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def table(jobs: Sequence[SweepJob]) -> str:
    rows = [("job", "overrides", "status", "run folder")]
    rows += [(str(job.number), job.swept, job.status, str(job.run.path) if job.run else "-") for job in jobs]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
