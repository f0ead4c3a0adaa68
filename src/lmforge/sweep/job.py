"""One job of a sweep, as its row of the table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmforge.config.plain import Plain
from lmforge.runs.folder import RunFolder

# waiting: not started. running: at work, or its sweep was killed. interrupted: told to stop, or stopped by a signal; it
# goes on when the sweep does. The others are final.
Status = Literal["waiting", "running", "interrupted", "done", "pruned", "failed", "refused"]
FINAL: tuple[Status, ...] = ("done", "pruned", "failed", "refused")
FAILURES: tuple[Status, ...] = ("failed", "refused")


@dataclass
class Job:
    """`words` make the job alone, `swept` are those of them that differ between jobs, by key. `plain` is its checked
    config, None for a refused one. `value` is the sweep's metric; `seconds` sum over all its starts."""

    number: int
    words: list[str]
    swept: dict[str, str]
    plain: Plain | None = None
    status: Status = "waiting"
    reason: str = ""
    value: float | None = None
    seconds: float = 0.0
    own_threads: bool = False  # the machine chose trainer.threads

    @property
    def title(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.swept.items())

    @property
    def label(self) -> str:
        return f"job {self.number} ({self.title})" if self.swept else f"job {self.number}"

    def finish(self, run: RunFolder, metric: str) -> None:
        """Takes over what a run that has ended measured last; None where that is not a finite number."""
        value = run.summary().get(metric)
        self.status, self.reason = "done", ""
        self.value = float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def row(self, metric: str, sweep: Path) -> dict[str, str]:
        run = str(self.number) if run_of(self, sweep).config_file.is_file() else ""
        return {
            "job": str(self.number),
            **self.swept,
            "status": self.status,
            metric: "" if self.value is None else repr(self.value),
            "seconds": f"{self.seconds:.1f}",
            "run": run,
            "reason": self.reason,
        }

    def recall(self, row: Mapping[str, str], metric: str) -> None:
        """Takes over a row that an earlier call left. Raises ValueError when it is none of ours."""
        if row["status"] not in ("waiting", "running", "interrupted", *FINAL):
            raise ValueError(f"status {row['status']}")
        unmeasured = self.status == "failed" and row["status"] == "done"  # a study calls it failed
        if self.status not in FINAL or row["status"] in FAILURES or unmeasured:
            self.status = row["status"]
        self.reason, self.seconds = row["reason"], float(row["seconds"])
        if self.value is None and row[metric]:
            self.value = float(row[metric])


def run_of(job: Job, sweep: Path) -> RunFolder:
    return RunFolder(sweep / str(job.number))
