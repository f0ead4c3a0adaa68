"""What happened, as tables for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmforge.config.aside import write_aside
from lmforge.soak.play import Play, Strike
from lmforge.soak.verdicts import Verdict

WIDTH = 110


def say(line: str) -> None:
    print(line, flush=True)


def ending(play: Play, different: Sequence[str]) -> str:
    if play.hangs:
        return f"hung: {play.hangs[-1]}"
    return "another end than the reference" if play.name in different else "ended with the reference's digits"


def console() -> Console:
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDTH)


def show(strikes: Sequence[Strike], judged: Sequence[Verdict]) -> None:
    out = console()
    out.print()
    out.print(faults_table(strikes))
    out.print()
    out.print(verdicts_table(judged))


def faults_table(strikes: Sequence[Strike]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("fault", "moment", "exit"):
        table.add_column(name, no_wrap=True)
    table.add_column("went on from", justify="right", no_wrap=True)
    table.add_column("recovered", no_wrap=True)
    for name in ("seconds", "lost", "repeated"):
        table.add_column(name, justify="right", no_wrap=True)
    for strike in strikes:
        table.add_row(*_cells(strike))
    return table


def _cells(strike: Strike) -> list[Text | str]:
    if not strike.moment:
        why = strike.note or "not proven, does not count"
        return [Text(strike.fault, "dim"), Text(why, "dim")]
    code = "went on" if strike.code is None else str(strike.code)
    seconds = "-" if strike.seconds is None else f"{strike.seconds:.1f}"
    verdict = Text("yes", "green") if strike.recovered else Text(f"no ({strike.note})", "bold red")
    counts = [Text(str(count), "" if count == 0 else "bold red") for count in (strike.lost, strike.repeated)]
    return [strike.fault, strike.moment, code, f"step {strike.resumed}", verdict, seconds, *counts]


def verdicts_table(judged: Sequence[Verdict]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("measured", "seen", "limit", "verdict"):
        table.add_column(name)
    words = {True: Text("pass", "green"), False: Text("FAIL", "bold red"), None: Text("not judged", "yellow")}
    for verdict in judged:
        table.add_row(verdict.what, verdict.seen, verdict.limit, words[verdict.passed])
    return table


def write(out: Path, plays: Sequence[Play], judged: Sequence[Verdict], facts: dict[str, Any]) -> None:
    content = {
        **facts,
        "faults": [{"training": play.name, **asdict(strike)} for play in plays for strike in play.strikes],
        "hangs": [hang for play in plays for hang in play.hangs],
        "verdicts": [asdict(verdict) for verdict in judged],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_aside(out, json.dumps(content, indent=1) + "\n")
