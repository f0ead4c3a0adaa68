"""Files that are whole or absent: written beside their place, synced, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_aside(file: Path, text: str) -> None:
    with opened_aside(file) as out:
        out.write(text.encode("utf-8"))


@contextmanager
def opened_aside(file: Path) -> Iterator[BinaryIO]:
    """Written beside the file, then renamed: readers see the old content or the new, never half, after a power cut
    too."""
    aside = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    with aside.open("wb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())
    aside.rename(file)


@contextmanager
def folder_aside(folder: Path, aside: Path) -> Iterator[Path]:
    """An empty folder `aside` that takes the name `folder`, which must be free by then, once all in it is on the disk;
    removed when that fails."""
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        for path in (*aside.iterdir(), aside):
            sync(path)
        aside.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sync(path: Path) -> None:
    """Brings a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
