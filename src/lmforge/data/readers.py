"""Documents out of files: .txt and .md, .jsonl, .csv and .tsv, .parquet, one at a time whatever the file's size.

What is decided once: the last of two equal keys counts, NaN elsewhere in a record does no harm, NUL and control
characters are text, blank lines are no records, a text of blanks alone is no document.
"""

from __future__ import annotations

import csv
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lmforge.config.optional import require
from lmforge.data.documents import Document, Report, Unfit, clean, decoded, text_of
from lmforge.data.files import SourceFile, file_format
from lmforge.data.streams import opened

WHOLE = 32 << 20  # bytes up to which a .txt or .md file is one document; a larger one is cut at ends of paragraphs
_CELL = 1 << 27  # characters of one csv field; a quote that is never closed would swallow the rest of the file
_ROWS = 256  # rows of parquet decoded at once


def read_files(files: list[SourceFile], key: str, report: Report) -> Iterator[Document]:
    """The documents of the files in order; `key` names the field or column that holds the text.

    Byte order marks are dropped and CRLF becomes LF, in values too, so that the way a file was saved changes nothing.
    Blank lines and documents without text are skipped and counted; anything else that is wrong goes to `report.bad`.
    """
    for file in files:
        kind, packing = file_format(file.path)
        try:
            if kind == ".parquet":
                documents = _parquet(file, key, report)
            else:
                documents = _packed(file, packing, key, report, _READERS[kind])
            for document in documents:
                if document.text.strip():
                    yield document
                else:
                    report.skip("empty")
        except Unfit as error:
            report.bad(file.name, error, str(file.path))


def _bad(report: Report, file: SourceFile, number: int, error: Unfit) -> None:
    report.bad(f"{file.name}:{number}", error, f"{file.path}:{number}")


def _packed(file: SourceFile, packing: str, key: str, report: Report, read: Reader) -> Iterator[Document]:
    with opened(file.path, packing, report) as stream:
        yield from read(file, stream, key, report)


Reader = Callable[[SourceFile, BinaryIO, str, Report], Iterator[Document]]


def read_whole(path: Path, report: Report) -> str:
    """The text of a small file; raises Unfit when it is not UTF-8."""
    with opened(path, "", report) as stream:
        return clean(decoded(stream.read()))


def _text(file: SourceFile, stream: BinaryIO, key: str, report: Report) -> Iterator[Document]:
    line, name = 1, file.name
    for data, last in _pieces(stream):
        if not last or line > 1:
            name = f"{file.name}:{line}"
        try:
            yield Document(name, clean(decoded(data)))
        except Unfit as error:
            _bad(report, file, line + _lines_before_bad(data), error)
        line += data.count(b"\n")


def _lines_before_bad(data: bytes) -> int:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return data.count(b"\n", 0, error.start)
    return 0


def _pieces(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """(bytes, whether they are the last): all of a file, or pieces of at most WHOLE bytes that end with a paragraph, a
    line, or at least a character. A byte order mark and CRLF are gone before, so that they move no cut."""
    held = b""
    while True:
        while len(held) <= WHOLE and (block := stream.read(WHOLE + 1 - len(held))):
            while block.endswith(b"\r") and (more := stream.read(1)):
                block += more
            held = (held + block.replace(b"\r\n", b"\n")).removeprefix(BOM_UTF8)
        if len(held) <= WHOLE:
            yield held, True
            return
        cut = _cut(held)
        yield held[:cut], False
        held = held[cut:]


def _cut(data: bytes) -> int:
    for mark in (b"\n\n", b"\n"):
        at = data.rfind(mark, WHOLE // 2, WHOLE)
        if at >= 0:
            return at + len(mark)
    cut = WHOLE
    while cut > WHOLE - 4 and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def _jsonl(file: SourceFile, stream: BinaryIO, key: str, report: Report) -> Iterator[Document]:
    for number, line in enumerate(stream, start=1):
        try:
            text = clean(decoded(line))
            if text.strip():
                yield Document(f"{file.name}:{number}", _field(_record(text, line), key))
            else:
                report.skip("blank")
        except Unfit as error:
            _bad(report, file, number, error)


def _record(text: str, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", str(error))
        where = "" if line.endswith(b"\n") else " at the end of the file, cut short?"
        raise Unfit("broken_json", f"broken JSON{where} ({what})") from None
    if not isinstance(record, dict):
        raise Unfit("not_an_object", f"a JSON object is expected, found {type(record).__name__}")
    return record


def _field(record: dict[str, Any], key: str) -> str:
    if key not in record:
        listed = ", ".join(map(str, list(record)[:8])) or "none"
        raise Unfit("no_text_field", f"no '{key}' key; keys here: {listed}; data.text_key names the one with the text")
    return text_of(record[key], key)


def _table(file: SourceFile, stream: BinaryIO, key: str, report: Report) -> Iterator[Document]:
    before = csv.field_size_limit(_CELL)
    try:
        yield from _rows(file, stream, key, report)
    finally:
        csv.field_size_limit(before)


def _rows(file: SourceFile, stream: BinaryIO, key: str, report: Report) -> Iterator[Document]:
    """Rows count from 1 below the header. Bytes that are not UTF-8 pass the reader as halves of surrogate pairs."""
    lines = (line.decode("utf-8", errors="surrogateescape") for line in stream)
    rows = csv.reader(lines, delimiter="\t" if file_format(file.path)[0] == ".tsv" else ",", strict=True)
    names = _header(rows)
    if key not in names:
        listed = ", ".join(names[:12]) or "none, the file is empty"
        raise Unfit("no_text_column", f"no column '{key}'; columns: {listed}; data.text_key names the right one")
    column, number = names.index(key), 0
    while True:
        number += 1
        try:
            row = next(rows, None)
            if row is None:
                return
            if row:
                yield Document(f"{file.name}:{number}", _cell(row, column, names))
            else:
                report.skip("blank")
        except csv.Error as error:
            _bad(report, file, number, Unfit("broken_csv", f"broken row ({error})"))
        except Unfit as error:
            _bad(report, file, number, error)


def _header(rows: Iterator[list[str]]) -> list[str]:
    try:
        return [clean(name) for name in next(rows, [])]
    except csv.Error as error:
        raise Unfit("broken_csv", f"broken header ({error})") from None


def _cell(row: list[str], column: int, names: list[str]) -> str:
    if column >= len(row):
        raise Unfit("no_text_field", f"the row has {len(row)} fields, none for '{names[column]}'")
    if any(row[len(names) :]):  # a text with a comma and no quotes would be cut there
        raise Unfit("broken_csv", f"the row has {len(row)} fields, the header {len(names)}")
    return clean(decoded(row[column].encode("utf-8", errors="surrogateescape")))


def _parquet(file: SourceFile, key: str, report: Report) -> Iterator[Document]:
    arrow, parquet = _arrow()
    start, size = report.position(), file.path.stat().st_size
    try:
        with parquet.ParquetFile(file.path, pre_buffer=False) as table:
            names = table.schema_arrow.names
            if key not in names:
                listed = ", ".join(names[:12])
                raise Unfit(
                    "no_text_column", f"no column '{key}'; columns: {listed}; data.text_key names the right one"
                )
            number = 0
            for batch in table.iter_batches(_ROWS, columns=[key], use_threads=False):
                for value in batch.column(0):
                    number += 1
                    try:
                        yield Document(f"{file.name}:{number}", text_of(_python(value), key))
                    except Unfit as error:
                        _bad(report, file, number, error)
    except (arrow.ArrowException, OSError) as error:
        raise Unfit("broken_parquet", f"not a sound parquet file ({str(error).splitlines()[0]})") from None
    report.position = lambda: start + size


def _python(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        raise Unfit("not_utf8", f"not UTF-8 (byte 0x{error.object[error.start]:02x})") from None


def _arrow() -> tuple[Any, Any]:
    require("pyarrow", "a .parquet file")
    import pyarrow
    from pyarrow import parquet

    return pyarrow, parquet


_READERS: dict[str, Reader] = {".txt": _text, ".md": _text, ".jsonl": _jsonl, ".csv": _table, ".tsv": _table}
