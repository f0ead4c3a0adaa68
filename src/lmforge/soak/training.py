"""A training in processes of its own, watched from outside: its ranks, its last step, what it said, how it ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lmforge.config.launch import CONFIG_VARIABLE, RANK_VARIABLES, RUN_VARIABLE
from lmforge.runs.folder import list_checkpoints

PAGE = os.sysconf("SC_PAGE_SIZE")


class Sample(NamedTuple):
    """One look at one rank."""

    seconds: float  # since the process was started
    memory: float  # resident, in MB
    handles: int


class Training:
    """Started by its making; the leader of a process group that holds all its ranks."""

    def __init__(self, command: Sequence[str], folder: Path, runs: Path, log: Path) -> None:
        self.runs, self.log = runs, log
        self._run: Path | None = None
        self.over = False
        self.began = time.monotonic()
        self.before = self._probe_file().stat().st_size if self._probe_file().exists() else 0  # of earlier starts
        hidden = {RUN_VARIABLE, CONFIG_VARIABLE, "MASTER_PORT", *RANK_VARIABLES}
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=folder,
                env=environment | {"PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self.first_step: int | None = None  # the first that was seen of this start
        self.first_seconds = 0.0  # when that was seen, since the start
        self.samples: dict[int, list[Sample]] = {}  # by rank, from the first step on

    @property
    def run(self) -> Path | None:
        """Its run folder, once there is one."""
        if self._run is None:
            config = next(self.runs.glob("*/config.yaml"), None)
            self._run = config.parent if config else None
        return self._run

    def step(self) -> int:
        """The last update of this start, by the first rank's probe; 0 before the first."""
        lines = self._probe().splitlines()
        return int(lines[-1].split()[0]) if lines else 0

    def _probe(self) -> str:
        """The whole lines at the end of what this start has written into the first rank's file."""
        with suppress(OSError), self._probe_file().open("rb") as file:
            begin = max(self.before, file.seek(0, os.SEEK_END) - 4096)
            file.seek(begin)
            text = file.read().decode(errors="replace")
            whole = text[: text.rfind("\n") + 1]
            return whole if begin == self.before else whole[whole.find("\n") + 1 :]
        return ""

    def _probe_file(self) -> Path:
        return (self.run or self.runs) / "probe" / "rank-00000.txt"

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def resumed(self) -> int:
        """The step it went on from: 0 for a new run."""
        found = re.search(r"^resuming +step-(\d+)", self.said(), re.MULTILINE)
        return int(found[1]) if found else 0

    def saving(self) -> Path | None:
        """The checkpoint that is being written."""
        return next(iter(self.run.glob("checkpoints/.step-*.part")), None) if self.run else None

    def checkpoints(self) -> list[Path]:
        return list_checkpoints(self.run / "checkpoints") if self.run else []

    def members(self) -> dict[int, int]:
        """Its living processes: process id -> that of the parent."""
        found = {}
        for file in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                state, parent, group = file.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self.process.pid and state != "Z":
                    found[int(file.parent.name)] = int(parent)
        return found

    def ranks(self) -> dict[int, int]:
        """rank -> process id, of those that live. The leader is rank 0, the others it has started."""
        found = {0: self.process.pid} if self.process.poll() is None else {}
        for pid, parent in self.members().items():
            with suppress(OSError):
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                ranks = [int(word[11:]) for word in words if word.startswith(b"LOCAL_RANK=")]
                if ranks and parent == self.process.pid:
                    found[ranks[0]] = pid
        return found

    def last_rank(self) -> int:
        """The process of the highest rank."""
        ranks = self.ranks()
        return ranks[max(ranks)]

    def look(self) -> None:
        """Note the first step, then memory and handles of every rank."""
        if self.first_step is None:
            if self.step():
                self.first_step, self.first_seconds = self.step(), time.monotonic() - self.began
            return
        for rank, pid in self.ranks().items():
            with suppress(OSError, IndexError):
                memory = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 1e6
                handles = len(os.listdir(f"/proc/{pid}/fd"))
                self.samples.setdefault(rank, []).append(Sample(time.monotonic() - self.began, memory, handles))

    def kill(self) -> None:
        """SIGKILL to all of it, as when the machine goes down."""
        if not self.over:  # else the number may be another's by now
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.over = True
