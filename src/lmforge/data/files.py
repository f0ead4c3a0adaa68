"""Which files a corpus is made of, and a hash over their names and bytes."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lmforge.config.aside import write_aside
from lmforge.config.errors import UsageError

FORMATS = (".txt", ".md", ".jsonl", ".csv", ".tsv", ".parquet")
PACKED = (".gz", ".zst")
INDEX = "digests.json"
_INDEX_FROM = 64 << 20  # bytes of a corpus from which unchanged files (path, size, time) are not hashed again
_SETTLED = 2_000_000_000  # ns; a file changed less long ago than this could change again within one tick of its time
# Tests are full of near-copies and invalid code, and slim images strip them; site-packages is not the same anywhere.
_NOT_CORPUS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "_bundled"}
_READ = ".txt, .md, .jsonl, .csv, .tsv (each also .gz and .zst) and .parquet"


class SourceFile(NamedTuple):
    """A file of the corpus; `name` is its path relative to the corpus, with `/`, the same on every machine."""

    name: str
    path: Path


def file_format(path: Path) -> tuple[str, str]:
    """(format, packing): ('.jsonl', '.gz') for `a.jsonl.gz`; ('', '') for a file that is not read."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    packing = suffixes.pop() if suffixes and suffixes[-1] in PACKED else ""
    kind = suffixes[-1] if suffixes else ""
    return (kind, packing) if kind in FORMATS and not (packing and kind == ".parquet") else ("", "")


def stdlib_files(root: Path | None = None) -> list[SourceFile]:
    """The .py files of the standard library (or of `root`) without tests and installed packages, sorted by name."""
    root = root or Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_CORPUS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if not found:
        raise UsageError(f"data=stdlib: this Python has no library sources in {root}; use data=text data.path=...")
    return _named(found, root)


def text_files(pattern: str) -> list[SourceFile]:
    """The readable files a file name, a folder (all levels) or a glob (`**` too) stands for, sorted by name.

    Hidden files and folders are left out unless named. Raises UsageError when nothing matches.
    """
    if not pattern:
        raise UsageError("data.path is empty; give a file, a folder or a glob")
    path = Path(pattern).expanduser()
    if os.path.isdir(path):
        found, root = list(_walk(path)), path
    elif os.path.exists(path):
        if not file_format(path)[0]:
            raise UsageError(f"data.path={pattern}: '{path.suffix}' files are not read; read are {_READ}")
        found, root = [path], path.parent
    else:
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]
        root = Path(os.path.commonpath([p.parent for p in found])) if found else path.parent
    found = [p for p in found if file_format(p)[0] and p.is_file()]
    if not found:
        what = "no file to read there" if os.path.exists(path) or glob.has_magic(pattern) else "no such file or folder"
        raise UsageError(f"data.path={pattern}: {what}; give a file, a folder or a glob of {_READ}")
    return _named(found, root)


def _walk(root: Path) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error

    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _named(paths: Iterable[Path], root: Path) -> list[SourceFile]:
    return sorted(SourceFile(path.relative_to(root).as_posix(), path) for path in paths)


Stamps = list[tuple[str, int, int]]


def stamps(files: Iterable[SourceFile]) -> Stamps:
    """(absolute path, bytes, time of the last change in ns) of each file."""
    found = []
    for _, path in files:
        try:
            stat = path.stat()
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        found.append((os.path.abspath(path), stat.st_size, stat.st_mtime_ns))
    return found


def files_digest(files: Sequence[SourceFile], index: Path | None = None) -> str:
    """sha256 over the names and bytes of the files.

    A small corpus is read whole each time. Of a large one, files that stand in `index` (a folder for its file of
    hashes) with the same path, size and time are not read again.
    """
    now = stamps(files)
    large = index is not None and sum(size for _, size, _ in now) > _INDEX_FROM
    known = _read_index(index) if large and index else {}
    digest, settled = hashlib.sha256(), {}
    for (name, path), (where, size, changed) in zip(files, now, strict=True):
        content = known.get(where, {}).get(f"{size}:{changed}") or _content(path)
        if _is_settled(path, changed):
            settled[where] = {f"{size}:{changed}": content}
        digest.update(f"{name}\0".encode(errors="surrogateescape"))
        digest.update(bytes.fromhex(content))
    if large and index and any(known.get(where) != entry for where, entry in settled.items()):
        with suppress(OSError):  # it only saves time
            index.mkdir(parents=True, exist_ok=True)
            write_aside(index / INDEX, json.dumps(known | settled))
    return digest.hexdigest()


def _is_settled(path: Path, changed: int) -> bool:
    return time.time_ns() - changed > _SETTLED and path.stat().st_mtime_ns == changed


def _content(path: Path) -> str:
    try:
        with path.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def _read_index(index: Path) -> dict[str, dict[str, str]]:
    """An index that cannot be read is as good as none."""
    try:
        found = json.loads((index / INDEX).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
