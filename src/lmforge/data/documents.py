"""What every reader yields, and the account it keeps of what it left out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from lmforge.config.errors import UsageError

_BOM = "\ufeff"
_KINDS = {int: "number", float: "number", bool: "boolean", dict: "object"}


class Document(NamedTuple):
    """One text and a stable name: `json/decoder.py`, or `notes.jsonl:17` for line 17."""

    name: str
    text: str


class Unfit(ValueError):
    """Why a record holds no text: `reason` is a word to count by, the message says more."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class Report:
    """Counts what was left out and why. Bad rows raise UsageError unless `lenient`; then the first of each is kept."""

    def __init__(self, lenient: bool = False) -> None:
        self.lenient = lenient
        self.skipped: Counter[str] = Counter()
        self.bad_rows: dict[str, dict[str, Any]] = {}
        self.position: Callable[[], int] = lambda: 0  # bytes of the source's files read so far

    def skip(self, reason: str) -> None:
        """Something without text that is no mistake: `blank`, `empty`."""
        self.skipped[reason] += 1

    def bad(self, place: str, error: Unfit, path: str | None = None) -> None:
        """A row that cannot be read. `place` is file:line, or file:row for tables, as in a document's name; `path` the
        same for this machine's user."""
        if not self.lenient:
            raise UsageError(f"{path or place}: {error}; data.on_bad=lenient leaves such rows out and counts them")
        entry = self.bad_rows.setdefault(error.reason, {"count": 0, "first": f"{place}: {error}"})
        entry["count"] += 1

    @property
    def counts(self) -> dict[str, int]:
        """Everything left out, by reason."""
        return dict(self.skipped) | {reason: entry["count"] for reason, entry in self.bad_rows.items()}


def clean(text: str) -> str:
    """The text without a byte order mark, its lines ended by LF; NUL and other control characters stay."""
    text = text.removeprefix(_BOM)
    return text.replace("\r\n", "\n") if "\r" in text else text


def decoded(data: bytes) -> str:
    """Raises Unfit for bytes that are not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unfit("not_utf8", f"not UTF-8 (byte 0x{data[error.start]:02x})") from None


def text_of(value: Any, key: str) -> str:
    """The cleaned text of a field, or Unfit: only a string is text, so that no `None` or `nan` is ever trained on."""
    if not isinstance(value, str):
        kind = "null" if value is None else _KINDS.get(type(value), type(value).__name__)
        raise Unfit(f"text_is_{kind}", f"'{key}' has to be a string, found {kind}")
    return clean(_encodable(value))


def _encodable(text: str) -> str:
    """Half of a surrogate pair, which JSON can spell and UTF-8 cannot, becomes U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", "\ufffd", text)
    return text
