"""Shards that are missing when training starts: one process of a machine has them made, the others wait for them.

No rank tokenises: the work is done by `lmforge prepare` in a process of its own. Nobody waits inside a collective,
which would give up after half an hour.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmforge.config.aside import write_aside
from lmforge.config.errors import UsageError
from lmforge.config.launch import CONFIG_VARIABLE, RANK_VARIABLES, RUN_VARIABLE, Launch
from lmforge.config.plain import dump_yaml
from lmforge.data.command import PROBLEMS_VARIABLE
from lmforge.data.corpora import prepares, shards_of
from lmforge.data.shard_checks import MANIFEST
from lmforge.data.store import FAILED, NotPrepared

_POLL_SECONDS = 0.2


def make_missing(data: Mapping[str, Any], cache: Path, launch: Launch) -> None:
    """Returns when the shards of the `data` node are there.

    The process that faces the launcher (of an outer one: the first on each machine) has them made. Raises UsageError on
    all of them when they cannot be, with the problems on that one and an empty list on the others.
    """
    if not prepares(data):
        return
    while folder := _missing(data, cache):  # a mixture may lack several
        if launch.local_rank == 0:
            _have_made(data, cache, _failure(folder))
            break
        _wait_for(folder)


def _missing(data: Mapping[str, Any], cache: Path) -> Path | None:
    """The first folder of shards that is not there, or is damaged."""
    try:
        shards_of(data, cache=cache, make=False)
    except NotPrepared as missing:
        return missing.folder
    return None


def _failure(folder: Path) -> Path:
    """Where the processes of one launch on one machine, all children of one launcher, leave word of a failure."""
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return folder.with_name(f"{folder.name}{FAILED}{os.getppid()}-{again}")


def _have_made(data: Mapping[str, Any], cache: Path, failure: Path) -> None:
    problems = _prepare_in_child({"data": dict(data), "paths": {"cache": str(cache)}, "workers": "auto"})
    if problems:
        if failure.parent.is_dir():
            write_aside(failure, json.dumps(problems))
        raise UsageError(problems)


def _prepare_in_child(config: dict[str, Any]) -> list[str]:
    """Runs `lmforge prepare` with this config and returns what was wrong."""
    with tempfile.TemporaryDirectory(prefix="lmforge-") as folder:
        words, said = Path(folder, "config.yaml"), Path(folder, "problems.json")
        words.write_text(dump_yaml(config), encoding="utf-8")
        environment = _without_launcher() | {CONFIG_VARIABLE: str(words), PROBLEMS_VARIABLE: str(said)}
        code = subprocess.run([sys.executable, "-m", "lmforge.cli", "prepare"], env=environment, check=False).returncode
        if said.exists():
            return json.loads(said.read_text(encoding="utf-8"))
    return [f"the data could not be prepared: the process that does it ended with code {code}"] if code else []


def _without_launcher() -> dict[str, str]:
    """The environment of a process that is no rank of anything."""
    hidden = (*RANK_VARIABLES, RUN_VARIABLE, "TORCHELASTIC_RUN_ID")
    return {name: value for name, value in os.environ.items() if name not in hidden and not name.startswith("SLURM_")}


def _wait_for(folder: Path) -> None:
    """Returns when there may be shards; a damaged folder has had its manifest all the time."""
    parent, failure = os.getppid(), _failure(folder)
    while True:
        if failure.exists() or os.getppid() != parent:
            raise UsageError([])
        time.sleep(_POLL_SECONDS)
        if (folder / MANIFEST).exists():
            return
