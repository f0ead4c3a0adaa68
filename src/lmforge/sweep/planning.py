"""From a sweep's words to the checked configs of its jobs."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import chdir
from typing import Any

from lmforge.config.batch import world
from lmforge.config.compose import Composer
from lmforge.config.errors import UsageError
from lmforge.config.launch import Launch
from lmforge.config.parse import Word, quoted, read_words, shown
from lmforge.config.plain import Plain, flatten, put
from lmforge.runs.plan import plan_train
from lmforge.sweep.job import Job
from lmforge.sweep.slots import Slot


def words_of_params(composer: Composer, params: Plain, typed: Sequence[Word], problems: list[str]) -> list[Word]:
    """The words of sweep.params that were not typed as well."""
    taken = {word.key for word in typed}
    tokens = [f"{key}={_as_typed(value)}" for key, value in flatten(params) if key not in taken]
    return read_words(tokens, composer.tree, True, problems)


def _as_typed(value: Any) -> str:
    """A YAML list holds the values to sweep, each of which may be a list itself."""
    return f"choice({','.join(map(_item, value))})" if isinstance(value, list) else shown(value)


def _item(value: Any) -> str:
    """One value of a list, in quotes where its text would be read as something else."""
    if isinstance(value, list):
        return f"[{shown(value)}]"
    if not isinstance(value, str) or re.fullmatch(r"[\w./+-]+", value):
        return shown(value)
    return quoted(value)


def value_problems(composer: Composer, words: Sequence[Word], broken: Sequence[str]) -> list[str]:
    """Problems of single values: each value of each word is composed once, with every combination of groups. Also
    composes all that a job can need, so that it can be frozen."""
    problems = [f"{word.raw}: holds {value} twice" for word in words for value in _repeated(word)]
    spaces = {word.key: word.raw for word in words if word.space}
    for chosen in _choices(words):
        for row in range(max((len(word.values) for word in chosen), default=1)):
            single = [_pick(word, word.values[min(row, len(word.values) - 1)]) for word in chosen]
            for key, problem in composer.compose(single, broken).problems.items():
                problems.append(f"{spaces[key]}: {problem}" if key in spaces else problem)
    return list(dict.fromkeys(problems))


def _repeated(word: Word) -> list[str]:
    """Values that would make the same job again, and count a seed twice."""
    return [value for value, count in Counter(map(shown, word.values)).items() if count > 1]


def _choices(words: Sequence[Word]) -> Iterator[list[Word]]:
    """The words with every combination of their groups' choices."""
    options = [[_pick(word, value) for value in word.values] if word.group else [word] for word in words]
    return ([*combination] for combination in itertools.product(*options))


def _pick(word: Word, value: object) -> Word:
    return word.single(value) if word.swept else word


class Planner:
    """Makes jobs of a sweep's words."""

    def __init__(self, composer: Composer, words: Sequence[Word], broken: Sequence[str], home: str = ".") -> None:
        """`home` is the folder that relative paths begin at: where the sweep was started, wherever it goes on."""
        self.composer, self.words, self.broken, self.home = composer, words, broken, home
        self.cores = 0  # of each job when several run side by side

    def job(self, number: int, values: Sequence[Any]) -> Job:
        """The job of one value for each word, with its checked config; a combination that cannot be is refused."""
        single = [_pick(word, value) for word, value in zip(self.words, values, strict=True)]
        swept = {one.key: shown(one.value) for one, word in zip(single, self.words, strict=True) if word.swept}
        job = Job(number, [word.raw for word in single], swept)
        try:
            with chdir(self.home):
                plan = plan_train(self.composer, single, self.broken, Launch())
        except UsageError as error:
            job.status, job.reason = "refused", "; ".join(error.problems)
            return job
        job.plain = plan.plain
        job.own_threads = "trainer.threads" in plan.kept
        self._fit(job)
        return job

    def fit_threads(self, slot: Slot, jobs: Sequence[Job]) -> None:
        """From now on, and for `jobs` made before, threads that the machine chooses fit the slot's cores."""
        self.cores = len(slot.cores)
        for job in jobs:
            self._fit(job)

    def _fit(self, job: Job) -> None:
        if self.cores and job.plain is not None and job.own_threads:
            put(job.plain, "trainer.threads", max(1, self.cores // world(job.plain)[0]))


def grid_jobs(planner: Planner) -> list[Job]:
    """A job for each combination, the last swept word changing fastest."""
    rows = itertools.product(*(word.values for word in planner.words))
    return [planner.job(number, row) for number, row in enumerate(rows)]


def corners(planner: Planner) -> list[Job]:
    """Jobs at the lower end, the middle and the upper end of every word, to see whether any job can be."""
    places = [[0, len(word.values) // 2, -1] for word in planner.words]
    rows = [[word.values[place[i]] for word, place in zip(planner.words, places, strict=True)] for i in range(3)]
    return [planner.job(number, row) for number, row in enumerate(rows)]
