"""The documents of a corpus on disk while it is prepared, so that none has to be held in memory.

A folder of numbered parts of a few megabytes, in the order of the documents. Per part: `.text` (UTF-8, one document
after the other), `.names` (JSON), `.facts.npy` (FACTS), and what the workers add. A file is whole or absent; how the
documents are cut into parts changes no result.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lmforge.config.aside import opened_aside, write_aside
from lmforge.config.errors import UsageError
from lmforge.data.documents import Document

PART = 4 << 20  # bytes of text after which a part ends
PART_DOCUMENTS = 1 << 15
# digest: of the text; key: of the family, decides the split; bytes and characters of the text
FACTS = np.dtype([("digest", "S16"), ("key", "S16"), ("bytes", "<i8"), ("characters", "<i8")])
DONE = "read.json"


class Spool:
    """The parts in a folder. Small per-document arrays are loaded, texts are read one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, part: int, suffix: str) -> Path:
        return self.folder / f"{part:05d}.{suffix}"

    @cached_property
    def parts(self) -> int:
        """How many parts there are, once all is read."""
        return int(self.done["parts"])

    @cached_property
    def done(self) -> dict[str, Any]:
        """What `write` noted at its end."""
        return json.loads((self.folder / DONE).read_bytes())

    @property
    def is_read(self) -> bool:
        return (self.folder / DONE).exists()

    def load(self, part: int, suffix: str, mapped: bool = False) -> np.ndarray:
        return np.load(self.path(part, f"{suffix}.npy"), mmap_mode="r" if mapped else None, allow_pickle=False)

    def save(self, part: int, suffix: str, array: np.ndarray) -> None:
        with opened_aside(self.path(part, f"{suffix}.npy")) as file:
            np.save(file, array, allow_pickle=False)

    def has(self, part: int, suffix: str) -> bool:
        return self.path(part, f"{suffix}.npy").exists()

    def is_whole(self, part: int) -> bool:
        """Whether the part's text is there in full length."""
        text = self.path(part, "text")
        return self.has(part, "facts") and text.stat().st_size == int(self.load(part, "facts")["bytes"].sum())

    @cached_property
    def facts(self) -> np.ndarray:
        """FACTS of all documents."""
        return np.concatenate([self.load(part, "facts") for part in range(self.parts)])

    @cached_property
    def starts(self) -> np.ndarray:
        """int64 [parts + 1]: the number of each part's first document."""
        sizes = [len(self.load(part, "facts", mapped=True)) for part in range(self.parts)]
        return np.cumsum([0, *sizes])

    def names(self, part: int) -> list[str]:
        return json.loads(self.path(part, "names").read_bytes())

    def texts(self, part: int, wanted: Iterable[int] | None = None) -> Iterator[str]:
        """The texts of a part one by one: all, or those whose numbers within the part are `wanted`."""
        ends = np.cumsum(self.load(part, "facts")["bytes"])
        with self.path(part, "text").open("rb") as file:
            for number in range(len(ends)) if wanted is None else wanted:
                start = int(ends[number - 1]) if number else 0
                file.seek(start)
                yield file.read(int(ends[number]) - start).decode("utf-8")

    def text(self, position: int) -> str:
        part, number = self._place(position)
        return next(self.texts(part, [number]))

    def name(self, position: int) -> str:
        part, number = self._place(position)
        return self.names(part)[number]

    def _place(self, position: int) -> tuple[int, int]:
        part = int(np.searchsorted(self.starts, position, side="right")) - 1
        return part, position - int(self.starts[part])

    def write(
        self,
        documents: Iterable[Document],
        family_key: Callable[[Document], bytes],
        notes: Callable[[], dict[str, Any]] = dict,
    ) -> Iterator[int]:
        """Takes in all documents and yields the number of each part as it is there.

        Parts an earlier call left whole are not written again; raises UsageError when the documents are not the same.
        `notes` are asked for at the end and kept in `done`.
        """
        writer, part = _Part(self, 0), 0
        for document in documents:
            writer.add(document, family_key)
            if writer.full:
                writer.finish()
                yield part
                part += 1
                writer = _Part(self, part)
        if len(writer.names):
            writer.finish()
            yield part
            part += 1
        write_aside(self.folder / DONE, json.dumps({"parts": part, **notes()}))


class _Part:
    """One part being written, or passed over when it lies there whole."""

    def __init__(self, spool: Spool, number: int) -> None:
        self._spool, self._number = spool, number
        self._there = spool.is_whole(number)
        self._file: BinaryIO | None = None
        self._facts: list[tuple[bytes, bytes, int, int]] = []
        self.names: list[str] = []
        self._size = 0

    @property
    def full(self) -> bool:
        return self._size >= PART or len(self.names) >= PART_DOCUMENTS

    def add(self, document: Document, family_key: Callable[[Document], bytes]) -> None:
        data = document.text.encode("utf-8")
        self._size += len(data)
        self.names.append(document.name)
        if self._there:
            return
        self._file = self._file or self._spool.path(self._number, "text").open("wb")
        self._file.write(data)
        digest = hashlib.sha256(data).digest()[:16]
        self._facts.append((digest, family_key(document), len(data), len(document.text)))

    def finish(self) -> None:
        if self._file is None:
            self._compare()
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        write_aside(self._spool.path(self._number, "names"), json.dumps(self.names))
        self._spool.save(self._number, "facts", np.array(self._facts, dtype=FACTS))

    def _compare(self) -> None:
        """Takes over the part that is there."""
        size = int(self._spool.load(self._number, "facts")["bytes"].sum())
        if (self._size, self.names) != (size, self._spool.names(self._number)):
            raise UsageError("the documents are not those the killed call began with; type the same words again")
