"""Packages that only some features need, and the extra of pyproject.toml that brings each."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from lmforge.config.errors import UsageError

# Package -> its extra; "" = part of the plain installation, which somebody has taken apart.
EXTRAS = {
    "tensorboard": "",
    "wandb": "",
    "optuna": "sweep",
    "datasets": "data",
    "pyarrow": "data",
    "zstandard": "data",
    "deepspeed": "deepspeed",
}
# Keyed entries of a config that need a package: (group, entry, package). A feature with another way in calls `require`.
ENTRIES = (
    ("logger", "tensorboard", "tensorboard"),
    ("logger", "wandb", "wandb"),
)


def missing(package: str, feature: str) -> str | None:
    """One line that says what to install before `feature` (the words that ask for it) works; None when it does."""
    with suppress(ImportError, ValueError):
        if find_spec(package) is not None:
            return None
    what = f".[{EXTRAS[package]}]" if EXTRAS[package] else "."
    return f"{feature}: needs the package {package}, which is not installed: pip install -e '{what}'"


def require(package: str, feature: str) -> None:
    """To be called before a package is imported. Raises UsageError naming the extra when it is not installed."""
    if (problem := missing(package, feature)) is not None:
        raise UsageError(problem)


def check_packages(cfg: dict[str, Any]) -> None:
    """The packages that a config's entries need."""
    asked = [(package, f"{group}.{entry}") for group, entry, package in ENTRIES if (cfg.get(group) or {}).get(entry)]
    if cfg.get("strategy", {}).get("kind") == "deepspeed":
        asked.append(("deepspeed", "strategy=deepspeed"))
    problems = [missing(package, feature) for package, feature in asked]
    if found := [problem for problem in problems if problem is not None]:
        raise UsageError(found)
