"""What was seen in a soak against what is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lmforge.soak.training import Sample

WARM_SECONDS = 30.0  # after its first step a process still fills its pools
STEADY_SECONDS = 600.0  # less than this says nothing about megabytes an hour
FIRST_LOOKS = 5


@dataclass(frozen=True)
class Verdict:
    """One line of the judgement; `passed` is None where there was too little to judge by."""

    what: str
    seen: str
    limit: str
    passed: bool | None


@dataclass(frozen=True)
class Slope:
    per_hour: float  # MB
    seconds: float  # of steady running that it was fitted to


def steady(samples: Sequence[Sample]) -> list[Sample]:
    """Without the first seconds."""
    return [sample for sample in samples if sample.seconds - samples[0].seconds >= WARM_SECONDS]


def memory_slope(segments: Iterable[Sequence[Sample]]) -> Slope:
    """Least squares of one slope through all segments, each with a level of its own: a process that is started again
    starts at another level."""
    across = above = seconds = 0.0
    for segment in map(steady, segments):
        if len(segment) < 2:
            continue
        time = sum(sample.seconds for sample in segment) / len(segment)
        level = sum(sample.memory for sample in segment) / len(segment)
        above += sum((sample.seconds - time) * (sample.memory - level) for sample in segment)
        across += sum((sample.seconds - time) ** 2 for sample in segment)
        seconds += segment[-1].seconds - segment[0].seconds
    return Slope(above / across * 3600 if across else 0.0, seconds)


def handle_growth(segments: Iterable[Sequence[Sample]]) -> int:
    """The most that the number of open files of one process grew by: its last look against the most of its first
    ones."""
    grown = [
        segment[-1].handles - max(sample.handles for sample in segment[:FIRST_LOOKS])
        for segment in map(steady, segments)
        if len(segment) > FIRST_LOOKS
    ]
    return max(grown, default=0)


def at_most(what: str, seen: float, limit: float, unit: str = "") -> Verdict:
    return Verdict(what, f"{seen:g}{unit}", f"<= {limit:g}{unit}", seen <= limit)


def of_memory(slope: Slope, limit: float) -> Verdict:
    told = f"{slope.per_hour:+.1f} MB an hour over {slope.seconds:.0f} s"
    enough = slope.seconds >= STEADY_SECONDS
    words = told if enough else f"{told}, too short to judge ({STEADY_SECONDS:.0f} s)"
    return Verdict("memory of a rank", words, f"<= {limit:g} MB an hour", slope.per_hour <= limit if enough else None)


def passed(verdicts: Iterable[Verdict]) -> bool:
    return all(verdict.passed is not False for verdict in verdicts)
