"""Run folders: `<paths.runs>/<name>/<id>/` with the config, its history, where it came from, and a lock."""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from lmforge.config.aside import write_aside
from lmforge.config.errors import Exit, UsageError
from lmforge.config.launch import note_outcome
from lmforge.config.plain import Plain, PlainLoader, check_schema, dump_yaml, get, to_config
from lmforge.config.targets import check_targets
from lmforge.runs.provenance import differences, provenance, read_facts

SWEEP_FILE = "sweep.yaml"  # what makes a folder a sweep's: its jobs' run folders lie in it
# The parts every stored config has.
PARTS = ("name", "seed", "batch", "paths", "data", "model", "task", "optimizer", "schedule", "strategy", "precision",
         "compile", "trainer", "callbacks", "logger")  # fmt: skip


class RunFolder:
    """One run's folder. Only rank 0 creates, locks and writes; every rank may read."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock: int | None = None

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def sweep(self) -> Path | None:
        """The folder of the sweep that this run is a job of."""
        return self.path.parent if (self.path.parent / SWEEP_FILE).is_file() else None

    @property
    def name(self) -> str:
        return (self.sweep or self.path).parent.name

    @property
    def id(self) -> str:
        return f"{self.sweep.name}-{self.path.name}" if self.sweep else self.path.name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def exit_file(self) -> Path:
        return self.path / "exit_code"

    @classmethod
    def create(
        cls,
        plain: Plain,
        words: Sequence[str] = (),
        argv: Sequence[str] = (),
        path: Path | None = None,
        job: str | None = None,
    ) -> RunFolder:
        """Makes a new folder that no other process can have, or `path`, and writes all but the results; the config
        comes last. Not locked yet."""
        run = cls(path or new_folder(Path(plain["paths"]["runs"]) / plain["name"]))
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        run.write_provenance()
        run.write_start(words, argv, {}, job)
        run.write_config(plain)
        return run

    def write_config(self, plain: Plain) -> None:
        write_aside(self.config_file, dump_yaml(plain))

    def write_start(
        self,
        words: Sequence[str],
        argv: Sequence[str],
        changed: Mapping[str, Sequence[Any]],
        job: str | None = None,
    ) -> None:
        """Appends this start to overrides.yaml: when, the whole command, its words, the launcher's job where it has one
        that starts ranks again, and stored values it changed."""
        file = self.path / "overrides.yaml"
        starts = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else []
        start: Plain = {"started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "command": shlex.join(argv)}
        start["overrides"] = list(words)
        if job:
            start["job"] = job
        if changed:
            start["changed"] = {key: {"from": old, "to": new} for key, (old, new) in changed.items()}
        write_aside(file, dump_yaml([*(starts or []), start]))

    def jobs(self) -> set[str]:
        """The launchers' jobs that have worked on this run; empty where the file that tells them cannot be read."""
        try:
            starts = yaml.safe_load((self.path / "overrides.yaml").read_text(encoding="utf-8"))
            return {start["job"] for start in starts if "job" in start}
        except (OSError, ValueError, TypeError, yaml.YAMLError):
            return set()

    def write_provenance(self) -> None:
        facts, diff = provenance()
        if diff:
            write_aside(self.path / "changes.diff", diff)
        write_aside(self.path / "provenance.json", json.dumps(facts, indent=2))

    def write_resumed(self) -> list[str]:
        """Adds the facts of a later start to provenance.json. Returns what differs from those of the first."""
        file = self.path / "provenance.json"
        first = read_facts(file)
        facts, _ = provenance()
        first["resumed"] = [*first.get("resumed", []), facts]
        write_aside(file, json.dumps(first, indent=2))
        return differences(first, facts)

    def load_plain(self) -> Plain:
        """The stored config, checked like a stranger's: known keys of the right type and allowed targets only."""
        try:
            plain = yaml.load(self.config_file.read_text(encoding="utf-8"), Loader=PlainLoader)
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{self.config_file}: not readable as YAML: {str(error).splitlines()[0]}") from error
        if not isinstance(plain, dict):
            raise UsageError(f"{self.config_file}: holds no config")
        if problems := stored_problems(plain):
            raise UsageError([f"{self.config_file}: {problem}" for problem in problems])
        return plain

    def load(self) -> DictConfig:
        return to_config(self.load_plain())

    def note_end(self, code: Exit) -> None:
        """How the run ended, for `lmforge runs` and for wrappers around launchers that hide the code."""
        note_outcome(code)
        with suppress(OSError):  # a full disk may be what it ends with
            write_aside(self.exit_file, f"{int(code)}\n")

    def noted_end(self) -> int | None:
        """The code it ended with; None for a run that is at work, was killed, or has another's note."""
        try:
            return int(self.exit_file.read_text(encoding="utf-8")[:10])
        except (OSError, ValueError):
            return None

    def summary(self) -> dict[str, Any]:
        """The closing summary, empty while there is none. Raises UsageError when it cannot be read."""
        if not self.summary_file.is_file():
            return {}
        try:
            return dict(json.loads(self.summary_file.read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError) as error:
            raise UsageError(f"{self.summary_file}: cannot be read: {error}") from error

    def finished(self, plain: Plain) -> bool:
        """True when the run has ended and `plain` asks for no more."""
        return bool(self.ended_by(plain))

    def ended_by(self, plain: Plain) -> list[str]:
        """The keys of `plain` that would end the run at once: its steps or epochs reach the limit, or early stopping
        ended it and its patience is still no larger than the validations it waited for. Empty while it goes on."""
        summary = self.summary()
        if not summary:
            return []
        done = {"trainer.max_steps": summary["steps"], "trainer.max_epochs": summary.get("epochs", 0)}
        if summary.get("reason") == "early_stopping":
            done["callbacks.early_stopping.patience"] = summary.get("early_stopping_waited", math.inf)
        limits = {key: get(plain, key) for key in done}
        return [key for key, limit in limits.items() if limit is not None and done[key] >= limit]

    def lock(self, seconds: float = 0.0) -> None:
        """Claims the folder until this process ends, however it ends. Raises when another process holds it, and still
        does so after `seconds`."""
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _claim(descriptor, seconds)
        except OSError:
            holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise UsageError(
                f"{self.path}: another process (pid {holder}) is writing this run; wait for it or start a new run"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._lock = descriptor
        # A forked data worker that outlives this process must not keep the lock alive.
        os.register_at_fork(after_in_child=self.unlock)

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _claim(descriptor: int, seconds: float) -> None:
    """Locks for this process alone. Tries at least twice: a look at who holds the lock takes it for an instant."""
    deadline = time.monotonic() + max(0.05, seconds)
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def stored_problems(plain: Plain) -> list[str]:
    """Why these plain containers, which may be a stranger's, are no run's config. Gives values their own types."""
    problems = [f"lacks its part {part}" for part in PARTS if part not in plain]
    return [*problems, *check_targets(plain), *check_schema(plain).values()]


def list_checkpoints(folder: Path) -> list[Path]:
    """Visible checkpoint folders by rising step; whether they are whole is seen when they are opened."""
    found = [path for path in folder.glob("step-*") if path.is_dir() and path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def new_folder(parent: Path) -> Path:
    """`<parent>/<UTC time>-<random>`, made by this call alone."""
    while True:
        folder = parent / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
