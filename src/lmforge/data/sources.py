"""Where text comes from: the standard library every Python carries, or a user's own files.

A source is first a list of files (cheap: enough to know whether the prepared shards still fit), then documents.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from lmforge.config.errors import UsageError

SUFFIXES = (".txt", ".md", ".jsonl")
# Tests are full of near-copies and invalid code, and slim images strip them; site-packages is not the same anywhere.
_NOT_CORPUS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "_bundled"}
_BOM = "\ufeff"


class Document(NamedTuple):
    """One text and a stable name: `json/decoder.py`, or `notes.jsonl:17` for line 17."""

    name: str
    text: str


class SourceFile(NamedTuple):
    """A file of the corpus; `name` is its path relative to the corpus, with `/`, the same on every machine."""

    name: str
    path: Path


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
    """The .txt, .md and .jsonl files a file name, a folder (all levels) or a glob (`**` too) stands for, sorted.

    Hidden files and folders are left out unless named. Raises UsageError when nothing matches.
    """
    if not pattern:
        raise UsageError("data.path is empty; give a file, a folder or a glob")
    path = Path(pattern).expanduser()
    if os.path.isdir(path):
        found, root = list(_walk(path)), path
    elif os.path.exists(path):
        if path.suffix.lower() not in SUFFIXES:
            raise UsageError(f"data.path={pattern}: '{path.suffix}' files are not read; allowed: {', '.join(SUFFIXES)}")
        found, root = [path], path.parent
    else:
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]
        root = Path(os.path.commonpath([p.parent for p in found])) if found else path.parent
    found = [p for p in found if p.suffix.lower() in SUFFIXES and p.is_file()]
    if not found:
        what = "no file to read there" if os.path.exists(path) or glob.has_magic(pattern) else "no such file or folder"
        raise UsageError(f"data.path={pattern}: {what}; give a file, a folder or a glob of {', '.join(SUFFIXES)}")
    return _named(found, root)


def _walk(root: Path) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error

    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _named(paths: Iterable[Path], root: Path) -> list[SourceFile]:
    return sorted(SourceFile(path.relative_to(root).as_posix(), path) for path in paths)


def files_digest(files: Iterable[SourceFile]) -> str:
    """sha256 over the names and bytes of the files; reads all of them in pieces."""
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(f"{name}\0".encode(errors="surrogateescape"))
        content = hashlib.sha256()
        for block in _blocks(path):
            content.update(block)
        digest.update(content.digest())
    return digest.hexdigest()


def _blocks(path: Path, size: int = 1 << 20) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(size):
                yield block
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def stdlib_documents(skipped: Counter[str] | None = None, root: Path | None = None) -> list[Document]:
    """The standard library's own sources, sorted by name.

    Files without text and files that are not UTF-8 are left out and counted in `skipped` under `empty` and
    `undecodable`.
    """
    skipped = Counter() if skipped is None else skipped
    documents = []
    for name, path in stdlib_files(root):
        try:
            text = _clean(b"".join(_blocks(path)).decode("utf-8"))
        except UnicodeDecodeError:
            skipped["undecodable"] += 1
            continue
        if text.strip():
            documents.append(Document(name, text))
        else:
            skipped["empty"] += 1
    return documents


def stdlib_family(name: str) -> str:
    """The top-level package of a standard library file, or the module itself: `json/decoder.py` -> `json`."""
    return name.split("/", 1)[0].removesuffix(".py")


def text_documents(pattern: str, skipped: Counter[str] | None = None) -> Iterator[Document]:
    """The documents of a user's files: one a .txt or .md file, one a line of .jsonl (its "text" key).

    Byte order marks are dropped and CRLF becomes LF, in values of jsonl too, so that the way a file was saved changes
    nothing. Blank jsonl lines and documents without text are skipped and counted (`blank`, `empty`). Anything else
    that is wrong raises UsageError with file:line.
    """
    skipped = Counter() if skipped is None else skipped
    for name, path in text_files(pattern):
        read = _jsonl_documents if path.suffix.lower() == ".jsonl" else _whole_file
        for document in read(name, path, skipped):
            if document.text.strip():
                yield document
            else:
                skipped["empty"] += 1


def _whole_file(name: str, path: Path, skipped: Counter[str]) -> Iterator[Document]:
    data = b"".join(_blocks(path))
    try:
        yield Document(name, _clean(data.decode("utf-8")))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line}: not UTF-8 (byte 0x{data[error.start]:02x})") from error


def _jsonl_documents(name: str, path: Path, skipped: Counter[str]) -> Iterator[Document]:
    for number, line in enumerate(_lines(path), start=1):
        try:
            text = line.decode("utf-8").removeprefix(_BOM)
            if not text.strip():
                skipped["blank"] += 1
                continue
            value = _clean(_text_of(text))
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}:{number}: not UTF-8 (byte 0x{line[error.start]:02x})") from error
        except ValueError as error:
            raise UsageError(f"{path}:{number}: {error}") from error
        yield Document(f"{name}:{number}", value)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error


def _text_of(line: str) -> str:
    """The text of one jsonl record; ValueError says what is wrong with it."""
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"broken JSON ({getattr(error, 'msg', 'nested too deeply')})") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is expected, found {type(record).__name__}")
    if "text" not in record:
        raise ValueError(f"no 'text' key; keys here: {', '.join(map(str, list(record)[:8])) or 'none'}")
    text = record["text"]
    if not isinstance(text, str):
        raise ValueError(f"'text' has to be a string, found {'null' if text is None else type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("'text' holds half of a surrogate pair, which is not text") from None
    return text


def _clean(text: str) -> str:
    text = text.removeprefix(_BOM)
    return text.replace("\r\n", "\n") if "\r" in text else text
