"""`lmforge soak`: trainings under faults for as long as is asked, then pass or fail. Never imports torch."""

from __future__ import annotations

import random
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lmforge.config.compose import config_folder
from lmforge.config.errors import Exit, ExitError, Terminated, UsageError
from lmforge.runs.folder import new_folder
from lmforge.soak import reference, report, verdicts
from lmforge.soak.faults import FAULTS
from lmforge.soak.play import Play, Setup, Strike
from lmforge.soak.verdicts import Verdict, at_most

# What a training must have to be soaked. Small enough for two cores; `words` may change all but the last lines.
SMALL = """
data=text data.vocab_size=300 model.context=32 model.n_layer=2 model.n_head=2 model.n_kv_head=1 model.d_model=64
model.d_ff=128 batch.tokens=null batch.sequences=8 optimizer=adamw precision=32-true strategy=ddp trainer.devices=2
trainer.threads=1 trainer.val_every_n_steps=null
"""
WATCHED = """
callbacks=probed callbacks.samples=null callbacks.checkpoint.keep_last=2 trainer.log_every_n_steps=1
trainer.nonfinite_patience=3 callbacks.stall.step_seconds=20
"""


class SoakFailed(ExitError):
    """A limit was not kept."""


@dataclass
class Soak:
    """One training that nothing happens to, and any number that faults happen to."""

    setup: Setup
    whole: Play
    plays: list[Play] = field(default_factory=list)
    different: list[str] = field(default_factory=list)  # plays that did not end with the reference's digits

    @property
    def strikes(self) -> list[Strike]:
        return [strike for play in self.plays for strike in play.strikes]

    def compare(self, play: Play) -> None:
        """Samples fault by fault, up to where the next one took the run back to, and the digits at the end."""
        ours, theirs = reference.samples(play.folder), reference.samples(self.whole.folder)
        last = max(theirs)
        done = [strike for strike in play.strikes if strike.seconds is not None]
        ends = [strike.resumed for strike in done[1:]] + [last]
        for strike, end in zip(done, ends[: len(done)], strict=True):
            difference = reference.compare(ours, theirs, range(strike.resumed + 1, end + 1))
            strike.lost, strike.repeated = difference.lost, difference.repeated
        if play.code != Exit.DONE or reference.digits(play.folder) != reference.digits(self.whole.folder):
            self.different.append(play.name)

    def verdicts(self, memory: float, handles: float) -> list[Verdict]:
        plays = [self.whole, *self.plays]
        strikes = [strike for strike in self.strikes if strike.moment]
        segments = [looks for play in plays for start in play.trainings for looks in start.samples.values()]
        left = [file for play in plays for file in reference.left_files(play.folder)]
        recovered = sum(strike.recovered for strike in strikes)
        return [
            Verdict(
                "trainings like the reference",
                f"{len(self.plays) - len(self.different)} of {len(self.plays)}",
                "all",
                bool(self.plays) and not self.different,
            ),
            Verdict("faults recovered from", f"{recovered} of {len(strikes)}", "all", recovered == len(strikes) > 0),
            at_most("samples lost", sum(strike.lost for strike in self.strikes), 0),
            at_most("samples repeated", sum(strike.repeated for strike in self.strikes), 0),
            at_most("hangs", sum(len(play.hangs) for play in plays), 0),
            verdicts.of_memory(verdicts.memory_slope(segments), memory),
            at_most("growth in open files", verdicts.handle_growth(segments), handles),
            at_most("processes left behind", sum(play.left for play in plays), 0),
            at_most("files left behind", len(left), 0),
        ]


def begin(folder: Path, words: str, steps: int, save_every: int, hang_seconds: float) -> Soak:
    """Train the reference. Raises SoakFailed when that already fails."""
    script = config_folder("train", Path(sys.argv[0])).parent / "train.py"
    typed = [*SMALL.split(), f"data.path={script.parent / 'docs'}", *shlex.split(words), *WATCHED.split()]
    typed += [f"trainer.max_steps={steps}", f"callbacks.checkpoint.every_n_steps={save_every}"]
    typed += [f"paths.runs={folder / 'runs'}", f"paths.cache={folder / 'cache'}"]
    words_by_key = {word.partition("=")[0]: word for word in typed}  # the last of a key counts
    setup = Setup(script, list(words_by_key.values()), folder, hang_seconds)
    whole = Play(setup, "reference")
    whole.run([])
    said = whole.trainings[-1].said().strip()
    if whole.code == Exit.WRONG_INPUT:
        raise UsageError(f"words={words}: {said}")
    if whole.code != Exit.DONE:
        raise SoakFailed(f"the training without faults ended with {whole.code}: {whole.hangs or said[-2000:]}")
    return Soak(setup, whole)


def soak(cfg: DictConfig) -> None:
    """Prints what happened and the verdicts, and writes the report. Raises SoakFailed when a limit was not kept."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        _soak(cfg)
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: Any) -> None:
    """So that the training at work is ended too."""
    raise Terminated("the soak was stopped; nothing is judged")


def _soak(cfg: DictConfig) -> None:
    folder = new_folder(Path(cfg.paths.cache) / "soak").resolve()
    report.say(f"training    the reference, {cfg.steps} steps, in {folder}")
    found = begin(folder, cfg.words, cfg.steps, cfg.save_every_n_steps, cfg.limits.hang_seconds)
    draws, deadline = random.Random(cfg.seed), time.monotonic() + cfg.hours * 3600
    while not found.plays or time.monotonic() < deadline:
        play = Play(found.setup, f"round-{len(found.plays) + 1:04d}")
        found.plays.append(play)
        play.run(drawn(draws, cfg.fault_every_n_steps, deadline))
        found.compare(play)
        report.say(f"{play.name}  {len(play.strikes)} faults, {report.ending(play, found.different)}")
        keep_only_what_failed(play, found.different)
    limits = cfg.limits
    judged = found.verdicts(limits.memory_mb_per_hour, limits.handles)
    finish(found, judged, Path(cfg.report), {"hours": cfg.hours, "seed": cfg.seed})


def drawn(draws: random.Random, mean: int, deadline: float) -> Iterator[tuple[str, int]]:
    """Faults at random until the time is over, at least one."""
    while True:
        yield draws.choice(list(FAULTS)), draws.randint(1, 2 * mean - 1)
        if time.monotonic() > deadline:
            return


def keep_only_what_failed(play: Play, different: list[str]) -> None:
    """Checkpoints of a training that passed would fill the disk in 72 hours."""
    if play.name not in different:
        for checkpoint in (play.folder / "checkpoints").glob("step-*"):
            shutil.rmtree(checkpoint)


def finish(found: Soak, judged: list[Verdict], out: Path, facts: dict[str, Any]) -> None:
    """Show and write; remove the trainings when all passed."""
    good = verdicts.passed(judged)
    report.show(found.strikes, judged)
    report.write(out, found.plays, judged, facts | {"passed": good, "folder": str(found.setup.folder)})
    report.say(f"report      {out}")
    if not good:
        failed = ", ".join(verdict.what for verdict in judged if verdict.passed is False)
        raise SoakFailed(f"{failed}; the trainings are in {found.setup.folder}")
    shutil.rmtree(found.setup.folder)
