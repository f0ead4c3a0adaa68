"""Who keeps a hung run waiting, and why, from what each rank has noted of itself."""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from lmforge.config.aside import write_aside
from lmforge.training.stall_place import Place

CAUSES = {
    "data": "data loading: the storage that it reads, or a loader's worker (data.num_workers)",
    "saving": "storage: the checkpoint's folder is slow, full or gone",
    "validation": "this rank's own computing or validation data, not the network",
    "callback": "the callback on that line, not the network",
    "silent": "the process is stopped or frozen, or its machine or that machine's network is gone",
    "network": "network or reduction: all ranks wait in a collective and none is missing",
    "apart": "ranks that take different ways through the code: each waits in a collective that others have not entered",
    "alone": "the code on that line",
    "own": "this rank's own computing, not the network: an endless loop, a lock, or a device that does not answer",
}


@dataclass(frozen=True)
class Note:
    """One rank's word about itself."""

    rank: int
    host: str
    pid: int
    step: int  # steps done
    phase: str
    line: str
    said: str  # the phase in words, with its step
    position: tuple[int, int]
    waits: str | None  # the collective that it waits in
    reached: dict[str, int]  # collectives entered, by process group
    look: int  # grows with every word of a rank that lives
    idle: float  # seconds without progress
    limit: float  # how many of them it may have

    @property
    def hangs(self) -> bool:
        return self.idle >= self.limit

    def write(self, folder: Path) -> None:
        write_aside(_file_of(folder, self.rank), json.dumps(asdict(self)))


def read_notes(folder: Path, below: int) -> dict[int, Note]:
    """The notes in the folder of ranks `below` this one, in order; one that cannot be read is not there."""
    notes: dict[int, Note] = {}
    for rank in range(below):
        with suppress(OSError, ValueError, TypeError, KeyError):
            facts = json.loads(_file_of(folder, rank).read_text(encoding="utf-8"))
            notes[rank] = Note(**{**facts, "position": tuple(facts["position"])})
    return notes


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def waiting(place: Place, collective: str | None) -> str | None:
    """The collective that holds a rank up; torch's distributed code waits for others also where nothing was noted."""
    return collective or ("a message of another rank" if place.waits else None)


def find_lagging(notes: Sequence[Note], world: int) -> tuple[list[int], str]:
    """The ranks that the others wait for, none when all are there, and the cause as a word of CAUSES.

    A rank that says nothing; else those that wait for nobody while others do; else those that have entered fewer
    collectives of a group; else those that are behind in their step.
    """
    silent = sorted(set(range(world)) - {note.rank for note in notes})
    if silent:
        return silent, "silent"
    free = [note for note in notes if note.waits is None]
    if not free:
        behind = _behind(notes)
        return behind, "apart" if behind else "network"
    first = min(note.position for note in free)
    lagging = [note for note in free if note.position == first]
    return [note.rank for note in lagging], _cause(lagging[0], world)


def _behind(notes: Sequence[Note]) -> list[int]:
    """Ranks that have entered fewer collectives of a group than another one of its ranks has."""
    most: dict[str, int] = {}
    for note in notes:
        for group, count in note.reached.items():
            most[group] = max(count, most.get(group, 0))
    return [note.rank for note in notes if any(count < most[group] for group, count in note.reached.items())]


def _cause(note: Note, world: int) -> str:
    if note.phase in ("data", "saving", "validation", "callback"):
        return note.phase
    return "own" if world > 1 else "alone"


def verdict(notes: Sequence[Note], world: int) -> list[str]:
    """The report's lines: who lags where, who waits where, and the likely cause."""
    lagging, cause = find_lagging(notes, world)
    by_rank = {note.rank: note for note in notes}
    lines = [f"{names(lagging)} lag{_s(lagging)}: no answer"] if cause == "silent" else []
    for rank in lagging if cause != "silent" else ():
        note = by_rank[rank]
        lines.append(f"rank {rank} lags (process {note.pid} on {note.host}): {_whereabouts(note)}")
    others: dict[str, list[int]] = {}
    for note in notes:
        if note.rank not in lagging:
            others.setdefault(_whereabouts(note), []).append(note.rank)
    lines += [f"{names(ranks)} wait{_s(ranks)}: {where}" for where, ranks in others.items()]
    return [*lines, f"probable cause: {CAUSES[cause]}"]


def _whereabouts(note: Note) -> str:
    return f"{note.said}, {note.line}" + (f", in {note.waits}" if note.waits else "")


def _s(ranks: Sequence[int]) -> str:
    return "s" if len(ranks) == 1 else ""


def names(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 2-7`"""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(f"{first}-{last}" if first != last else f"{first}" for first, last in spans)
    return f"rank{'s' * (text.strip('0123456789') != '')} {text}"
