"""A grid's jobs: all known when the sweep begins."""

from __future__ import annotations

from collections.abc import Sequence

from lmforge.config.errors import UsageError
from lmforge.config.plain import Plain
from lmforge.runs.folder import RunFolder, stored_problems
from lmforge.sweep.job import Job, Status


class Grid:
    """Hands out the jobs that are not final, and the failed ones too when `rerun_failed`."""

    def __init__(self, jobs: list[Job], rerun_failed: bool) -> None:
        self.jobs = jobs
        self.open: tuple[Status, ...] = ("waiting", "running", "interrupted", *(("failed",) if rerun_failed else ()))
        self.handed: set[int] = set()

    def next(self) -> Job | None:
        """Each job at most once."""
        for job in self.jobs:
            if job.status in self.open and job.number not in self.handed:
                self.handed.add(job.number)
                job.status = "waiting"
                return job
        return None

    def hopeless(self, job: Job, run: RunFolder) -> None:
        """Every job of a grid is trained to its end."""

    def tell(self, job: Job) -> None:
        """A grid learns nothing."""


def freeze(jobs: Sequence[Job]) -> Plain:
    return {
        "jobs": [{"words": job.words, "swept": job.swept, "plain": job.plain, "reason": job.reason} for job in jobs]
    }


def thaw(frozen: Plain) -> list[Job]:
    """Raises UsageError when what was frozen are no jobs."""
    try:
        jobs = [Job(number, **row) for number, row in enumerate(frozen["jobs"])]
        problems = [problem for job in jobs if job.plain is not None for problem in stored_problems(job.plain)]
    except (KeyError, TypeError, AttributeError) as error:
        problems = [repr(error)]
    if problems:
        raise UsageError([f"the sweep's frozen configs are broken: {problem}" for problem in dict.fromkeys(problems)])
    for job in jobs:
        if job.plain is None:
            job.status = "refused"
    return jobs
