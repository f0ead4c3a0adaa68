"""What can be told of every run folder without loading anything heavy: state, progress, metric, disk, last activity."""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from lmforge.config.errors import Exit, UsageError
from lmforge.config.plain import get
from lmforge.runs.find import all_runs
from lmforge.runs.folder import RunFolder, list_checkpoints

HEADLINE = ("val/bits_per_byte", "val/loss")  # the first one that was measured
TAIL = 1 << 16  # bytes of a log in which its last row stands
ENDINGS: dict[int, str] = {
    Exit.FAILED: "failed",
    Exit.WRONG_INPUT: "failed, wrong input",
    Exit.NON_FINITE: "failed, not finite",
    Exit.OUT_OF_MEMORY: "failed, out of memory",
    Exit.STALL: "failed, no progress",
    Exit.REQUEUE: "preempted",
    Exit.INTERRUPTED: "interrupted",
    Exit.SIGTERM: "preempted",
}
# libyaml reads 200 configs in a tenth of a second, the parser in Python in two.
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class RunFacts:
    """One run as far as its folder tells; None where it does not."""

    run: RunFolder
    label: str  # its path below the runs folder
    state: str
    steps: int | None
    planned: int | None
    metric: str | None  # the name of `value`
    value: float | None
    disk: int  # bytes
    active: float  # seconds since the epoch

    @property
    def running(self) -> bool:
        return self.state.startswith("running")


def list_runs(runs: Path, name: str = "all", sort: str = "time") -> list[RunFacts]:
    """Facts of every run below `runs`, in the order asked for; folders that are no runs are passed over."""
    found = [read_run(run, runs) for run in _own_runs(runs) if name in ("all", run.path.relative_to(runs).parts[0])]
    keys = {
        "time": lambda facts: -facts.active,
        "disk": lambda facts: -facts.disk,
        "metric": lambda facts: (facts.value is None, HEADLINE.index(facts.metric or HEADLINE[0]), facts.value or 0.0),
    }
    return sorted(found, key=keys[sort])


def _own_runs(runs: Path) -> Iterator[RunFolder]:
    """Runs that really lie below `runs`: what a symbolic link leads to belongs to somebody else."""
    for run in all_runs(runs):
        parts = run.path.relative_to(runs).parts
        if not any(runs.joinpath(*parts[:depth]).is_symlink() for depth in range(1, len(parts) + 1)):
            yield run


def read_run(run: RunFolder, runs: Path) -> RunFacts:
    """Never raises because of what a folder holds; one that cannot be understood is `broken`."""
    plain, summary = _mapping(_yaml(run.config_file)), _mapping(_json(run.summary_file))
    checkpoints = list_checkpoints(run.checkpoints)
    newest = _state(checkpoints[-1]) if checkpoints else {}
    state = _state_word(run, plain, summary)
    saved = _whole(newest.get("step"))
    logged = _last_step(run.path / "metrics.csv")
    steps = logged if state.startswith(("running", "finished")) and logged is not None else saved
    metric, value = _headline(summary, checkpoints)
    return RunFacts(
        run,
        str(run.path.relative_to(runs)),
        state,
        steps if steps is not None else logged,
        _planned(plain, newest),
        metric,
        value,
        disk_bytes(run.path),
        last_activity(run.path),
    )


def _state_word(run: RunFolder, plain: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    if pid := lock_holder(run.path):
        return f"running (pid {pid})"
    if not plain:
        return "broken"
    if summary and _ended(run, plain):
        return f"finished ({summary.get('reason', 'unknown')})"
    code = run.noted_end()
    return ENDINGS.get(code, f"failed ({code})") if code else "unfinished"


def _ended(run: RunFolder, plain: Mapping[str, Any]) -> bool:
    try:
        return run.finished(dict(plain))
    except (KeyError, TypeError, ValueError, OSError, UsageError):
        return False


def lock_holder(folder: Path) -> str | None:
    """The process that writes a run, None when none does. The lock is held for no longer than it takes to ask."""
    try:
        descriptor = os.open(folder / ".lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return os.pread(descriptor, 100, 0).decode(errors="replace").strip() or "unknown"
    finally:
        os.close(descriptor)
    return None


def disk_bytes(folder: Path) -> int:
    """Space that a folder's own files take; what symbolic links lead to is not counted."""
    total, waiting = 0, [str(folder)]
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:
            continue
        for entry in entries:
            try:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
                waiting += [entry.path] if entry.is_dir(follow_symlinks=False) else []
            except OSError:  # removed meanwhile
                continue
    return total


def last_activity(folder: Path) -> float:
    """When a run last wrote: its start, its log or a checkpoint."""
    watched = ("metrics.csv", "checkpoints", "overrides.yaml", "summary.json", "config.yaml")
    times = []
    for name in watched:
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)


def _headline(summary: Mapping[str, Any], checkpoints: list[Path]) -> tuple[str | None, float | None]:
    """The metric of the summary, else of the newest checkpoint that has one."""
    later = (_mapping(_state(path).get("metrics")) for path in reversed(checkpoints))
    for values in chain([summary], later):
        for name in HEADLINE:
            if isinstance(value := values.get(name), (int, float)) and math.isfinite(value):
                return name, float(value)
    return None, None


def _planned(plain: Mapping[str, Any], newest: Mapping[str, Any]) -> int | None:
    """Updates of the whole run; how many `max_epochs` are is known once a checkpoint says so."""
    steps = get(dict(plain), "trainer.max_steps")
    epochs = get(dict(plain), "trainer.max_epochs")
    return _whole(steps) if epochs is None else _whole(newest.get("total_steps"))


def _last_step(log: Path) -> int | None:
    """The step of the last whole row of a metrics.csv."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return None
    steps = [line.partition(b",")[0] for line in lines if line.endswith(b"\n")]
    return next((int(step) for step in reversed(steps) if step.isdigit()), None)


def _state(checkpoint: Path) -> Mapping[str, Any]:
    return _mapping(_json(checkpoint / "state.json"))


def _yaml(file: Path) -> Any:
    try:
        return yaml.load(file.read_bytes(), Loader=Loader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError):
        return None


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def ago(moment: float, now: float | None = None) -> str:
    """`3 min ago`"""
    seconds = max(0.0, (time.time() if now is None else now) - moment)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now"


def size(count: float) -> str:
    """`1.5 GB`"""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
