"""Contenders that take turns: each in a process of its own, one at work at a time, measured in CPU time.

On a machine that other programs use too, wall time says nothing and CPU time drifts with the caches. Turns that
alternate see the same drift, so ratios hold; processes of their own keep each contender's allocator, threads and
imports away from the others.
"""

import contextlib
import multiprocessing
import os
import resource
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "lmforge.training.callbacks", "lmforge.training.summary"])
SECONDS = 1500.0  # longest wait for one turn

Turn = Callable[..., None]
Contender = Callable[..., None]


@dataclass
class Lane:
    """One contender's turns: CPU seconds of each, what it said at each, and its peak memory in bytes."""

    seconds: list[float] = field(default_factory=list)
    said: list[dict[str, Any]] = field(default_factory=list)
    peak: int = 0

    @property
    def best(self) -> float:
        return min(self.seconds)


class Failed(Exception):
    """A contender ended with an error, which is the text."""


def compete(
    contenders: Mapping[str, tuple[Contender, dict[str, Any]]], rounds: int, warmup: int, folder: Path
) -> dict[str, Lane]:
    """`rounds` timed turns of every contender in alternation, after `warmup` untimed ones.

    A contender is called as `contender(turn, **options)`; it prepares, calls `turn()` once, and `turn(**facts)` after
    every piece of work that is to be timed. Raises Failed when one of them fails.
    """
    lanes = {name: Lane() for name in contenders}
    processes = {name: _start(*contender, folder / name.replace(" ", "-")) for name, contender in contenders.items()}
    try:
        for name, (_, pipe) in processes.items():
            _hear(name, pipe)
        for number in range(warmup + rounds):
            for name in _order(list(processes), number):
                pipe = processes[name][1]
                pipe.send("go")
                used, lanes[name].peak, said = _hear(name, pipe)
                if number >= warmup:
                    lanes[name].seconds.append(used)
                    lanes[name].said.append(said)
    finally:
        for process, _ in processes.values():
            process.kill()
            process.join()
    return lanes


def _order(names: list[str], number: int) -> list[str]:
    """Forwards and backwards in turn, so that nobody always comes after the same rival."""
    return names if number % 2 == 0 else names[::-1]


def _start(contender: Contender, options: dict[str, Any], folder: Path) -> tuple[Any, Connection]:
    folder.mkdir(parents=True, exist_ok=True)
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_serve, args=(theirs, contender, options, str(folder)), daemon=False)
    process.start()
    theirs.close()
    return process, ours


def _hear(name: str, pipe: Connection) -> tuple[float, int, dict[str, Any]]:
    try:
        answer = pipe.recv() if pipe.poll(SECONDS) else f"no answer in {SECONDS:.0f} s"
    except EOFError:
        answer = "ended without a word"
    if isinstance(answer, str):
        raise Failed(f"{name}: {answer}")
    return answer


def _serve(pipe: Connection, contender: Contender, options: dict[str, Any], folder: str) -> None:
    os.chdir(folder)
    log = os.open("output.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    began = 0.0

    def turn(**facts: Any) -> None:
        nonlocal began
        used = time.process_time() - began
        pipe.send((used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, facts))
        try:
            pipe.recv()
        except EOFError:
            os._exit(0)  # the contest is over
        began = time.process_time()

    with contextlib.suppress(BrokenPipeError):
        try:
            contender(turn, **options)
            pipe.send("came to an end before the contest did")
        except Exception:
            pipe.send(traceback.format_exc())


@dataclass(frozen=True)
class Ratio:
    """How many times the first contender's CPU time the second one's is: of the best turns, and per round."""

    best: float
    middle: float
    low: float  # 10th percentile of the rounds' ratios
    high: float  # 90th

    @classmethod
    def of(cls, over: list[float], under: list[float]) -> "Ratio":
        rounds = [a / b for a, b in zip(over, under, strict=True)]
        tenths = quantiles(rounds, n=10, method="inclusive") if len(rounds) > 1 else rounds * 9
        return cls(min(over) / min(under), median(rounds), tenths[0], tenths[-1])

    def __str__(self) -> str:
        return f"{self.best:.2f} ({self.low:.2f} to {self.high:.2f})"
