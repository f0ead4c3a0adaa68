"""Front doors that read no run and make none: typed words -> a checked config."""

from __future__ import annotations

from collections.abc import Sequence

from lmforge.config.checks import NEEDED_BY, preflight
from lmforge.config.compose import Composer
from lmforge.config.errors import UsageError
from lmforge.config.parse import Word
from lmforge.config.places import absolute_paths
from lmforge.config.targets import check_targets
from lmforge.runs.plan import Plan

ALONE = ("prepare", "runs", "soak")  # jobs that read no run and start none; they get the config only


def plan_alone(composer: Composer, words: Sequence[Word], broken: Sequence[str], earlier: Sequence[str]) -> Plan:
    """Raises UsageError with all problems, `earlier` ones first."""
    composed = composer.compose(words, broken)
    plain = absolute_paths(composed.plain)
    found, notes = preflight(plain, composed.problems, only=NEEDED_BY.get(composer.name, ()))
    problems = [*earlier, *composed.problems.values(), *check_targets(plain), *found]
    if problems:
        raise UsageError(list(dict.fromkeys(problems)))
    return Plan(plain, notes=notes)
