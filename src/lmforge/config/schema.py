"""What a config key may hold: its kind and limits, in words for messages, and values brought to its own type."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["int", "float", "number", "bool", "text", "path", "name", "node"]
OnResume = Literal["free", "logged", "refused"]

SAFE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


@dataclass(frozen=True)
class Key:
    """One key. `number` keeps int and float apart (steps or a share); `path` is text whose `\\=` means `=`.

    resume: what a changed value does to a stored run: `free` = taken, `logged` = taken and reported, `refused`.
    """

    kind: Kind
    low: float | None = None
    high: float | None = None
    above: float | None = None  # exclusive lower limit
    below: float | None = None  # exclusive upper limit
    words: tuple[str, ...] = ()  # text values allowed (for text: the only ones; for numbers: beside the numbers)
    known: tuple[str, ...] = ()  # text values let through for a check that says why they cannot be
    nullable: bool = False
    many: Literal["no", "also", "always"] = "no"  # a list: never, beside a single value, or always
    length: int | None = None
    resume: OnResume = "refused"


def allowed(key: Key) -> str:
    """The values a key takes, in words."""
    if key.kind in ("text", "path", "name", "node"):
        base = "one of " + ", ".join(key.words) if key.words else _TEXTS[key.kind]
    elif key.kind == "bool":
        base = "true or false"
    else:
        base = _TEXTS[key.kind] + _limits(key)
        base += "".join(f", or {word}" for word in key.words)
    if key.many != "no":
        size = f"{key.length} " if key.length else ""
        base = f"a list of {size}values, each {base}" if key.many == "always" else f"{base}, or a list of such numbers"
    return base + (", or null" if key.nullable else "")


_TEXTS = {
    "int": "a whole number",
    "float": "a number",
    "number": "a number",
    "text": "text",
    "path": "a path",
    "name": "a name of letters, digits, '.', '_' and '-'",
    "node": "an entry of its own keys",
}


def _limits(key: Key) -> str:
    signs = [("of at least", key.low), ("above", key.above), ("of at most", key.high), ("below", key.below)]
    said = [
        f"{sign} {limit:g}" if abs(limit) < 1e6 else f"{sign} {limit:.0f}" for sign, limit in signs if limit is not None
    ]
    return " " + " and ".join(said) if said else ""


def coerce(key: Key, value: Any) -> Any:
    """`value` as the key's own type (1e-4 given as text becomes 0.0001). Raises ValueError when it does not fit."""
    if value is None:
        if key.nullable:
            return None
        raise ValueError
    if isinstance(value, (list, tuple)):
        return _coerce_list(key, list(value))
    if key.many == "always":
        raise ValueError
    return _coerce_one(key, value)


def _coerce_list(key: Key, values: list[Any]) -> list[Any]:
    wrong_size = not values or (key.length is not None and len(values) != key.length)
    if key.many == "no" or wrong_size:
        raise ValueError
    return [_coerce_one(replace(key, words=()), value) for value in values]


def _coerce_one(key: Key, value: Any) -> Any:
    if isinstance(value, dict):
        raise ValueError
    if key.kind == "bool":
        if not isinstance(value, bool):
            raise ValueError
        return value
    if key.kind in ("text", "path", "name", "node"):
        return _text(key, value)
    if isinstance(value, str) and value in key.words:
        return value
    return _number(key, value)


def _text(key: Key, value: Any) -> str:
    import re

    value = str(value).lower() if isinstance(value, bool) else str(value)
    bad_name = key.kind == "name" and not re.fullmatch(SAFE_NAME, value)
    if key.kind == "node" or bad_name or (key.words and value not in key.words + key.known):
        raise ValueError
    return value


def _number(key: Key, value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    if isinstance(value, str):
        value = int(value) if value.lstrip("+-").isdigit() else float(value)
    if not math.isfinite(value):
        raise ValueError
    if key.kind == "int":
        if value != int(value):
            raise ValueError
        value = int(value)
    if key.kind == "float":
        value = float(value)
    if not _inside(key, value):
        raise ValueError
    return value


def _inside(key: Key, value: float) -> bool:
    return (
        (key.low is None or value >= key.low)
        and (key.high is None or value <= key.high)
        and (key.above is None or value > key.above)
        and (key.below is None or value < key.below)
    )
