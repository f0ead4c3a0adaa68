"""A sweep's folder: what was asked, the frozen configs, the table, and below it a run folder for each job."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lmforge.config.aside import write_aside
from lmforge.config.errors import UsageError
from lmforge.config.plain import Plain, PlainLoader, dump_yaml
from lmforge.runs.folder import SWEEP_FILE, RunFolder, new_folder
from lmforge.runs.rows import write_rows
from lmforge.sweep.job import Job

FROZEN_FILE = "frozen.json"


class SweepFolder:
    """`sweep.yaml` (words and settings), `frozen.json` (configs as they were when the sweep began), `table.csv` (a row
    a job, kept current), for a search `study.db`, and the run folders `0/ 1/ ...`. One process writes at a time."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._claim = RunFolder(self.path)

    @classmethod
    def new(cls, parent: Path, wanted: str | None) -> SweepFolder:
        """A folder of its own below `parent`, or the `wanted` one, which may hold nothing but a start that was cut
        short. Claimed."""
        if wanted is None:
            folder = cls(new_folder(parent))
        else:
            folder = cls(wanted)
            try:
                folder.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"sweep.folder={wanted}: cannot be made: {error.strerror}") from error
            others = sorted(item.name for item in folder.path.iterdir() if not item.name.startswith((".", FROZEN_FILE)))
            if others:
                raise UsageError(f"sweep.folder={wanted}: holds {', '.join(others[:3])} but no sweep; give it its own")
        folder.lock()
        return folder

    def lock(self) -> None:
        """Raises UsageError while another process runs this sweep."""
        self._claim.lock()

    def unlock(self) -> None:
        self._claim.unlock()

    def write_start(self, asked: Plain, frozen: Plain) -> None:
        """sweep.yaml comes last: with it the sweep exists."""
        write_aside(self.path / FROZEN_FILE, json.dumps(frozen))
        self.write_asked(asked)

    def write_asked(self, asked: Plain) -> None:
        write_aside(self.path / SWEEP_FILE, dump_yaml(asked))

    def asked(self) -> Plain:
        """The stored words and settings."""
        file = self.path / SWEEP_FILE
        try:
            asked = yaml.load(file.read_text(encoding="utf-8"), Loader=PlainLoader)
            listed = isinstance(asked["words"], list) and all(isinstance(word, str) for word in asked["words"])
            if not (listed and isinstance(asked["settings"], dict)):
                raise TypeError("words or settings")
        except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file}: not a sweep's words and settings: {str(error).splitlines()[0]}") from error
        return asked

    def frozen(self) -> Plain:
        file = self.path / FROZEN_FILE
        try:
            frozen = dict(json.loads(file.read_text(encoding="utf-8")))
            if not isinstance(frozen.get("jobs", []), list):
                raise TypeError("its jobs are no list")
            return frozen
        except (OSError, TypeError, ValueError) as error:
            raise UsageError(f"{file}: the sweep's frozen configs cannot be read: {error}") from error

    def write_table(self, jobs: Sequence[Job], metric: str) -> None:
        keys = dict.fromkeys(key for job in jobs for key in job.swept)
        header = ["job", *keys, "status", metric, "seconds", "run", "reason"]
        write_rows(self.path / "table.csv", header, (job.row(metric, self.path) for job in jobs))

    def rows(self) -> dict[int, dict[str, Any]]:
        """The table's rows by number, as the last call left them."""
        file = self.path / "table.csv"
        if not file.is_file():
            return {}
        try:
            with file.open(newline="", encoding="utf-8") as text:
                return {int(row["job"]): row for row in csv.DictReader(text) if row["status"]}
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{file}: not a sweep's table: {error!r}") from error

    def recall(self, jobs: Sequence[Job], metric: str) -> None:
        """Gives jobs what the table knows of them."""
        rows = self.rows()
        for job in jobs:
            try:
                if job.number in rows:
                    job.recall(rows[job.number], metric)
            except (KeyError, ValueError) as error:
                raise UsageError(f"{self.path}/table.csv: the row of job {job.number} is broken: {error}") from error
