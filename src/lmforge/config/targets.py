"""Which classes a config may name. A config can come from a stranger, so its `_target_`s are checked twice: by name in
the source text, before anything is imported, and again on the object that the name led to."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lmforge.config.errors import UsageError
from lmforge.config.nearest import did_you_mean, nearest

# Packages whose own classes and functions may be named. A fork adds its package here.
PACKAGES = ("lmforge.data", "lmforge.models", "lmforge.tasks", "lmforge.training", "lmforge.parallel")

# Library classes, each by its full name.
LIBRARY = (
    "lightning.pytorch.loggers.TensorBoardLogger",
    "lightning.pytorch.loggers.WandbLogger",
    "lightning.pytorch.callbacks.LearningRateMonitor",
    "lightning.pytorch.callbacks.DeviceStatsMonitor",
    "lightning.pytorch.callbacks.RichModelSummary",
    "lightning.pytorch.profilers.SimpleProfiler",
    "lightning.pytorch.profilers.AdvancedProfiler",
    "torch.optim.AdamW",
    "torch.optim.SGD",
    "torchmetrics.MeanMetric",
    "torchmetrics.SumMetric",
)


def check_targets(node: Any, key: str = "") -> list[str]:
    """Problems of every `_target_` in a resolved config, however deep; other keys Hydra would act on are refused."""
    return [problem for dotted, word, value in _special(node, key) if (problem := _problem(dotted, word, value))]


def load_target(path: str) -> Callable[..., Any]:
    """Imports what an allowed name stands for, and refuses it when it was defined somewhere else."""
    problem = _name_problem(path)
    if problem:
        raise UsageError(f"_target_={path}: {problem}")
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if path in LIBRARY:
        genuine = inspect.isclass(found) and found.__module__.split(".")[0] == path.split(".")[0]
    else:
        genuine = callable(found) and (found.__module__, found.__qualname__) == (module, name)
    if not genuine:
        raise UsageError(f"_target_={path}: stands for {found.__module__}.{found.__qualname__}, which is not allowed")
    return found


def _special(node: Any, key: str) -> Iterator[tuple[str, str, Any]]:
    """(dotted key, its last part, value) of every key of the form `_word_`."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _special(item, f"{key}[{index}]")
    elif isinstance(node, dict):
        for word, value in node.items():
            dotted = f"{key}.{word}" if key else str(word)
            if isinstance(word, str) and word.startswith("_") and word.endswith("_"):
                yield dotted, word, value
            yield from _special(value, dotted)


def _problem(dotted: str, word: str, value: Any) -> str | None:
    if word != "_target_":
        return f"{dotted}: not allowed; of the keys that Hydra acts on only _target_ may stand in a config"
    if not isinstance(value, str):
        return f"{dotted}={value}: must be the dotted name of a class"
    problem = _name_problem(value)
    return f"{dotted}={value}: {problem}" if problem else None


@cache
def _name_problem(path: str) -> str | None:
    """Why a name is refused, found without importing anything."""
    if path in LIBRARY:
        return None
    if not all(part.isidentifier() for part in path.split(".")) or not path.startswith(_prefixes()):
        hint = did_you_mean(nearest(path, LIBRARY, cutoff=0.8))
        return (
            f"not an allowed class{hint}; allowed: classes of {', '.join(PACKAGES)} and {len(LIBRARY)} library classes"
        )
    module, _, name = path.rpartition(".")
    defined = _definitions(module)
    if defined is None:
        return f"there is no module {module}"
    if name not in defined:
        return f"{module} defines no {name}{did_you_mean(nearest(name, defined))}; it defines: {', '.join(defined)}"
    return None


def _prefixes() -> tuple[str, ...]:
    return tuple(f"{package}." for package in PACKAGES)


def _definitions(module: str) -> list[str] | None:
    """Public classes and functions that a module's own source defines; None when there is no such source file."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    for place in (spec.submodule_search_locations or []) if spec else []:
        base = Path(place).joinpath(*rest)
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                body = ast.parse(file.read_text(encoding="utf-8")).body
                kinds = (ast.ClassDef, ast.FunctionDef)
                return [item.name for item in body if isinstance(item, kinds) and not item.name.startswith("_")]
    return None
