"""Ending a run whose ranks live but do not move, with every rank's stack in the run folder and the rank named that the
others wait for. Ranks that died are for `parallel.watch`."""

import json
import math
import multiprocessing
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl

from lmforge.config.aside import write_aside
from lmforge.config.errors import Exit
from lmforge.data.workers import ask_workers
from lmforge.parallel import flight
from lmforge.runs.folder import RunFolder, list_checkpoints
from lmforge.tasks.update import UpdateTask
from lmforge.training.out_of_memory import watch_of
from lmforge.training.stall_place import find_place, stacks
from lmforge.training.stall_verdict import Note, read_notes, verdict, waiting

GRACE = 30.0  # seconds in which a rank has to answer: storage that ranks share may show a file late
JUDGES = 8  # the first ranks, which read every note; a thousand that did so would load storage that may be slow already
RECENT = 200  # collectives that are kept for a look at what came before


class StallWatch(pl.Callback):
    """A thread beside the training looks whether it moves, with no work for the step but to count.

    A rank without progress for its limit opens `stall-<start of the run>/` in the run folder; every other rank finds it
    at its next look and writes there where it is itself, as often as it looks. Once no rank has time left and all
    have answered, or have had `GRACE` seconds, each ends its process with code 5: a hung collective lets nothing else
    through. While one rank is still within its limit, all wait.
    """

    def __init__(self, run: RunFolder, step_seconds: float, first_seconds: float):
        self.run, self.step_seconds, self.first_seconds = run, step_seconds, first_seconds
        self.pause = min(5.0, step_seconds / 20)
        self.beats = self.looks = 0
        self.idle = 0.0  # seconds without progress
        self.reached: dict[str, int] | None = None  # collectives entered, as the last look saw it
        self.stepped = self.validated = False  # whether the slow first ones are over
        self.hung_since: float | None = None
        self.heard: dict[int, tuple[Note, float]] = {}  # each rank's last word and when it was new
        self.over = threading.Event()
        self.thread: threading.Thread | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, UpdateTask)
        self.trainer, self.task = trainer, pl_module
        self.rank, self.world = pl_module.control.rank, pl_module.control.world
        started = time.gmtime(pl_module.control.gather(int(time.time()))[0])  # the same name on all ranks
        self.folder = self.run.path / time.strftime("stall-%Y%m%d-%H%M%S", started)
        self.report = self.folder / "report.txt"
        self.trained = threading.get_ident()
        self.thread = threading.Thread(target=self._follow, name="stall-watch", daemon=True)
        self.thread.start()

    def on_train_batch_start(self, *args: Any) -> None:
        self.beats += 1

    def on_train_batch_end(self, *args: Any) -> None:
        self.beats += 1
        self.stepped = True

    def on_validation_batch_end(self, *args: Any) -> None:
        self.beats += 1
        self.validated = True

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """A connection that breaks because another rank has just ended a stall is not what this one ends with."""
        if self.thread is not None and self.hung_since is not None and isinstance(exception, Exception):
            self.thread.join(GRACE)
        self.over.set()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.over.set()
        if self.thread is not None:
            self.thread.join(GRACE)

    def _follow(self) -> None:
        """Time adds up look by look, so that a process that was stopped and goes on has not hung meanwhile."""
        seen, looked = (-1, -1), time.monotonic()
        while not self.over.wait(self.pause):
            now, progress = time.monotonic(), (self.beats, self.task.micro_batch)
            self.idle = self.idle + min(now - looked, 2 * self.pause) if progress == seen else 0.0
            seen, looked = progress, now
            if self.world == 1 and self.idle < self.step_seconds:  # nobody else could ask
                self.hung_since = self.reached = None
                continue
            with self._even_if_storage_hangs():
                try:
                    self._look()
                except OSError as error:
                    self._bear(error)
        if self.hung_since is not None:
            self._forget()

    def _look(self) -> None:
        self.looks += 1
        asked = self.folder.exists()
        if self.idle < self.step_seconds:
            self.reached = None
        if self.idle < self.step_seconds and not asked:
            self.hung_since = None
            return
        if self.report.exists():
            self._leave()
        note = self._note()
        if note.hangs:
            self.folder.mkdir(exist_ok=True)
            self.hung_since = self.hung_since or time.monotonic()
            self._answer(note)
            self._decide()
        elif self.hung_since is not None:
            self._forget()
        elif asked:
            self._answer(note)

    def _forget(self) -> None:
        """What this rank waited for has come."""
        self.hung_since = None
        self.heard.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _note(self) -> Note:
        """Where this rank is. One that has entered a collective since the last look has moved."""
        place, entries, done = find_place(self.trained), flight.recorded(), self.trainer.global_step
        before, self.reached = self.reached, flight.reached(entries)
        if before not in (None, self.reached):
            self.idle = 0.0
        held_up = waiting(place, flight.waits_in(entries))
        return Note(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            step=done,
            phase=place.phase,
            line=place.line,
            said=place.say(done),
            position=place.position(done),
            waits=held_up,
            reached=self.reached,
            look=self.looks,
            idle=round(self.idle, 1),
            limit=self._limit(place.phase, held_up),
        )

    def _limit(self, phase: str, held_up: str | None) -> float:
        """Seconds without progress that are no stall. Compilation and cold data make the first ones slow; a save has no
        steps to count, but who waits for another rank in it is not the one that writes."""
        if phase == "debugger":
            return math.inf
        warm = self.validated if self.trainer.validating else self.stepped
        writes = phase == "saving" and held_up is None
        return self.step_seconds if warm and not writes else self.first_seconds

    def _answer(self, note: Note) -> None:
        """Fails when the folder has gone meanwhile, which says that the rank that asked has moved."""
        stack = self.folder / f"rank-{self.rank:05d}.txt"
        if not stack.exists():
            collectives = json.dumps(flight.recorded()[-RECENT:], indent=1)
            write_aside(self.folder / f"collectives-{self.rank:05d}.json", collectives)
            workers = [f"loader worker {pid}\n{said or '  no answer'}" for pid, said in ask_workers().items()]
            write_aside(stack, "\n".join([stacks(), *workers]))
        note.write(self.folder)

    def _decide(self) -> None:
        """The lowest rank that answers ends the run when nobody has time left; its report tells the others to leave."""
        if self.rank >= JUDGES and self._hear(JUDGES):
            return
        notes = self._hear(self.world)
        assert self.hung_since is not None
        all_had_time = time.monotonic() - self.hung_since >= GRACE
        waits_on = any(not note.hangs for note in notes) or (len(notes) < self.world and not all_had_time)
        if waits_on or [note.rank for note in notes[:1]] != [self.rank]:
            return
        text = self._report(notes)
        write_aside(self.report, f"{text}\n")
        self.run.note_end(Exit.STALL)
        print(text, file=sys.stderr, flush=True)
        self._leave()

    def _hear(self, below: int) -> list[Note]:
        """The words of ranks `below` this one that are not older than `GRACE`, in order of rank."""
        now = time.monotonic()
        for rank, note in read_notes(self.folder, below).items():
            if rank not in self.heard or self.heard[rank][0] != note:
                self.heard[rank] = note, now
        return [note for rank, (note, when) in sorted(self.heard.items()) if rank < below and now - when < GRACE]

    def _report(self, notes: list[Note]) -> str:
        saved = list_checkpoints(self.run.checkpoints)
        goes_on = f"the run goes on from {saved[-1].name}: python train.py resume={self.run.path}" if saved else None
        lines = [
            f"Stall: no progress for {min(note.idle for note in notes):.0f} s after step {notes[0].step}",
            *verdict(notes, self.world),
            f"stacks of all threads and the last collectives: {self.folder}",
            goes_on or "nothing was saved yet",
        ]
        return "\n  ".join(lines)

    def _leave(self) -> None:
        """Takes along what would be left behind: loader workers, and ranks of its own that are stopped."""
        for worker in multiprocessing.active_children():
            worker.kill()
        watch = watch_of(self.trainer)
        if watch is not None:
            watch.end_children(2 * self.pause)
        os._exit(Exit.STALL)

    @property
    def last_resort(self) -> float:
        """Seconds after which this rank ends without a word to the others."""
        return max(self.first_seconds, 2 * GRACE)

    def _bear(self, error: OSError) -> None:
        """A folder that has just gone is no trouble, a disk that stays full or read-only must keep nobody waiting."""
        if self.hung_since is not None and time.monotonic() - self.hung_since > self.last_resort:
            self._leave_alone(f"the run folder cannot be written: {error}")

    @contextmanager
    def _even_if_storage_hangs(self) -> Iterator[None]:
        """For then this thread hangs with it."""
        beats = self.beats

        def check() -> None:
            if self.beats == beats:
                self._leave_alone(f"the run folder does not answer: {self.folder}")

        timer = threading.Timer(self.last_resort, check)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _leave_alone(self, why: str) -> None:
        print(f"Stall: rank {self.rank} has no progress, and {why}\n{stacks()}", file=sys.stderr, flush=True)
        os._exit(Exit.STALL)
