"""Deleting a run: only a real run folder below the runs folder, never one at work, and never half of it visible."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lmforge.config.errors import UsageError
from lmforge.config.nearest import did_you_mean, nearest
from lmforge.runs.facts import RunFacts, list_runs
from lmforge.runs.folder import RunFolder


def find_doomed(word: str, runs: Path) -> RunFacts:
    """The run that a word stands for. Raises UsageError when that is no run below `runs`, or one that a process is
    writing."""
    known = {facts.run.path.absolute(): facts for facts in list_runs(runs)}
    places = [Path(os.path.normpath(place.absolute())) for place in (runs / word, Path(word))]
    facts = next((known[place] for place in places if place in known), None)
    if facts is None:
        near = nearest(word, [other.label for other in known.values()])
        raise UsageError(f"delete={word}: no run below {runs}{did_you_mean(near)}; `lmforge runs` lists them")
    if facts.running:
        raise UsageError(f"delete={word}: {facts.state}; stop it first")
    return facts


def remove_run(run: RunFolder, runs: Path) -> None:
    """Removes a run for good. Its folder is renamed first, so that a kill in between leaves no half run to be found;
    what an earlier kill left is removed too. Symbolic links are removed, never followed."""
    run.lock()
    try:
        hidden = run.path.with_name(f".{run.path.name}.deleted")
        run.path.rename(hidden)
        shutil.rmtree(hidden)
    finally:
        run.unlock()
    for leftover in run.path.parent.glob(".*.deleted"):
        shutil.rmtree(leftover, ignore_errors=True)
    _remove_if_empty(run.path.parent, runs)


def _remove_if_empty(folder: Path, runs: Path) -> None:
    while folder != runs:
        try:
            folder.rmdir()
        except OSError:  # something else is in it
            return
        folder = folder.parent
