"""Where text comes from: the standard library every Python carries, or a user's own files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lmforge.config.errors import UsageError
from lmforge.data.documents import Document, Report, Unfit
from lmforge.data.files import SourceFile, Stamps, stamps, stdlib_files, text_files
from lmforge.data.readers import read_files, read_whole


def own_family(document: Document) -> str:
    """Each text for itself, whatever its name: renaming a file moves nothing between the splits."""
    return hashlib.sha256(document.text.encode("utf-8")).hexdigest()


def text_targets(n: int) -> tuple[int, int]:
    """How many of `n` documents should judge: (val, test)."""
    return min(max(60, n // 200), max(1, n // 10)), min(max(40, n // 300), n // 20)


@dataclass(frozen=True)
class Source:
    """Text to be prepared. `files` (their names and bytes) and `identity` together have to tell one content from any
    other: they decide whether prepared shards still fit.

    `kind` begins the folder's name. `read` yields the documents lazily in an order that is always the same, and tells
    the report what it left out. Documents of one `family` stay in one split; `targets` gives how many of n documents
    val and test should have. Without `keep_copies` only the first of near-copies stays.
    """

    kind: str
    read: Callable[[Report], Iterable[Document]]
    files: Sequence[SourceFile] = ()
    identity: str = ""
    family: Callable[[Document], str] = own_family
    targets: Callable[[int], tuple[int, int]] = text_targets
    keep_copies: bool = True
    lenient: bool = False

    @property
    def size(self) -> int:
        """Bytes of the files as they lie on the disk; 0 for a source without files."""
        return sum(file.path.stat().st_size for file in self.files)

    def stamps(self) -> Stamps:
        """What tells that a file was changed."""
        return stamps(self.files)

    def check_unchanged(self, before: Stamps) -> None:
        """Raises UsageError when a file is not as it was."""
        if self.stamps() != before:
            raise UsageError(f"data={self.kind}: the files changed while they were read; start again")


def stdlib_source(root: Path | None = None) -> Source:
    """The .py files of this Python's standard library, split by top-level package.

    Of near-copies (most of `encodings/`) the first alone stays: the others would be an eighth of the train text and
    teach nothing. Files that are not UTF-8 are left out.
    """
    files = stdlib_files(root)
    return Source(
        "stdlib",
        partial(_stdlib_documents, files),
        files,
        family=lambda document: stdlib_family(document.name),
        targets=lambda n: (60, 10),
        keep_copies=False,
        lenient=True,
    )


def stdlib_family(name: str) -> str:
    """The top-level package of a standard library file, or the module itself: `json/decoder.py` -> `json`."""
    return name.split("/", 1)[0].removesuffix(".py")


def _stdlib_documents(files: list[SourceFile], report: Report) -> Iterator[Document]:
    for name, path in files:
        try:
            text = read_whole(path, report)
        except Unfit as error:
            report.bad(name, error)
            continue
        if text.strip():
            yield Document(name, text)
        else:
            report.skip("empty")


def text_source(path: str, text_key: str = "text", on_bad: str = "strict") -> Source:
    """A user's files (see `files.text_files` for `path`); `text_key` names the field or column with the text.

    `on_bad`: strict = the first bad row is an error that names it | lenient = bad rows are left out and counted. Each
    document is its own family unless it has near-copies.
    """
    files = text_files(path)
    identity = "" if (text_key, on_bad) == ("text", "strict") else f"{text_key}\0{on_bad}"
    return Source(
        "text",
        lambda report: read_files(files, text_key, report),
        files,
        identity,
        lenient=on_bad == "lenient",
    )
