"""Which run a word stands for, and which runs are like a config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lmforge.config.errors import UsageError
from lmforge.config.keys import find_key
from lmforge.config.machine import AUTO_PRECISIONS
from lmforge.config.nearest import did_you_mean, nearest
from lmforge.config.plain import Plain, flatten, hash_of
from lmforge.runs.exports import is_export
from lmforge.runs.folder import SWEEP_FILE, RunFolder


def all_runs(runs: Path) -> list[RunFolder]:
    """Every run below the runs folder, jobs of sweeps among them, the one started or resumed last first."""
    folders = ("[!.]*/[!.]*", "[!.]*/[!.]*/[!.]*")
    found = [file.parent for pattern in folders for file in runs.glob(f"{pattern}/config.yaml")]
    return [RunFolder(path) for path in sorted(found, key=_last_start, reverse=True)]


def _last_start(path: Path) -> tuple[int, str]:
    starts = path / "overrides.yaml"
    return (starts if starts.is_file() else path / "config.yaml").stat().st_mtime_ns, path.name


def find_run(word: str, runs: Path, key: str = "run") -> RunFolder:
    """The run that `latest`, a folder, or `<name>/<id>` below the runs folder stands for."""
    if word == "latest":
        found = all_runs(runs)
        if not found:
            raise UsageError(f"{key}=latest: no run below {runs}; train one first, or set paths.runs")
        return found[0]
    for path in (Path(word), runs / word):
        if (path / "config.yaml").is_file() or (key == "run" and is_export(path)):
            return RunFolder(path)
    if any((path / SWEEP_FILE).is_file() for path in (Path(word), runs / word)):
        whole = ", or add -m to go on with all of it" if key == "resume" else ""
        raise UsageError(f"{key}={word}: a sweep; name a job of it ({key}={word}/0){whole}")
    if Path(word).exists():
        raise UsageError(f"{key}={word}: not a run folder (it holds no config.yaml)")
    known = [str(run.path) for run in all_runs(runs)]
    near = nearest(word, known)
    listed = f"; newest: {', '.join(known[:3])}" if known else f"; there are no runs below {runs}"
    raise UsageError(f"{key}={word}: no such run folder{did_you_mean(near)}{listed}")


def fingerprint(plain: Plain, any_precision: bool = False) -> str:
    """Hash of all that makes a run what it is: the resolved config without the keys that may change on resume, and
    with `any_precision` without precision."""
    fixed = {key: value for key, value in flatten(plain) if _makes_the_run(key)}
    if any_precision:
        fixed = {key: value for key, value in fixed.items() if not key.startswith("precision.")}
    return hash_of(dict(sorted(fixed.items())))[:16]


def _makes_the_run(key: str) -> bool:
    line = find_key(key)
    return line is None or line.resume != "free"


def runs_like(plain: Plain, any_precision: bool = False) -> Iterator[RunFolder]:
    """Runs of this config's name and fingerprint, newest first; unreadable ones are passed over. With `any_precision`
    also those with another precision that precision=auto chooses on some machines."""
    wanted = fingerprint(plain, any_precision)
    for run in all_runs(Path(plain["paths"]["runs"])):
        if run.name != plain["name"]:
            continue
        try:
            stored = run.load_plain()
        except UsageError:
            continue
        automatic = stored["precision"]["word"] in AUTO_PRECISIONS
        if fingerprint(stored, any_precision) == wanted and (automatic or not any_precision):
            yield run


def find_auto(plain: Plain, any_precision: bool = False) -> tuple[RunFolder | None, RunFolder | None]:
    """(the newest unfinished run like this config, the newest finished one)."""
    unfinished = finished = None
    for run in runs_like(plain, any_precision):
        if not run.finished(plain):
            unfinished = run
            break
        finished = finished or run
    return unfinished, finished


def find_begun(plain: Plain, job: str, any_precision: bool = False) -> RunFolder | None:
    """The newest run like this config that a launcher's job has worked on."""
    return next((run for run in runs_like(plain, any_precision) if job in run.jobs()), None)
