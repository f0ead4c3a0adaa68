"""SIGKILL before any single file operation of a process, counted from 1."""

import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

from lmforge.training import checkpoint, saving

AUDITED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree", "written"}


def die_at(number: int, folder: Path, name: str = "") -> None:
    """End this process before its operation `number` on anything in `folder` that has `name` in its path. There is no
    way back. Writing a file of tensors counts twice: when it is half and when it is wholly written."""
    numbers = count(1)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        mine = event in AUDITED and str(folder) in str(args) and name in str(args)
        if (mine or (event == "synced" and not name)) and next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    _tell_more()
    sys.addaudithook(hook)


def _tell_more() -> None:
    """Python says nothing of itself about fsync and about what safetensors writes."""
    write, fsync = checkpoint.save_file, os.fsync

    def halves(tensors: Any, path: Path, **more: Any) -> None:
        write(tensors, path, **more)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        sys.audit("written", str(path))
        path.write_bytes(whole)
        sys.audit("written", str(path))

    def told(descriptor: int) -> None:
        sys.audit("synced", descriptor)
        fsync(descriptor)

    checkpoint.save_file, os.fsync = halves, told  # type: ignore[assignment]


def die_saving(rank: int, step: int, name: str) -> None:
    """A rank of a training dies in its save of a step, before it does anything to a file of that name."""
    run = saving.Saver._run

    def armed(self: saving.Saver, state: dict[str, Any], *more: Any) -> None:
        if self.rank == rank and state["step"] == step:
            die_at(1, self.folder, name)
        run(self, state, *more)

    saving.Saver._run = armed  # type: ignore[method-assign]
