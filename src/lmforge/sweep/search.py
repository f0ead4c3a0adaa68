"""A search with optuna: each job's values follow from the results of those before, and poor jobs end early."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmforge.config.errors import UsageError
from lmforge.config.optional import require
from lmforge.config.parse import Word, shown
from lmforge.config.plain import Plain
from lmforge.runs.folder import RunFolder
from lmforge.runs.rows import read_rows
from lmforge.sweep.job import Job, Status, run_of
from lmforge.sweep.planning import Planner

STUDY_FILE = "study.db"


def import_optuna() -> Any:
    require("optuna", "sweep=optuna")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


class Search:
    """Keeps the study in `study.db` of the sweep's folder: a trial is there before its job starts, so that one that was
    cut short by a kill goes on under its number with its values. `trials` counts them all, whatever became of them."""

    def __init__(self, folder: Path, settings: Plain, planner: Planner, parallel: bool) -> None:
        self.optuna = import_optuna()
        self.folder, self.settings, self.planner, self.parallel = folder, settings, planner, parallel
        self.jobs: list[Job] = []
        self.trials: dict[int, Any] = {}
        self.looked: dict[int, tuple[float, int]] = {}  # when to look at a job's metrics again, and the step seen last
        minutes = settings["timeout_minutes"]
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self.study = self._open()
        self.left = self._recall()

    def _open(self) -> Any:
        from sqlalchemy.exc import SQLAlchemyError

        file = self.folder / STUDY_FILE
        url, patience = f"sqlite:///{file.resolve()}", {"connect_args": {"timeout": 60}}
        try:
            return self.optuna.create_study(
                storage=self.optuna.storages.RDBStorage(url, engine_kwargs=patience),  # readers may hold it for a while
                study_name="sweep",
                direction="maximize" if self.settings["mode"] == "max" else "minimize",
                pruner=make_pruner(self.optuna, self.settings),
                load_if_exists=True,
            )
        except (SQLAlchemyError, RuntimeError) as error:
            raise UsageError(f"{file}: cannot be used as the sweep's study: {str(error).splitlines()[0]}") from error

    def _recall(self) -> list[Job]:
        """Lists the jobs of earlier calls. Returns those that were cut short."""
        state = self.optuna.trial.TrialState
        known: dict[Any, Status] = {state.COMPLETE: "done", state.PRUNED: "pruned", state.FAIL: "failed"}
        for frozen in self.study.get_trials(deepcopy=False):
            if frozen.state == state.RUNNING:
                self.study.sampler = self._sampler(frozen.number)
                trial = self.optuna.trial.Trial(self.study, frozen._trial_id)
                self.trials[frozen.number] = trial
                self.jobs.append(self._job(frozen.number, trial))
                self.looked[frozen.number] = (0.0, max(frozen.intermediate_values, default=0))
            else:
                job = self._job(frozen.number, frozen)
                job.status, job.value = known[frozen.state], frozen.value if frozen.state == state.COMPLETE else None
                self.jobs.append(job)
        return [job for job in self.jobs if job.number in self.trials]

    def next(self) -> Job | None:
        if self.left:
            return self.left.pop(0)
        number = len(self.jobs)
        if number >= self.settings["trials"] or (self.deadline is not None and time.monotonic() > self.deadline):
            return None
        self.study.sampler = self._sampler(number)
        trial = self.study.ask()
        self.trials[number] = trial
        job = self._job(number, trial)
        self._copy_twin(job)
        self.jobs.append(job)
        return job

    def _copy_twin(self, job: Job) -> None:
        """The same words give the same run: a point that is drawn again keeps its result and is not trained again."""
        twin = next((twin for twin in self.jobs if twin.words == job.words and twin.status == "done"), None)
        if twin is not None:
            job.status, job.value, job.reason = "done", twin.value, f"the same as job {twin.number}"

    def _sampler(self, number: int) -> Any:
        """A sampler of this trial's own: its values follow from the seed, its number and the results so far, the same
        whether or not the sweep was interrupted in between."""
        text = f"{self.settings['sampler_seed']} {number}".encode()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:4], "big")
        if self.settings["sampler"] == "random":
            return self.optuna.samplers.RandomSampler(seed=seed)
        return self.optuna.samplers.TPESampler(seed=seed, constant_liar=self.parallel)

    def _job(self, number: int, trial: Any) -> Job:
        values = [suggest(trial, word) if word.swept else word.value for word in self.planner.words]
        return self.planner.job(number, values)

    def hopeless(self, job: Job, run: RunFolder) -> str | None:
        """Reports the validations that are new, until the pruner has seen enough."""
        due, _ = self.looked.get(job.number, (0.0, 0))
        if self.settings["pruner"] == "none" or time.monotonic() < due:
            return None
        before = time.monotonic()
        for step in self._report(job, run):
            if self.trials[job.number].should_prune():
                return f"worse than the others at step {step}"
        now = time.monotonic()  # a long file is read less often
        self.looked[job.number] = (now + max(0.2, 20 * (now - before)), self.looked[job.number][1])
        return None

    def _report(self, job: Job, run: RunFolder) -> Iterator[int]:
        """The steps of validations that are new, each once the study knows its value."""
        metric, (due, seen) = self.settings["metric"], self.looked.get(job.number, (0.0, 0))
        self.looked[job.number] = (due, seen)
        for row in read_rows(run.path / "metrics.csv"):
            if row.get(metric) and (step := int(row["step"])) > seen:
                self.trials[job.number].report(float(row[metric]), step)
                self.looked[job.number] = (due, step)
                yield step

    def tell(self, job: Job) -> None:
        """Closes the trial of a job that is final; an interrupted one stays open. What a finished job measured since
        the last look is what later ones are compared with."""
        state = self.optuna.trial.TrialState
        if job.status == "done" and job.value is not None:
            list(self._report(job, run_of(job, self.folder)))
            self.study.tell(self.trials[job.number], job.value)
        elif job.status == "pruned":
            self.study.tell(self.trials[job.number], state=state.PRUNED)
        elif job.status != "interrupted":
            self.study.tell(self.trials[job.number], state=state.FAIL)


def suggest(trial: Any, word: Word) -> Any:
    """The word's value in this trial: drawn when it is new, else the one it has."""
    space = word.space
    if space is None:
        texts = [shown(value) for value in word.values]
        return word.values[texts.index(trial.suggest_categorical(word.key, texts))]
    if space.whole:
        step = int(space.step or 1)
        return trial.suggest_int(word.key, int(space.low), int(space.high), step=step, log=space.log)
    return trial.suggest_float(word.key, space.low, space.high, step=space.step, log=space.log)


def make_pruner(optuna: Any, settings: Plain) -> Any:
    warmup = settings["pruner_warmup_steps"]
    if settings["pruner"] == "median":
        return optuna.pruners.MedianPruner(settings["pruner_startup_trials"], warmup)
    if settings["pruner"] == "asha":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=warmup or "auto")
    return optuna.pruners.NopPruner()
