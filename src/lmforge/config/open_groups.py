"""Groups of entries that a command line may add to, since their names are the user's own."""

from __future__ import annotations

from typing import Any

from lmforge.config.keys import KEYS

OPEN = ("data.sources",)


def entry_keys(dotted: str) -> list[str]:
    """All keys of the entry of an open group that a key belongs to; none when it belongs to none."""
    group = _group(dotted)
    if group is None:
        return []
    name = dotted.removeprefix(f"{group}.").partition(".")[0]
    return [pattern.replace("*", name) for pattern in KEYS if pattern.startswith(f"{group}.*.")]


def is_open(tree: Any, dotted: str) -> bool:
    """Whether the key lies below an open group that the config holds."""
    group = _group(dotted)
    for part in group.split(".") if group else ():
        tree = tree.get(part) if isinstance(tree, dict) else None
    return group is not None and isinstance(tree, dict)


def _group(dotted: str) -> str | None:
    return next((group for group in OPEN if dotted.startswith(f"{group}.")), None)
