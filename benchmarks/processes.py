"""Whole processes: what one used from its start to its end."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Usage:
    seconds: float  # CPU, user and system
    peak: int  # bytes resident


class Ended(Exception):
    """A process ended with an error, which is the text."""


def run(command: list[str], folder: Path, seconds: float = 400.0) -> Usage:
    """Run a command in `folder`, which sees the benchmarks and train.py, on one thread. Raises Ended when it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    log = folder / "output.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise Ended(f"{' '.join(command[1:4])} ended with {process.returncode}: {''.join(last)}")
    return Usage(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def environment(name: str) -> str | None:
    """The interpreter of one of the environments that `make bench` makes, or None."""
    python = ROOT / f".venv-{name}" / "bin" / "python"
    return str(python) if python.exists() else None
