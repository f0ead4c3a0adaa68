"""From typed words to a checked config and its run folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmforge.config import machine
from lmforge.config.batch import world
from lmforge.config.checks import NEEDED_BY, launch_problems, preflight
from lmforge.config.compose import Composed, Composer
from lmforge.config.errors import UsageError
from lmforge.config.keys import find_key
from lmforge.config.launch import Launch, job_of
from lmforge.config.nearest import did_you_mean, nearest
from lmforge.config.parse import Tree, Word
from lmforge.config.places import absolute_paths
from lmforge.config.plain import Plain, flatten, get, put
from lmforge.config.precision import read_precision
from lmforge.config.targets import check_targets
from lmforge.runs.exports import export_problems, is_export, stored_config
from lmforge.runs.find import find_run
from lmforge.runs.folder import RunFolder

FROM_STORED = ("data", "model", "task")  # what evaluate.py takes from the run, and lets be typed on top
OTHER_TEXT = ("data", "data.path", "data.name")  # of these the words that bring other text


@dataclass
class Plan:
    """A checked config. `run` is the folder to continue or read, None for a new one; `changed` = stored values that
    typed words replaced; `kept` = keys left to the machine, which a continued run keeps as it stored them; `done` =
    the word to end with when nothing is left to do; `sweep` = how a sweep would run, which is no part of any run;
    `launch` = who starts it; `again` = an earlier start of the same job has begun `run`."""

    plain: Plain
    run: RunFolder | None = None
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kept: tuple[str, ...] = ()
    done: str | None = None
    sweep: Plain = field(default_factory=dict)
    launch: Launch = field(default_factory=Launch)
    again: bool = False


def compose_train(
    composer: Composer, words: Sequence[Word], broken: Sequence[str]
) -> tuple[Composed, RunFolder | None]:
    """The config of a new run, or with resume=FOLDER the stored one with the typed words on top."""
    resume = typed(words, "resume")
    if resume in (None, "auto"):
        return composer.compose(words, broken), None
    paths = composer.compose([word for word in words if word.key.startswith("paths.")]).plain["paths"]
    run = find_run(str(resume), Path(paths["runs"]), "resume")
    rest = [word for word in words if word.key not in ("resume", "weights")]
    composed = composer.overlay(run.load_plain(), rest, broken)
    composed.plain["resume"] = str(resume)
    if typed(words, "weights") is not None:
        composed.problems["weights"] = (
            f"resume={resume} weights={typed(words, 'weights')}: "
            "resume continues a run, weights starts a new one; give one"
        )
    return composed, run


def plan_train(
    composer: Composer, words: Sequence[Word], broken: Sequence[str], launch: Launch, earlier: Sequence[str] = ()
) -> Plan:
    """Checks everything and finds the run to continue. Raises UsageError with all problems, `earlier` ones first."""
    composed, run = compose_train(composer, words, broken)
    plan = Plan(composed.plain, run, kept=_left_to_the_machine(composed.plain, words, run), launch=launch)
    plan.sweep = composed.plain.pop("sweep", {})
    problems = [*earlier, *composed.problems.values()]
    settle(plan.plain, composer.tree, launch, composed.problems)
    absolute_paths(plan.plain)
    if run is not None:
        problems += meet_stored(plan, run)
    problems += check_targets(plan.plain)
    problems += launch_problems(plan.plain, launch, composed.problems)
    # What hangs on the number of ranks waits until rank 0 knows whether a run goes on.
    undecided = ["trainer.devices"] if job_of(launch) else []
    found, notes = preflight(plan.plain, [*composed.problems, *undecided], machine_too=not launch.external)
    plan.notes += notes
    problems += found
    if problems:
        raise UsageError(list(dict.fromkeys(problems)))
    return plan


def _left_to_the_machine(plain: Plain, words: Sequence[Word], run: RunFolder | None) -> tuple[str, ...]:
    precision = get(plain, "precision.word") == "auto"
    untyped = typed(words, "trainer.threads") is None
    threads = untyped and (run is not None or get(plain, "trainer.threads") == "auto")
    return ("precision",) * precision + ("trainer.threads",) * threads


def meet_stored(plan: Plan, run: RunFolder) -> list[str]:
    """Takes over what the stored run keeps and lists what the plan changes of it. Returns changes that cannot be."""
    stored = absolute_paths(run.load_plain())
    chosen = get(plan.plain, "precision.word")
    for key in plan.kept:
        if get(stored, key) not in (None, "auto"):
            put(plan.plain, key, get(stored, key))
    if "trainer.threads" in plan.kept:
        _fit_threads(plan.plain, stored)
    kept = get(plan.plain, "precision.word")
    if kept != chosen:
        plan.notes.append(f"precision={kept}, which this run began with; for a new one this machine chooses {chosen}")
    plan.changed, refused = compare(stored, plan.plain)
    return refused


def _fit_threads(plain: Plain, stored: Plain) -> None:
    """The stored number of threads stays, so that sums come out the same, unless more processes share the cores."""
    now, before = _processes(plain), _processes(stored)
    threads = get(plain, "trainer.threads")
    if now and before and now > before and isinstance(threads, int):
        put(plain, "trainer.threads", min(threads, machine.thread_share(now)))


def plan_from_run(
    composer: Composer,
    train: Composer,
    words: Sequence[Word],
    broken: Sequence[str],
    launch: Launch,
    earlier: Sequence[str],
) -> Plan:
    """For every job on a run or an export: the stored config of `run` with this front door's own keys on top (strategy,
    precision, trainer and paths among them), and typed data words. Model words may only repeat what is stored."""
    stored_words = [word for word in words if composer.name == "evaluate" and word.key.split(".")[0] in FROM_STORED]
    own = composer.compose([word for word in words if word not in stored_words], broken)
    problems = [*earlier, *own.problems.values()]
    if "run" in own.problems or "paths.runs" in own.problems:
        raise UsageError(problems)
    run = find_run(own.plain["run"], Path(own.plain["paths"]["runs"]))
    exported = is_export(run.path)
    problems += export_problems(run.path, composer.name, words, train) if exported else []
    stored = stored_config(run.path, train) if exported else run.load_plain()
    composed = train.overlay(stored, stored_words, broken)
    problems += [*composed.problems.values(), *_model_changes(stored, composed.plain)]
    if any(word.key in OTHER_TEXT or word.key.startswith("data.sources.") for word in stored_words):
        _use_own_tokenizer(run, composed.plain["data"])
    plain = _merge_own(composed.plain, own.plain)
    plain["run"] = str(run.path)
    if "ckpt" not in own.problems and not exported:
        problems += _settle_checkpoint(run, plain)
    settle(plain, composer.tree, launch, own.problems)
    _settle_batch(plain, {*composed.problems, *own.problems})
    problems += check_targets(plain)
    problems += launch_problems(plain, launch, own.problems)
    found, notes = preflight(plain, {*composed.problems, *own.problems}, not launch.external, NEEDED_BY[composer.name])
    if problems or found:
        raise UsageError(list(dict.fromkeys([*problems, *found])))
    return Plan(plain, run, notes=notes)


def _model_changes(stored: Plain, new: Plain) -> list[str]:
    changed, _ = compare(stored, new, only=("model",))
    if not changed:
        return []
    listed = ", ".join(f"{key}={show(value)} (the run has {show(old)})" for key, (old, value) in changed.items())
    return [f"{listed}: the run's weights fit only its own model; leave these words out"]


def _use_own_tokenizer(run: RunFolder, data: Plain) -> None:
    """Other text is cut into the ids that the run's weights know."""
    file = run.path / "tokenizer.json"
    if "tokenizer" in data and data["tokenizer"] is None and file.is_file():
        data["tokenizer"] = str(file.absolute())


def _settle_checkpoint(run: RunFolder, settings: Plain) -> list[str]:
    """Turns a checkpoint's bare name into its path in the run folder; best and last are left to be looked up."""
    word = settings["ckpt"]
    names = sorted(item.name for item in run.checkpoints.glob("[!.]*"))
    if not names and word in ("best", "last"):
        return [f"ckpt={word}: {run.checkpoints} holds no checkpoint yet"]
    if word in ("best", "last") or Path(word).exists():
        return []
    if word in names:
        settings["ckpt"] = str(run.checkpoints / word)
        return []
    hint = did_you_mean(nearest(Path(word).name, ["best", "last", *names]))
    return [
        f"ckpt={word}: no such checkpoint{hint}; allowed: best, last, a path, or one of {', '.join(names) or 'none'}"
    ]


def _merge_own(stored: Plain, own: Plain) -> Plain:
    """The trainer's keys one by one, all else of this front door as a whole. What only speeds up or shrinks training
    steps is left behind."""
    trainer = own.get("trainer") or {"accelerator": own.get("accelerator", "cpu"), "devices": 1, "num_nodes": 1}
    strategy = own.get("strategy") or {"kind": "single"}
    trainer = {**stored["trainer"], **trainer, "activation_checkpointing": 0}
    return {**stored, **own, "trainer": trainer, "strategy": strategy, "compile": {"backend": None}}


def _settle_batch(plain: Plain, broken: set[str]) -> None:
    """An evaluation's batch is what it was told, whatever the training's was."""
    if "batch_sequences" in plain and not broken & {"batch_sequences", "trainer.devices", "trainer.num_nodes"}:
        devices, nodes = world(plain)
        each = plain["batch_sequences"]
        plain["batch"] = {"tokens": None, "sequences": each * devices * nodes, "micro_sequences": each}


def settle(plain: Plain, tree: Tree, launch: Launch, broken: Iterable[str]) -> None:
    """Decides in place what the machine decides: precision=auto, trainer.threads=auto, and devices and nodes of an
    outer launcher."""
    if launch.external:
        plain["trainer"]["devices"] = launch.local_world_size
        plain["trainer"]["num_nodes"] = launch.num_nodes
    if not {"precision.word", "trainer.accelerator"} & set(broken):
        word = machine.resolve_precision(plain["precision"]["word"], plain["trainer"]["accelerator"])
        if word != plain["precision"]["word"]:
            plain["precision"] = read_precision(tree.folder, word)
    processes = _processes(plain)
    if get(plain, "trainer.threads") == "auto" and processes is not None:
        plain["trainer"]["threads"] = machine.thread_share(processes)


def _processes(plain: Plain) -> int | None:
    """Processes on each node; None when the config's devices are reported as wrong elsewhere."""
    try:
        return world(plain)[0]
    except (UsageError, KeyError, TypeError):
        return None


def compare(stored: Plain, new: Plain, only: Sequence[str] = ()) -> tuple[dict[str, tuple[Any, Any]], list[str]]:
    """(changed keys with the old and the new value, problems of those that may not change on resume)."""
    before, after = dict(flatten(stored)), dict(flatten(new))
    changed: dict[str, tuple[Any, Any]] = {}
    for key in [*before, *(key for key in after if key not in before)]:
        if only and key.split(".")[0] not in only:
            continue
        if key != "resume" and before.get(key) != after.get(key):
            changed[key] = (before.get(key), after.get(key))
    return changed, [_refusal(key, old, new) for key, (old, new) in changed.items() if _is_fixed(key)]


def _is_fixed(key: str) -> bool:
    line = find_key(key)
    return line is None or line.resume == "refused"


def _refusal(key: str, old: Any, new: Any) -> str:
    return (
        f"{key}={show(new)}: the stored run has {show(old)}, and this cannot change on resume; start a new run for it"
    )


def typed(words: Sequence[Word], key: str) -> Any:
    """The value typed last for a key, None when it was not typed."""
    return next((word.value for word in reversed(words) if word.key == key), None)


def show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
