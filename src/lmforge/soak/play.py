"""One training from its first step to its last, with faults on the way; it is started again after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lmforge.config.errors import Exit
from lmforge.soak.faults import FAULTS, Fault, NotHere
from lmforge.soak.training import Training

LOOK_SECONDS, SAVE_LOOK_SECONDS = 0.05, 0.001  # between two looks at a training
SAMPLE_SECONDS = 1.0
NOT_DONE = "not done"  # begins the note of a fault that this machine did not let one cause
START_FACTOR = 3  # how much longer than a step a start may take, as a multiple
LEAVE_SECONDS = 30.0  # what ranks get to end after their leader has


class Hang(Exception):
    """No new step, and no end, for too long."""


@dataclass
class Strike:
    """A fault that was done, and what came of it."""

    fault: str
    moment: str = ""  # proven by the run's own words; empty: it does not count
    code: int | None = None  # None where the run went on by itself
    recovered: bool = False
    seconds: float | None = None  # from the fault to the first new step
    resumed: int = 0  # the step that the run went on from
    lost: int = 0
    repeated: int = 0
    note: str = ""


@dataclass
class Setup:
    """How every training of a soak is started."""

    script: Path  # train.py
    words: list[str]
    folder: Path  # where it works
    hang_seconds: float


def _reached(training: Training, step: int) -> bool:
    return training.step() >= step


@dataclass
class Play:
    """A training's whole life under faults."""

    setup: Setup
    name: str
    strikes: list[Strike] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)  # every start
    left: int = 0  # processes that outlived their leader
    hangs: list[str] = field(default_factory=list)
    code: int | None = None  # of the last start

    def run(self, plan: Iterable[tuple[str, int]]) -> None:
        """`plan`: a fault, and how many steps after the start or the fault before it. Ends every process it started."""
        try:
            self._run(plan)
        except Hang as hang:
            self.hangs.append(str(hang))
        finally:
            self.trainings[-1].kill()

    def _run(self, plan: Iterable[tuple[str, int]]) -> None:
        training = self._start()
        for name, steps in plan:
            if not self._until(training, partial(_reached, training, training.step() + steps), name):
                break
            training = self._hit(training, name, FAULTS[name])
        self._until(training, lambda: False, "the end")
        self.code = self._end(training)

    @property
    def folder(self) -> Path:
        """The run folder."""
        run = self.trainings[0].run
        if run is None:
            raise RuntimeError(f"the training did not start:\n{self.trainings[0].said()}")
        return run

    def _start(self) -> Training:
        runs = self.setup.folder / "runs" / self.name
        log = self.setup.folder / f"{self.name}-{len(self.trainings)}.log"
        command = [str(self.setup.script), *self.setup.words, f"name={self.name}", "resume=auto"]
        self.trainings.append(Training(command, self.setup.folder, runs, log))
        return self.trainings[-1]

    def _hit(self, training: Training, name: str, fault: Fault) -> Training:
        """Do a fault and see what comes of it; the training that goes on."""
        if fault.in_save and not self._until(training, lambda: training.saving() is not None, name, SAVE_LOOK_SECONDS):
            return training
        strike, began = Strike(name, resumed=training.step()), time.monotonic()
        self.strikes.append(strike)
        try:
            fault.strike(training)
        except (NotHere, ProcessLookupError) as reason:
            fault.mend(training)
            strike.note = f"{NOT_DONE}: {reason}"
            return training
        if not fault.codes:
            return self._live_on(training, strike, fault, began)
        self._await_end(training, strike, fault)
        if strike.code == Exit.DONE:
            strike.moment, strike.note = "", "the training had ended before"
            return training
        return self._go_on(strike, fault, began)

    def _live_on(self, training: Training, strike: Strike, fault: Fault, began: float) -> Training:
        strike.moment = fault.proof("", training)
        strike.recovered = self._until(training, lambda: training.step() > strike.resumed, strike.fault)
        strike.seconds = time.monotonic() - began
        return training

    def _await_end(self, training: Training, strike: Strike, fault: Fault) -> None:
        try:
            self._until(training, lambda: False, strike.fault)
            strike.code = self._end(training)
            if not fault.later:
                strike.moment = fault.proof(training.said(), training)
        finally:
            fault.mend(training)

    def _go_on(self, strike: Strike, fault: Fault, began: float) -> Training:
        training = self._start()
        stepped = self._until(training, lambda: training.step() > 0, f"the start after {strike.fault}")
        strike.seconds = time.monotonic() - began
        strike.resumed = training.resumed()
        strike.recovered = (stepped or training.process.poll() == Exit.DONE) and strike.code in fault.codes
        if fault.later:
            strike.moment = fault.proof(training.said(), training)
        if strike.code not in fault.codes:
            strike.note = f"exit code {strike.code}, expected {' or '.join(str(int(code)) for code in fault.codes)}"
        return training

    def _until(self, training: Training, done: Callable[[], bool], what: str, pause: float = LOOK_SECONDS) -> bool:
        """Watch until it is done, or the training has ended (False). Raises Hang."""
        stepped, step, looked = time.monotonic(), training.step(), 0.0
        while training.process.poll() is None:
            if done():
                return True
            now = time.monotonic()
            if now - looked > SAMPLE_SECONDS:
                training.look()
                looked = now
                if training.step() != step:
                    stepped, step = now, training.step()
            allowed = self.setup.hang_seconds * (1 if step else START_FACTOR)
            if now - stepped > allowed:
                raise Hang(f"no step for {allowed:.0f} s after step {step}, on the way to {what}")
            time.sleep(pause)
        return done()

    def _end(self, training: Training) -> int:
        """Its exit code, once all its processes have ended; those that do not are counted and killed."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while (members := training.members()) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        self.left += len(members)
        training.kill()
        return training.process.wait()
