"""Which sweep a command goes on with, and what may change when it does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lmforge.config.compose import Composer
from lmforge.config.errors import UsageError
from lmforge.config.keys import find_key
from lmforge.config.parse import Word, read_words
from lmforge.config.plain import Plain, check_schema, to_plain
from lmforge.config.schema import allowed, coerce
from lmforge.runs.folder import SWEEP_FILE
from lmforge.runs.plan import show, typed
from lmforge.sweep.folder import SweepFolder
from lmforge.sweep.job import FINAL

KINDS = ("grid", "optuna")  # each with its file in configs/sweep


def named(composer: Composer, own: Sequence[Word], resume: str | None, words: Sequence[Word]) -> SweepFolder | None:
    """The sweep that sweep.folder=FOLDER or resume=FOLDER names; None when the words name none that is there."""
    folder = typed(own, "sweep.folder")
    if folder is not None and _is_sweep(Path(folder)):
        return SweepFolder(folder)
    if resume in (None, "auto"):
        return None
    runs = composer.compose([word for word in words if word.key.startswith("paths.")]).plain["paths"]["runs"]
    for path in (Path(str(resume)), Path(runs) / str(resume)):
        if _is_sweep(path):
            return SweepFolder(path)
    raise UsageError(f"resume={resume}: no sweep's folder (it holds no {SWEEP_FILE}); a single run goes on without -m")


def same(composer: Composer, words: Sequence[Word], settings: Plain, automatic: bool) -> SweepFolder | None:
    """The sweep in the folder that the settings name, or with resume=auto the newest unfinished one of the same words
    and settings, else the newest finished one."""
    if settings["folder"] is not None and _is_sweep(Path(settings["folder"])):
        return SweepFolder(settings["folder"])
    if not automatic:
        return None
    finished = None
    plain = composer.compose([word.single(word.value) if word.swept else word for word in words]).plain
    for file in sorted((Path(plain["paths"]["runs"]) / plain["name"]).glob(f"*/{SWEEP_FILE}"), reverse=True):
        folder = SweepFolder(file.parent)
        try:
            if _like(folder, composer, words, settings):
                if not settled(folder, settings):
                    return folder
                finished = finished or folder
        except UsageError as error:
            print(f"resume=auto passes over {'; '.join(error.problems)}", flush=True)
    if finished is None:
        print("resume=auto: no unfinished sweep like this one; starting a new one")
    return finished


def _like(folder: SweepFolder, composer: Composer, words: Sequence[Word], settings: Plain) -> bool:
    asked = folder.asked()
    fixed = {key: value for key, value in asked["settings"].items() if not _is_free(key)}
    before = read_words(asked["words"], composer.tree, True, [])
    return _meaning(before) == _meaning(words) and all(settings.get(key) == value for key, value in fixed.items())


def _is_sweep(path: Path) -> bool:
    return (path / SWEEP_FILE).is_file()


def _is_free(key: str) -> bool:
    line = find_key(f"sweep.{key}")
    return line is not None and line.resume == "free"


def _meaning(words: Sequence[Word]) -> dict[str, object]:
    return {word.key: (word.values, word.space, word.drop) for word in words}


def word_problems(stored: Sequence[Word], typed_words: Sequence[Word]) -> list[str]:
    """Typed words may repeat those that the sweep began with; others contradict it."""
    before, raw = _meaning(stored), {word.key: word.raw for word in stored}
    return [
        f"{word.raw}: this sweep began with {raw.get(word.key, f'no word for {word.key}')}; "
        "leave the word out, or start a new sweep for it"
        for word in typed_words
        if before.get(word.key) != _meaning([word])[word.key]
    ]


def settings_now(composer: Composer, stored: Plain, own: Sequence[Word]) -> tuple[Plain, list[str]]:
    """(the stored settings with those typed on top that may change, problems of the others). What an older program did
    not store is as its config file says."""
    kind = Word("sweep", (stored.get("kind"),), f"sweep={stored.get('kind')}", group=True)
    if kind.value not in KINDS:
        raise UsageError(f"sweep.kind={kind.value}: stored, but not one of {', '.join(KINDS)}")
    defaults = to_plain(composer.base([kind])["sweep"])
    settings = {key: stored.get(key, value) for key, value in defaults.items() if key != "params"}
    stored, problems = dict(settings), [*check_schema({"sweep": settings}).values()]
    for word in own:
        key = word.key.partition(".")[2]
        if key == "":
            kind = composer.base([word])["sweep"]["kind"]
            if kind != stored["kind"]:
                problems.append(f"{word.raw}: this sweep is of kind {stored['kind']}; start a new sweep for another")
        elif key not in stored:
            problems.append(f"{word.raw}: this sweep has no such setting; its settings: {', '.join(stored)}")
        elif key != "folder":
            problems += _change(settings, key, word)
    return settings, problems


def _change(settings: Plain, key: str, word: Word) -> list[str]:
    line = find_key(word.key)
    assert line is not None
    try:
        value = coerce(line, word.value)
    except (ValueError, OverflowError):
        return [f"{word.raw}: not allowed; allowed: {allowed(line)}"]
    if value != settings[key] and not _is_free(key):
        return [f"{word.raw}: this sweep has {show(settings[key])}, and this cannot change; start a new sweep for it"]
    settings[key] = value
    return []


def of_this_call(stored: Plain) -> Plain:
    """Settings that are typed for one call and not remembered."""
    return {key: stored[key] for key in ("rerun_failed",) if key in stored}


def settled(folder: SweepFolder, settings: Plain) -> bool:
    """True when every job has come to its end, and none is to be run again."""
    rows = folder.rows().values()
    wanted = settings["trials"] if settings["kind"] == "optuna" else len(folder.frozen().get("jobs", ()))
    again = bool(settings.get("rerun_failed")) and any(row["status"] == "failed" for row in rows)
    return len(rows) >= wanted and all(row["status"] in FINAL for row in rows) and not again


def more(settings: Plain) -> str:
    """What would make a finished sweep do more."""
    if settings["kind"] == "optuna":
        return "; a larger sweep.trials goes on"
    return "; sweep.rerun_failed=true would run failed jobs again"
