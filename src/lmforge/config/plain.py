"""A config as plain containers: dotted keys, YAML text, OmegaConf and back, the check against the key table."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from lmforge.config.keys import find_key
from lmforge.config.nearest import did_you_mean, nearest_key
from lmforge.config.schema import allowed, coerce

Plain = dict[str, Any]


class PlainLoader(yaml.SafeLoader):
    """No aliases: a few lines of them can stand for gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed in a stored config")
        return super().compose_node(parent, index)


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump_yaml(value: Any) -> str:
    return yaml.dump(value, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True, width=10**6)


def flatten(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf; lists and empty dicts count as leaves."""
    for key, value in node.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{dotted}.")
        elif not isinstance(value, dict):
            yield dotted, value


def hash_of(facts: Any) -> str:
    """sha256 of plain containers; the same facts in another order are others, lists and dicts alike."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def get(node: Any, dotted: str, default: Any = None) -> Any:
    for part in dotted.split("."):
        if not isinstance(node, dict) or part not in node:
            return default
        node = node[part]
    return node


def put(node: Plain, dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    for part in path:
        inner = node.get(part)
        if not isinstance(inner, dict):
            inner = node[part] = {}
        node = inner
    node[last] = value


def to_config(plain: Plain) -> DictConfig:
    """A DictConfig in which every text is literal: `${` in it is never looked up, and unknown keys raise."""
    config = OmegaConf.create(literal(plain))
    OmegaConf.set_struct(config, True)
    return config


def to_plain(config: DictConfig) -> Plain:
    """Resolved plain containers of a config."""
    return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]


def literal(value: Any) -> Any:
    """The same containers with `${` in every text escaped, so that following references once gives the text itself."""
    if isinstance(value, dict):
        return {key: literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)
    return value


def check_schema(plain: Plain, skip: set[str] | None = None) -> dict[str, str]:
    """Gives every leaf its declared type in place. Returns the problems by key."""
    problems: dict[str, str] = {}
    for key, value in list(flatten(plain)):
        if key in (skip or ()):
            continue
        problem = _check_leaf(plain, key, value)
        if problem:
            problems[key] = problem
    return problems


def _check_leaf(plain: Plain, key: str, value: Any) -> str | None:
    line = find_key(key)
    if line is None:
        return f"{key}={value}: unknown key; a new key needs its line in src/lmforge/config/keys.py"
    if value == "???":
        return f"{key} must be given: {allowed(line)}"
    try:
        put(plain, key, coerce(line, value))
    except (ValueError, OverflowError):
        shown = "null" if value is None else value
        hint = did_you_mean(nearest_key(str(value), line.words)) if line.words and isinstance(value, str) else ""
        return f"{key}={shown}: not allowed{hint}; allowed: {allowed(line)}"
    return None
