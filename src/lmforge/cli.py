"""The `lmforge` command: one word for the job, then key=value words as in train.py; after `launch` a command."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from lmforge.config.errors import Exit
from lmforge.config.nearest import did_you_mean, nearest
from lmforge.runs.folder import RunFolder
from lmforge.start import launch_command
from lmforge.start.entry import Job, run_front_door
from lmforge.start.helptext import HELP


def main() -> None:
    job, *words = sys.argv[1:] or ["--help"]
    if job in ("-h", "--help"):
        print(help_text())
        sys.exit(int(Exit.DONE))
    if job == "launch":
        sys.exit(launch_command.launch(words))
    if job not in JOBS:
        known = [*JOBS, "launch"]
        hint = did_you_mean(nearest(job, known))
        print(f"lmforge {job}: no such job{hint}; jobs: {', '.join(known)}", file=sys.stderr)
        sys.exit(int(Exit.WRONG_INPUT))
    run_front_door(job, JOBS[job], [sys.argv[0], *words])


def help_text() -> str:
    about = {**{job: HELP[job].about for job in JOBS}, "launch": launch_command.ABOUT}
    listed = "\n".join(f"  {job:<9}  {text}" for job, text in about.items())
    return f"""\
Usage: lmforge JOB [key=value ...]

Jobs
{listed}

lmforge JOB --help lists a job's words. Training and evaluation are train.py and evaluate.py."""


def _prepare(config: DictConfig) -> Mapping[str, Any]:
    from lmforge.data.command import prepare

    return prepare(config)


def _generate(config: DictConfig, run: RunFolder) -> Mapping[str, Any]:
    from lmforge.evaluation.generate import generate

    return generate(config, run)


def _runs(config: DictConfig) -> None:
    from lmforge.runs.table import runs_job

    runs_job(config)


def _soak(config: DictConfig) -> None:
    from lmforge.soak.command import soak

    soak(config)


def _export(config: DictConfig, run: RunFolder) -> Mapping[str, Any]:
    from lmforge.export.command import export

    return export(config, run)


JOBS: dict[str, Job] = {
    "prepare": _prepare,
    "generate": _generate,
    "runs": _runs,
    "export": _export,
    "soak": _soak,
}

if __name__ == "__main__":
    main()
