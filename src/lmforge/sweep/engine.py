"""Runs a sweep's jobs: starts as many as there are slots, watches them, and keeps the table."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Protocol

from lmforge.config.errors import Exit, UsageError
from lmforge.config.plain import Plain, get
from lmforge.runs.find import fingerprint
from lmforge.runs.folder import RunFolder
from lmforge.sweep.folder import SweepFolder
from lmforge.sweep.job import FAILURES, FINAL, Job, run_of
from lmforge.sweep.process import STOPPED_BY, JobProcess, Stop, last_line, meaning
from lmforge.sweep.slots import Slot

TICK = 0.05  # seconds between two looks at the jobs
GRACE = 120.0  # seconds in which a pruned job has to save and leave
HOLD = 30.0  # seconds in which a job that outlived its killed sweep gives up its run folder


class Source(Protocol):
    """Where jobs come from: a grid's list, or a search that learns from the jobs before."""

    jobs: list[Job]

    def next(self) -> Job | None:
        """The next job to run, None when there is no more."""

    def hopeless(self, job: Job, run: RunFolder) -> str | None:
        """Looks at what a running job has measured: why it should end early, or None."""

    def tell(self, job: Job) -> None:
        """A job has come to a final status."""


class Engine:
    """One call of a sweep, from its first job to its last."""

    def __init__(
        self, sweep: SweepFolder, source: Source, slots: Sequence[Slot], settings: Plain, argv: Sequence[str]
    ) -> None:
        self.sweep, self.source, self.settings, self.argv = sweep, source, settings, argv
        self.free = list(slots)
        self.echo = len(slots) == 1
        self.stop = Stop()
        self.failed = False

    def run(self) -> None:
        """Returns when nothing runs any more; the jobs tell how they ended."""
        with self.stop.listening():
            try:
                self._fill()
                while self.stop.processes:
                    time.sleep(TICK)
                    for process in list(self.stop.processes):
                        self._tend(process)
                    self._fill()
            except BaseException:
                for process in self.stop.processes:
                    process.kill()
                    process.process.wait()
                raise
        self._write()

    @property
    def code(self) -> int:
        if self.stop.signal is not None:
            return STOPPED_BY[self.stop.signal]
        unwell = any(job.status in (*FAILURES, "interrupted") for job in self.source.jobs)
        return Exit.FAILED if unwell else Exit.DONE

    def _fill(self) -> None:
        while self.free and not self._ends() and (job := self.source.next()) is not None:
            self._start(job)
            self._write()

    def _ends(self) -> bool:
        return self.stop.signal is not None or (self.failed and bool(self.settings["stop_on_failure"]))

    def _start(self, job: Job) -> None:
        run = run_of(job, self.sweep.path)
        verb = self._prepare(job, run)
        if verb is None:
            self._settle(job)
            return
        slot = self.free.pop(0)
        job.status, job.reason = "running", ""
        self._say(f"{job.label} {verb}{slot.title} -> {run.path}")
        self.stop.start(lambda: JobProcess(job, run, self.argv[0], slot, self.echo))

    def _prepare(self, job: Job, run: RunFolder) -> str | None:
        """Makes the job's run folder from its frozen config, or records a further start in it, and says which it was.
        None when the job has ended already: refused, known from another one, or done by a sweep that was killed before
        it could note it."""
        if job.plain is None or job.status in FINAL:
            return None
        try:
            if not run.config_file.is_file():
                RunFolder.create(job.plain, job.words, self.argv, run.path)
                return "starts"
            _wait_until_free(run, self.stop)
            _check_same(run, job)
            if run.finished(job.plain):
                job.finish(run, self.settings["metric"])
                return None
            run.write_start(job.words, self.argv, {})
            run.write_resumed()
            return "goes on"
        except UsageError as error:
            job.status = "failed" if self.stop.signal is None else "interrupted"
            job.reason = "; ".join(error.problems)
            return None

    def _tend(self, process: JobProcess) -> None:
        job, code = process.job, process.ended()
        if code is None:
            self._prune(process)
            return
        self.stop.processes.remove(process)
        self.free.append(process.slot)
        job.seconds += time.monotonic() - process.started
        self._judge(job, process, code)
        self._settle(job)

    def _prune(self, process: JobProcess) -> None:
        job = process.job
        if job.status != "running" or self.stop.signal is not None:
            return
        if reason := self.source.hopeless(job, process.run):
            job.status, job.reason = "pruned", reason
            process.end_within(GRACE)

    def _judge(self, job: Job, process: JobProcess, code: int) -> None:
        """How a job ended: pruned, done, told to stop, or failed."""
        stopped = code in STOPPED_BY.values() or (self.stop.signal is not None and code < 0)
        if code == 0:
            job.finish(process.run, self.settings["metric"])
        elif job.status == "pruned":
            return
        elif stopped:
            job.status, job.reason = "interrupted", meaning(code)
        else:
            job.status, job.reason = "failed", f"{meaning(code)}: {last_line(process.log, code)}"

    def _settle(self, job: Job) -> None:
        self.failed |= job.status == "failed"
        self.source.tell(job)
        self._write()
        value = "" if job.value is None else f", {self.settings['metric']} {job.value:.5g}"
        reason = f": {job.reason}" if job.reason else ""
        self._say(f"{job.label} {job.status}{value}{reason}", wrong=job.status in FAILURES)

    def _write(self) -> None:
        self.sweep.write_table(self.source.jobs, self.settings["metric"])

    def _say(self, line: str, wrong: bool = False) -> None:
        print(line, file=sys.stderr if wrong else sys.stdout, flush=True)


def _check_same(run: RunFolder, job: Job) -> None:
    """Raises UsageError when the folder holds a run with other values than the job's row says."""
    assert job.plain is not None
    stored = run.load_plain()
    same = all(get(stored, key) == get(job.plain, key) for key in job.swept)
    if not same or fingerprint(stored, any_precision=True) != fingerprint(job.plain, any_precision=True):
        raise UsageError(f"{run.path}: holds the run of another job; the sweep's files do not belong together")


def _wait_until_free(run: RunFolder, stop: Stop) -> None:
    """A job whose sweep was killed notices and ends; until then the folder is its own."""
    deadline = time.monotonic() + HOLD
    while True:
        try:
            run.lock()
        except UsageError:
            if time.monotonic() > deadline or stop.signal is not None:
                raise
            time.sleep(0.2)
        else:
            return run.unlock()
