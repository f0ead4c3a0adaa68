"""Exported folders: what their config.json may say, checked before torch is imported. They may come from a stranger.

model.safetensors   the weights under the network's own names, a tied table once
tokenizer.json      the tokenizer the ids belong to
config.json         the network's class and constructor arguments, dtype, identity of the two files, where it came from
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmforge.config.compose import Composer
from lmforge.config.errors import UsageError
from lmforge.config.keys import DTYPES
from lmforge.config.machine_checks import parameter_count
from lmforge.config.nearest import did_you_mean, nearest
from lmforge.config.parse import Word
from lmforge.config.plain import Plain, check_schema
from lmforge.config.targets import check_targets

FORMAT, VERSION = "lmforge-safetensors", 1  # the name stays: exports outlive a renamed package
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
NETWORKS = "lmforge.models."  # an export names a network, no other class that a run's config may name
MOST_BYTES = 1 << 20  # of config.json
SHAPE: dict[str, type] = {
    "format": str,
    "version": int,
    "model": dict,
    "dtype": str,
    "parameters": int,
    "vocabulary": int,
    "special_ids": dict,
    "tokenizer": dict,
    "files": dict,
    "origin": dict,
}
ORIGIN: dict[str, type] = {"run": str, "step": int, "checkpoint": str, "git_revision": str}
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def is_export(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and not (folder / "config.yaml").is_file()


def read_export(folder: Path) -> Plain:
    """The checked config.json of a whole exported folder: allowed network, known keys, every file there in its size.

    Raises UsageError with all problems. What the files hold is checked where they are opened (`training.exported`).
    """
    found = _parse(folder / CONFIG)
    if found.get("format") != FORMAT or found.get("version") != VERSION:
        raise UsageError(
            f"{folder / CONFIG}: no export of this program (format {FORMAT}, version {VERSION}); it says "
            f"format {found.get('format')}, version {found.get('version')}"
        )
    problems = [*_wrong_keys(found, SHAPE), *_wrong_keys(found.get("origin"), ORIGIN, "origin.")]
    problems = problems or [*_model_problems(found), *_file_problems(folder, found)]
    if problems:
        raise UsageError([f"{folder / CONFIG}: {problem}" for problem in problems])
    return found


def _parse(file: Path) -> Plain:
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file}: holds no config")
    return found


def _wrong_keys(node: Any, shape: Mapping[str, type], prefix: str = "") -> list[str]:
    if not isinstance(node, dict):
        return []  # said one level up
    problems = [f"lacks {prefix}{key}" for key in shape if key not in node]
    for key, value in node.items():
        if key not in shape:
            problems.append(f"{prefix}{key}: unknown key{did_you_mean(nearest(key, shape))}")
        elif not isinstance(value, shape[key]) or isinstance(value, bool):
            problems.append(f"{prefix}{key}={str(value)[:60]}: must be {_NAMES[shape[key]]}")
    return problems


_NAMES = {str: "text", int: "a whole number", dict: "an object"}


def _model_problems(found: Plain) -> list[str]:
    model = found["model"]
    target = model.get("_target_")
    if not isinstance(target, str) or not target.startswith(NETWORKS):
        return [f"model._target_={target}: not allowed; a network of {NETWORKS[:-1]} is"]
    problems = [*check_targets({"model": model}), *check_schema({"model": model}).values()]
    if found["dtype"] not in DTYPES:
        hint = did_you_mean(nearest(found["dtype"], DTYPES))
        problems.append(f"dtype={found['dtype']}: not allowed{hint}; allowed: {', '.join(DTYPES)}")
    if not isinstance(model.get("vocab_size"), int):
        problems.append("model.vocab_size must be given")
    return problems


def _file_problems(folder: Path, found: Plain) -> list[str]:
    """Every file whole, and the weights as many bytes as the network that the config claims has at least."""
    problems = []
    for name in (WEIGHTS, TOKENIZER):
        entry, path = found["files"].get(name), folder / name
        if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int):
            problems.append(f"files: says nothing of {name}")
        elif not path.is_file():
            problems.append(f"incomplete: {name} is missing")
        elif path.stat().st_size != entry["bytes"]:
            problems.append(f"incomplete: {name} has {path.stat().st_size} bytes, {entry['bytes']} were written")
    return problems or _claim_problems(found)


def _claim_problems(found: Plain) -> list[str]:
    try:
        claimed = parameter_count({"model": found["model"], "data": {}}) if "n_head" in found["model"] else 0
    except (KeyError, TypeError):
        return ["model: lacks arguments of its network"]
    size = found["files"][WEIGHTS]["bytes"]
    needed = max(claimed, found["parameters"]) * ITEM_BYTES.get(found["dtype"], 1)
    if needed <= size:
        return []
    return [f"model: a network of this shape needs {needed} bytes in {found['dtype']}, {WEIGHTS} has {size}"]


def stored_config(folder: Path, train: Composer) -> Plain:
    """What evaluate.py and generate build from an export: its network among the defaults of training."""
    return {**train.compose([]).plain, "model": read_export(folder)["model"]}


def export_problems(folder: Path, job: str, words: Sequence[Word], train: Composer) -> list[str]:
    """What an export is not: it holds no data, and one set of weights."""
    typed = {word.key for word in words}
    problems = []
    if job == "export":
        problems.append(f"run={folder}: an export already; give the run it came from, {_origin(folder)}")
    if job == "evaluate" and "data" not in typed:
        choices = "|".join(train.tree.groups["data"])
        problems.append(f"run={folder}: an export holds no data; say what to score: data={choices} ...")
    if "ckpt" in typed:
        problems.append(f"ckpt: run={folder} is an export, which holds one set of weights; leave ckpt out")
    return problems


def _origin(folder: Path) -> str:
    return str(read_export(folder)["origin"]["run"])
