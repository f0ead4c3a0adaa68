"""Opening plain, gzip and Zstandard files as streams of bytes; a file that was cut short is an error, never an end."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from lmforge.config.errors import UsageError
from lmforge.config.optional import require
from lmforge.data.documents import Report, Unfit

_BLOCK = 1 << 16


@contextmanager
def opened(path: Path, packing: str, report: Report) -> Iterator[BinaryIO]:
    """The unpacked bytes of a file. `report.position` follows the bytes read from the disk.

    Raises UsageError for a file that cannot be read, Unfit where a packed one is damaged or cut short.
    """
    start = report.position()
    try:
        with path.open("rb") as raw:
            report.position = lambda: start + raw.tell()
            yield _unpacked(raw, packing)
            raw.seek(0, io.SEEK_END)
    except EOFError:
        raise Unfit(f"truncated_{_name(packing)}", f"the {packing} file ends in the middle") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise Unfit(f"broken_{_name(packing)}", f"not a sound {packing} file ({error})") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    finally:
        size = path.stat().st_size if path.exists() else 0
        report.position = lambda: start + size


def _name(packing: str) -> str:
    return {".gz": "gzip", ".zst": "zstd"}[packing]


def _unpacked(raw: BinaryIO, packing: str) -> BinaryIO:
    if packing == ".gz":
        return gzip.GzipFile(fileobj=raw, mode="rb")  # type: ignore[return-value]
    if packing == ".zst":
        return io.BufferedReader(_Zstandard(raw), 1 << 20)
    return raw


class _Zstandard(io.RawIOBase):
    """Frames one after the other. The library's own reader takes a frame that was cut short for a whole one."""

    def __init__(self, raw: BinaryIO) -> None:
        self._blocks = _zstandard_blocks(raw)
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._left = memoryview(block)
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size


def _zstandard_blocks(raw: IO[bytes]) -> Iterator[bytes]:
    zstandard = _library()
    frame = None
    while block := raw.read(_BLOCK):
        while block:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(block)
            except zstandard.ZstdError as error:
                raise Unfit("broken_zstd", f"not a sound .zst file ({error})") from None
            block, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError


def _library() -> Any:
    require("zstandard", "a .zst file")
    import zstandard

    return zstandard
