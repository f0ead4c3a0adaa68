"""Rows of a table like `metrics.csv`, read and rewritten whole; imports nothing heavy."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lmforge.config.aside import write_aside


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows that are whole; a line torn by a kill is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    lines = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])))
    header = lines[0] if lines else []
    return [
        dict(zip(header, line, strict=True)) for line in lines[1:] if len(line) == len(header) and line[0].isdigit()
    ]


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
    """Replace the whole file by renaming, so that a kill leaves the old or the new one."""
    text = io.StringIO()
    writer = csv.DictWriter(text, header, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_aside(path, text.getvalue())


def cut_rows(path: Path, step: int) -> None:
    """Drop what was logged after `step`: the resumed run will log it again."""
    rows = [row for row in read_rows(path) if int(row["step"]) <= step]
    if path.exists():
        header = list(dict.fromkeys(name for row in rows for name in row)) or ["step"]
        write_rows(path, header, rows)
