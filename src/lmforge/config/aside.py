"""Files that are whole or absent: written beside their place, synced, renamed."""

from __future__ import annotations

import os
from pathlib import Path


def write_aside(file: Path, text: str) -> None:
    """Writes beside the file, then renames: readers see the old text or the new, never half."""
    aside = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    with aside.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    aside.rename(file)


def sync(path: Path) -> None:
    """Brings a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
