"""Which document trains and which one judges: decided by a hash of its family, never by a seed, a rank or an order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from lmforge.data.duplicates import Groups

SPLITS = ("train", "val", "test")
_LARGEST_UNIT = 40  # documents; a larger unit would make the validation set a matter of one package
_LARGEST_SHARE = 10  # a unit above one part in this many, of documents or bytes, goes to train too


class _Units(NamedTuple):
    """Documents that stay together: whole families, joined where near-copies link them. In the order of their keys."""

    of_document: np.ndarray  # the unit of each document
    documents: np.ndarray
    sizes: np.ndarray


def family_key(salt: str, family: str) -> bytes:
    """16 bytes that decide where a family goes."""
    return hashlib.sha256(f"{salt}\0{family}".encode(errors="surrogateescape")).digest()[:16]


def split_documents(keys: np.ndarray, groups: np.ndarray, sizes: np.ndarray, val: int, test: int) -> np.ndarray:
    """The split of each document as uint8, an index into SPLITS.

    `keys` (S16) are `family_key`s, `groups` the near-copy labels: neither a family nor a near-copy group is ever cut,
    and both join transitively. `sizes` are bytes. Units in the order of their smallest key go to val until it has `val`
    documents, then to test until it has `test`, the rest and every oversized unit to train. With two units or more both
    train and val have at least one (the smallest unit is taken for val when all are oversized); a single unit goes to
    train as a whole. The same for any order of the documents.
    """
    units = _units(keys, groups, sizes)
    big_count = max(1, min(_LARGEST_UNIT, len(keys) // _LARGEST_SHARE))
    oversized = (units.documents > big_count) | (units.sizes > sizes.sum() / _LARGEST_SHARE)
    chosen = np.zeros(len(units.sizes), dtype=np.uint8)
    free = np.flatnonzero(~oversized)
    before = np.cumsum(units.documents[free]) - units.documents[free]
    in_val = before < val
    in_test = ~in_val & (before - int(units.documents[free][in_val].sum()) < test)
    chosen[free[in_val]], chosen[free[in_test]] = SPLITS.index("val"), SPLITS.index("test")
    if not in_val.any() and len(chosen) > 1:
        chosen[np.argmin(units.sizes)] = SPLITS.index("val")  # of equal ones the first: the smallest key
    return chosen[units.of_document]


def _units(keys: np.ndarray, groups: np.ndarray, sizes: np.ndarray) -> _Units:
    joined = Groups(len(keys))
    joined.unite_equal(keys)
    joined.unite_equal(groups)
    order = np.argsort(keys, kind="stable")
    rank = np.empty(len(keys), dtype=np.int64)
    rank[order] = np.arange(len(keys))
    _, unit = np.unique(joined.labels(), return_inverse=True)
    first = np.full(unit.max(initial=-1) + 1, len(keys))
    np.minimum.at(first, unit, rank)
    place = np.empty(len(first), dtype=np.int64)
    place[np.argsort(first)] = np.arange(len(first))
    of_document = place[unit]
    return _Units(of_document, np.bincount(of_document), np.bincount(of_document, sizes).astype(np.int64))


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


def split_digest(names: Mapping[str, Iterable[str]]) -> str:
    """sha256 of which document name is in which split; one value to compare between ranks and on resume."""
    digest = hashlib.sha256()
    for split in sorted(names):
        for name in names[split]:
            digest.update(f"{split}\0{name}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
