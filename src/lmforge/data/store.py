"""The cache of prepared shards: which folders are whole, who is at work on which, what may be removed."""

from __future__ import annotations

import fcntl
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lmforge.config.errors import ExitError, UsageError
from lmforge.data.shards import TokenShards, read_manifest

log = logging.getLogger(__name__)

FAILED = ".failed-"  # in the name of a file that tells other processes of a failure
WORK = ".work"  # suffix of the folder a preparation works in
_VERIFY_LIMIT = 64 << 20  # bytes of shards up to which a warm call compares their sha256 too, not only their sizes
_KEPT_SECONDS = 7 * 24 * 3600  # how long the work of a killed preparation waits for the same words to be typed again


def is_whole(folder: Path) -> bool:
    """Whether the folder holds shards that fit their manifest; a damaged one is made again."""
    if not folder.exists():
        return False
    try:
        splits = [TokenShards.open(folder, split) for split in read_manifest(folder)["splits"]]
        if sum(path.stat().st_size for path in folder.glob("*.tokens")) <= _VERIFY_LIMIT:
            for split in splits:
                split.verify()
    except (UsageError, KeyError, OSError) as error:  # another process may be replacing it
        log.warning("the cached shards are prepared again: %s", error)
        return False
    return True


class NotPrepared(ExitError):
    """The shards are not there yet, and the caller is not one who may make them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder}: not prepared yet")
        self.folder = folder


def cached(folder: Path, build: Callable[[], None], make: bool) -> Path:
    """The folder, built first when it is not whole, while others who want the same wait. Raises NotPrepared instead of
    building when `make` is false."""
    if is_whole(folder):
        return folder
    if not make:
        raise NotPrepared(folder)
    with locked(folder.parent, folder.name):
        if not is_whole(folder):
            remove_leftovers(folder.parent)
            build()
    return folder


@contextmanager
def locked(root: Path, name: str) -> Iterator[None]:
    """Holds the lock of one folder; waits for a process that prepares the same."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = (root / f"{name}.lock").open("w")
    except OSError as error:
        raise unwritable(root, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that prepares %s", root / name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def unwritable(root: Path, error: OSError) -> UsageError:
    """A full disk, or a folder that is not this user's."""
    reason = error.strerror or f"disk full? {error}"  # numpy says only how much it wrote
    return UsageError(f"paths.cache: cannot write in {root} ({reason}); set paths.cache=FOLDER")


def remove_leftovers(root: Path) -> None:
    """Removes what killed preparations left and nobody came back for, unless somebody is at work on it."""
    for leftover in (*root.glob(f"*{WORK}"), *root.glob("*.partial"), *root.glob(f"*{FAILED}*")):
        if time.time() - leftover.stat().st_mtime < _KEPT_SECONDS:
            continue
        if FAILED in leftover.name:
            leftover.unlink(missing_ok=True)
            continue
        with (root / f"{leftover.stem}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(leftover, ignore_errors=True)
