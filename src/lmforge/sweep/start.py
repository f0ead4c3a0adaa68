"""A sweep from its words: a new one, or one that goes on."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lmforge.config.checks import mode_problems
from lmforge.config.compose import Composer
from lmforge.config.errors import UsageError
from lmforge.config.parse import Word, read_words
from lmforge.config.plain import Plain, to_plain
from lmforge.runs.plan import typed as typed_value
from lmforge.sweep import going_on
from lmforge.sweep.engine import Engine, Source
from lmforge.sweep.folder import SweepFolder
from lmforge.sweep.grid import Grid, freeze, thaw
from lmforge.sweep.job import Job
from lmforge.sweep.planning import Planner, corners, grid_jobs, value_problems, words_of_params
from lmforge.sweep.report import report
from lmforge.sweep.search import Search, import_optuna
from lmforge.sweep.slots import Slot, make_slots


def asks_for_sweep(tokens: Sequence[str]) -> bool:
    """True when a word speaks of the sweep, which without -m means the same as with it."""
    return any(is_own(token.lstrip("+~").partition("=")[0]) for token in tokens)


def refuse_silence(settings: Plain) -> None:
    """Raises UsageError where config files, and no typed word, ask for more than one run."""
    if settings and (settings["kind"] != "grid" or settings["params"]):
        raise UsageError(f"the config asks for a sweep (sweep.kind={settings['kind']}): add -m, or type sweep=grid")


def is_own(key: str) -> bool:
    """Words of the sweep itself, not of its jobs."""
    return key == "sweep" or key.startswith("sweep.")


def run(composer: Composer, words: Sequence[Word], broken: Sequence[str], problems: list[str], argv: list[str]) -> int:
    """Runs all jobs, or those that are missing of a sweep that goes on. Returns the exit code: 0 when every job is done
    or pruned, 1 when one failed, the code of the signal that ended it."""
    own = [word for word in words if is_own(word.key)]
    of_jobs = list({word.key: word for word in words if not is_own(word.key) and word.key != "resume"}.values())
    problems += [f"{word.raw}: a setting of the sweep takes one value" for word in own if word.swept]
    resume = typed_value(words, "resume")
    earlier = None if problems else going_on.named(composer, own, resume, words)
    if earlier is None:
        settings, of_jobs = _ask(composer, own, of_jobs, broken, problems)
        earlier = going_on.same(composer, of_jobs, settings, automatic=resume == "auto")
        if earlier is None:
            return _begin(composer, of_jobs, settings, broken, argv)
    return _go_on(earlier, composer, own, of_jobs, argv)


def _ask(
    composer: Composer, own: Sequence[Word], of_jobs: list[Word], broken: Sequence[str], problems: list[str]
) -> tuple[Plain, list[Word]]:
    """The settings, and the jobs' words with those of sweep.params. Raises UsageError with all that no job can use."""
    first = [word.single(word.value) if word.swept else word for word in of_jobs]
    composed = composer.compose([*own, *first], broken)
    settings = {key: value for key, value in composed.plain["sweep"].items() if key != "params"}
    params = to_plain(composer.base([*own, *first])["sweep"])["params"]  # with its dots, which `composed` has opened
    problems += [text for key, text in composed.problems.items() if is_own(key)]
    of_jobs = [*words_of_params(composer, params, of_jobs, problems), *of_jobs]
    problems += value_problems(composer, of_jobs, broken)
    problems += mode_problems("sweep", "metric", settings)
    problems += _kind_problems(settings["kind"], of_jobs, fine=not problems)
    if problems:
        raise UsageError(list(dict.fromkeys(problems)))
    return settings, of_jobs


def _kind_problems(kind: str, words: Sequence[Word], fine: bool) -> list[str]:
    if kind == "grid":
        return [
            f"{word.raw}: a grid needs its values one by one ({word.key}=A,B,C); to search the space add sweep=optuna"
            for word in words
            if word.space and word.space.endless
        ]
    import_optuna()
    if any(word.swept for word in words) or not fine:
        return []
    return ["sweep=optuna: nothing to search; give a word several values, like 'optimizer.lr=interval(1e-4, 1e-2)'"]


def _begin(composer: Composer, words: list[Word], settings: Plain, broken: Sequence[str], argv: list[str]) -> int:
    """Checks and freezes every job before the folder is made and the first one starts."""
    planner = Planner(composer, words, broken)
    searching = settings["kind"] == "optuna"
    jobs = corners(planner) if searching else grid_jobs(planner)
    plains = _plains(jobs)
    if not plains:
        raise UsageError([f"{job.label}: {job.reason}" for job in jobs])
    slots = make_slots(settings["jobs"], plains)
    planner.fit_threads(slots[0], jobs)
    folder = SweepFolder.new(Path(plains[0]["paths"]["runs"]) / plains[0]["name"], settings["folder"])
    folder.write_start(_asked(words, settings, argv), composer.frozen() if searching else freeze(jobs))
    print(f"sweep folder  {folder.path}", flush=True)
    source: Source
    if searching:
        source = Search(folder.path, settings, planner, len(slots) > 1)
        if settings["pruner"] != "none" and plains[0]["trainer"]["val_every_n_steps"] is None:
            print("no job can be pruned: trainer.val_every_n_steps=null validates only at the end", flush=True)
    else:
        source = Grid(jobs, False)
        for job in jobs:
            if job.plain is None:
                print(f"{job.label} refused: {job.reason}", file=sys.stderr, flush=True)
    return _run(folder, source, slots, settings, argv)


def _go_on(folder: SweepFolder, composer: Composer, own: list[Word], typed: list[Word], argv: list[str]) -> int:
    """Runs what is missing, with the words and configs that the sweep began with."""
    problems: list[str] = []
    asked = folder.asked()
    words = read_words(asked["words"], composer.tree, True, problems)
    settings, refused = going_on.settings_now(composer, asked["settings"], own)
    problems += [*refused, *going_on.word_problems(words, typed)]
    if problems:
        raise UsageError(problems)
    folder.lock()
    folder.write_asked(asked | {"settings": settings | going_on.of_this_call(asked["settings"])})
    settled = going_on.settled(folder, settings)
    print(
        f"{folder.path} is finished{going_on.more(settings)}" if settled else f"going on with {folder.path}", flush=True
    )
    if settings["kind"] == "grid":
        slots, source = _grid_again(folder, settings)
    else:
        slots, source = _search_again(folder, composer, words, settings, str(asked.get("home", ".")))
    folder.recall(source.jobs, settings["metric"])
    return _run(folder, source, slots, settings, argv)


def _grid_again(folder: SweepFolder, settings: Plain) -> tuple[list[Slot], Source]:
    jobs = thaw(folder.frozen())
    return make_slots(settings["jobs"], _plains(jobs)), Grid(jobs, settings["rerun_failed"])


def _search_again(
    folder: SweepFolder, composer: Composer, words: list[Word], settings: Plain, home: str
) -> tuple[list[Slot], Source]:
    """The search, composing its jobs from the config files as they were when it began."""
    composer = Composer(composer.name, composer.tree)
    try:
        composer.thaw(folder.frozen())
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder.path}: the sweep's frozen configs are broken: {error!r}") from error
    planner = Planner(composer, words, (), home if Path(home).is_dir() else ".")
    slots = make_slots(settings["jobs"], _plains(corners(planner)))
    planner.fit_threads(slots[0], ())
    return slots, Search(folder.path, settings, planner, len(slots) > 1)


def _plains(jobs: Sequence[Job]) -> list[Plain]:
    return [job.plain for job in jobs if job.plain is not None]


def _asked(words: Sequence[Word], settings: Plain, argv: Sequence[str]) -> Plain:
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["python", *argv]),
        "home": str(Path.cwd()),
        "words": [word.raw for word in words],
        "settings": settings,
    }


def _run(folder: SweepFolder, source: Source, slots: Sequence[Slot], settings: Plain, argv: Sequence[str]) -> int:
    engine = Engine(folder, source, slots, settings, argv)
    try:
        engine.run()
    finally:
        folder.unlock()
        command = shlex.join(["python", argv[0]])
        print("\n" + report(source.jobs, folder.path, settings["metric"], settings["mode"], command), flush=True)
    return engine.code
