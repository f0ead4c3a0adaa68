"""What a sweep says at its end: all jobs, the best one, and the spread over seeds."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path

from lmforge.runs.table import plain_table
from lmforge.sweep.job import Job, run_of


def report(jobs: Sequence[Job], sweep: Path, metric: str, mode: str, command: str) -> str:
    """`command` is what trains one run, without its words."""
    parts = [_table(jobs, sweep, metric), _seeds(jobs, metric), _best(jobs, metric, mode, command)]
    return "\n\n".join([*filter(None, parts), f"sweep folder  {sweep}"])


def _table(jobs: Sequence[Job], sweep: Path, metric: str) -> str:
    short = _shortened(jobs)
    rows = [["job", *short, "status", metric, "seconds", "run folder", ""]]
    for job in jobs:
        run = run_of(job, sweep)
        rows.append(
            [
                str(job.number),
                *(texts.get(job.swept.get(key, ""), "") for key, texts in short.items()),
                job.status,
                "-" if job.value is None else f"{job.value:.5g}",
                f"{job.seconds:.1f}",
                str(run.path) if run.config_file.is_file() else "-",
                job.reason,
            ]
        )
    return plain_table(rows)


def _shortened(jobs: Sequence[Job]) -> dict[str, dict[str, str]]:
    """By key, how its values are shown: shortened, unless two of them would look the same."""
    shown: dict[str, dict[str, str]] = {}
    for key in dict.fromkeys(key for job in jobs for key in job.swept):
        texts = {job.swept[key]: _short(job.swept[key]) for job in jobs if key in job.swept}
        apart = len(set(texts.values())) == len(texts)
        shown[key] = texts if apart else {text: text for text in texts}
    return shown


def _short(text: str) -> str:
    """A number drawn from a range, with as many digits as a reader wants; table.csv has them all."""
    if len(text) <= 8 or text.isdigit():
        return text
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text


def _seeds(jobs: Sequence[Job], metric: str) -> str:
    """Mean and standard deviation over the seeds of every other combination; empty when no combination has two."""
    groups: dict[str, list[float]] = {}
    short = _shortened(jobs)
    for job in jobs:
        others = " ".join(f"{key}={short[key][value]}" for key, value in job.swept.items() if key != "seed")
        if "seed" in job.swept and job.value is not None:
            groups.setdefault(others or "all", []).append(job.value)
    if max(map(len, groups.values()), default=0) < 2:
        return ""
    rows = [[f"{metric} over seeds", "n", "mean", "std"]]
    for others, values in groups.items():
        spread = f"{statistics.stdev(values):.3g}" if len(values) > 1 else "-"
        rows.append([others, str(len(values)), f"{math.fsum(values) / len(values):.5g}", spread])
    return plain_table(rows)


def best(jobs: Sequence[Job], mode: str) -> Job | None:
    """The job whose metric is the best, of those that are done."""
    measured = [job for job in jobs if job.value is not None]
    sign = -1 if mode == "max" else 1
    return min(measured, key=lambda job: sign * (job.value or 0.0), default=None)


def _best(jobs: Sequence[Job], metric: str, mode: str, command: str) -> str:
    job = best(jobs, mode)
    if job is None:
        return f"no job has measured {metric}"
    return f"best  job {job.number}, {metric} {job.value:.5g}; again: {command} {shlex.join(job.words)}".rstrip()
