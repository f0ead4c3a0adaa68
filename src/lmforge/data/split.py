"""Which document trains and which one judges: decided by a hash of its family, never by a seed, a rank or an order."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from lmforge.data.duplicates import Groups

SPLITS = ("train", "val", "test")
_LARGEST_UNIT = 40  # documents; a larger unit would make the validation set a matter of one package
_LARGEST_SHARE = 10  # a unit above one part in this many, of documents or bytes, goes to train too


class _Unit(NamedTuple):
    """Documents that stay together: whole families, joined where near-copies link them."""

    key: str
    members: list[int]
    size: int


def split_documents(
    names: Sequence[str],
    families: Sequence[str],
    groups: Sequence[Hashable],
    salt: str,
    sizes: Sequence[int] | None = None,
    val: int = 60,
    test: int = 40,
) -> dict[str, list[int]]:
    """Positions of the documents of `train`, `val` and `test`, each sorted by name.

    `groups` holds the near-copy label of each document: neither a family nor a near-copy group is ever cut, and both
    join transitively. `sizes` are bytes (default: all equal). Units in the order of hash(salt, family) go to val until
    it has `val` documents, then to test until it has `test`, the rest and every oversized unit to train. With two
    units or more both train and val have at least one (the smallest unit is taken for val when all are oversized);
    a single unit goes to train as a whole. The same for any order of the input.
    """
    sizes = [1] * len(names) if sizes is None else sizes
    units = sorted(_units(families, groups, salt, sizes))
    big_count = max(1, min(_LARGEST_UNIT, len(names) // _LARGEST_SHARE))
    big_size = sum(sizes) / _LARGEST_SHARE
    chosen: dict[str, list[int]] = {split: [] for split in SPLITS}
    for unit in units:
        oversized = len(unit.members) > big_count or unit.size > big_size
        chosen[_place(chosen, oversized, val, test)].extend(unit.members)
    if not chosen["val"] and len(units) > 1:
        smallest = min(units, key=lambda unit: (unit.size, unit.key))
        chosen["val"] = smallest.members
        chosen["train"] = [i for i in chosen["train"] if i not in set(smallest.members)]
    return {split: sorted(members, key=lambda i: names[i]) for split, members in chosen.items()}


def _place(chosen: dict[str, list[int]], oversized: bool, val: int, test: int) -> str:
    if oversized:
        return "train"
    if len(chosen["val"]) < val:
        return "val"
    return "test" if len(chosen["test"]) < test else "train"


def _units(families: Sequence[str], groups: Sequence[Hashable], salt: str, sizes: Sequence[int]) -> list[_Unit]:
    joined = Groups(len(families))
    for labels in (families, groups):
        first: dict[Hashable, int] = {}
        for position, label in enumerate(labels):
            joined.unite(position, first.setdefault(label, position))
    members: dict[int, list[int]] = {}
    for position, label in enumerate(joined.labels()):
        members.setdefault(label, []).append(position)
    return [
        _Unit(min(_key(salt, families[i]) for i in unit), unit, sum(sizes[i] for i in unit))
        for unit in members.values()
    ]


def _key(salt: str, family: str) -> str:
    return hashlib.sha256(f"{salt}\0{family}".encode(errors="surrogateescape")).hexdigest()


def cut_document(text: str, share: float = 0.9) -> tuple[str, str]:
    """Cuts one text near `share` of its length at a paragraph's end, else a line's, else a word's, else anywhere.

    Both parts hold text unless the whole has fewer than two characters.
    """
    middle = int(len(text) * share)
    low = len(text) // 2
    for mark in ("\n\n", "\n", " "):
        at = text.rfind(mark, low, middle)
        if at > 0 and text[at:].strip():
            return text[: at + len(mark)], text[at + len(mark) :]
    middle = max(1, middle)
    return text[:middle], text[middle:]


def split_digest(split_names: dict[str, Sequence[str]]) -> str:
    """sha256 of which document name is in which split; one value to compare between ranks and on resume."""
    digest = hashlib.sha256()
    for split in sorted(split_names):
        for name in sorted(split_names[split]):
            digest.update(f"{split}\0{name}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
