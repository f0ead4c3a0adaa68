"""What can happen to a training, how it is done from outside, and what in the run's own words proves when it hit."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lmforge.config.errors import Exit
from lmforge.soak.training import Training

PAUSE_SECONDS = 3.0

Act = Callable[[Training], None]


@dataclass(frozen=True)
class Fault:
    """`strike` is done at a step, or `in_save` as soon as a checkpoint is being written. `codes` are the exit codes
    that may follow, none when the run goes on by itself. `proof(text, training)` finds the moment in what the run said
    after the fault, or left on disk; empty: it cannot be told, and the fault does not count. `mend` is done before the
    run is started again."""

    strike: Act
    codes: tuple[int, ...]
    proof: Callable[[str, Training], str]
    in_save: bool = False
    mend: Act = lambda training: None
    later: bool = False  # the proof is what the next start says


class NotHere(Exception):
    """A fault that this machine does not let one cause, and why."""


def _said(pattern: str, moment: str = "step") -> Callable[[str, Training], str]:
    """`moment` and the number that a pattern finds in what the run said."""

    def find(text: str, training: Training) -> str:
        found = re.search(pattern, text)
        return f"{moment} {int(found[1])}" if found else ""

    return find


def _last_update(text: str, training: Training) -> str:
    """A run that is killed says nothing: the last update that it noted."""
    return f"step {training.step()}" if training.step() else ""


def _of_rank(text: str, training: Training) -> str:
    """Another rank says when; where there is none it is as if the job was killed."""
    return _said(r"after step (\d+)")(text, training) or _last_update(text, training)


def _half_saved(text: str, training: Training) -> str:
    """The checkpoint that was never published still lies there."""
    part = training.saving()
    return f"save of step {int(part.name[6:14])}" if part else ""


def _to_last_rank(number: int) -> Act:
    return lambda training: os.kill(training.last_rank(), number)


def _pause(training: Training) -> None:
    """All ranks stand still, as when a machine is suspended, and go on."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        os.killpg(training.process.pid, number)
        time.sleep(PAUSE_SECONDS if number == signal.SIGSTOP else 0.0)


def _fill_disk(training: Training) -> None:
    """No file may become as large as the largest of the newest checkpoint, which logs are far from."""
    if not training.checkpoints():
        raise NotHere("nothing has been saved yet")
    newest = training.checkpoints()[-1]
    room = max(path.stat().st_size for path in newest.glob("*.safetensors")) - 1
    for pid in training.ranks().values():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))


def _checkpoints(training: Training) -> Path:
    assert training.run is not None
    return training.run / "checkpoints"


def _read_only(training: Training) -> None:
    """By the folder's rights; the superuser, who has all rights, needs a mount of its own."""
    folder = str(_checkpoints(training))
    if os.geteuid() != 0:
        os.chmod(folder, 0o555)
        return
    for words in (["--bind", folder, folder], ["-o", "remount,ro,bind", folder]):
        if subprocess.run(["mount", *words], capture_output=True).returncode:
            raise NotHere("the superuser may not mount here")


def _writable(training: Training) -> None:
    folder = str(_checkpoints(training))
    if os.geteuid() != 0:
        os.chmod(folder, 0o755)
    else:
        subprocess.run(["umount", folder], capture_output=True)


def _spoil(training: Training) -> None:
    assert training.run is not None
    (training.run / "probe" / "spoil").touch()


def _obey_no_more(training: Training) -> None:
    assert training.run is not None
    (training.run / "probe" / "spoil").unlink(missing_ok=True)


def _corrupt(training: Training) -> None:
    """Half of a file of the newest checkpoint is lost, where there is an older one to fall back to."""
    *older, newest = training.checkpoints() or [Path()]
    if older:
        file = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        os.truncate(file, file.stat().st_size // 2)


def _killed(training: Training) -> None:
    with suppress(ProcessLookupError):
        os.killpg(training.process.pid, signal.SIGKILL)


KILLED = (-signal.SIGKILL,)
BROKEN = (Exit.FAILED, Exit.OUT_OF_MEMORY)  # a killed rank looks like one that ran out of memory
_stopped = _said(r"stopped at step (\d+) and saved")
_stalled = _said(r"lags: no answer[\s\S]*? step (\d+)")
_unsaved = _said(r"SaveFailed: checkpoint step-(\d+) could not be written", "save of step")
_skipped = _said(r"not finite in \d+ updates in a row, the last one (\d+)")
_passed_over = _said(r"incomplete or corrupt checkpoint \S+/step-(\d+)", "checkpoint of step")

FAULTS: dict[str, Fault] = {
    "kill a rank": Fault(_to_last_rank(signal.SIGKILL), (*BROKEN, *KILLED), _of_rank),
    "kill the job": Fault(_killed, KILLED, _last_update),
    "kill the job in a save": Fault(_killed, KILLED, _half_saved, in_save=True),
    "SIGTERM to one rank": Fault(_to_last_rank(signal.SIGTERM), (Exit.SIGTERM,), _stopped),
    "SIGUSR1 to one rank": Fault(_to_last_rank(signal.SIGUSR1), (Exit.REQUEUE,), _stopped),
    "pause of all ranks": Fault(_pause, (), _last_update),
    "stopped rank": Fault(_to_last_rank(signal.SIGSTOP), (Exit.STALL,), _stalled),
    "corrupt checkpoint": Fault(_killed, KILLED, _passed_over, mend=_corrupt, later=True),
    "full disk": Fault(_fill_disk, (Exit.FAILED,), _unsaved),
    "read-only disk": Fault(_read_only, (Exit.FAILED,), _unsaved, mend=_writable),
    "non-finite gradients": Fault(_spoil, (Exit.NON_FINITE,), _skipped, mend=_obey_no_more),
}
