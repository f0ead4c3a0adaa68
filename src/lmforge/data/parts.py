"""The heavy work on one part of a spool, in whatever process: signatures for finding near-copies, and tokens."""

from __future__ import annotations

import gzip
import lzma
from functools import lru_cache
from pathlib import Path

import numpy as np

from lmforge.config.aside import opened_aside
from lmforge.data.duplicates import Words, band_keys
from lmforge.data.shards import TOKENIZER, token_dtype
from lmforge.data.split import SPLITS
from lmforge.data.spool import Spool
from lmforge.data.tokenizer import Tokenizer

DROPPED = 255  # the "split" of a document that is left out
# Of each document: tokens, bytes the tokenizer has no token for, bytes of its text as packed by gzip -9 and by xz -9.
COUNTS = np.dtype([("tokens", "<i8"), ("lost", "<i8"), ("gzip", "<i8"), ("xz", "<i8")])
_VAL = SPLITS.index("val")


def sign(folder: Path, part: int) -> int:
    """Writes `bands` (uint64 [bands, documents]) of a part; returns the bytes of text it read."""
    spool = Spool(folder)
    if not spool.has(part, "bands"):
        words = _words()
        keys = [band_keys(words.shingles(text)) for text in spool.texts(part)]
        spool.save(part, "bands", np.ascontiguousarray(np.stack(keys, axis=1)))
    return _bytes(spool, part)


@lru_cache(maxsize=1)
def _words() -> Words:
    return Words()


def encode(folder: Path, part: int, splits: bytes, references: bool) -> int:
    """Writes `tokens` (ids of all kept documents, one after the other) and `counts` of a part.

    `splits` holds one byte a document: its index into SPLITS, or DROPPED. With `references` the documents of val are
    packed too. Returns the bytes of text it read.
    """
    spool = Spool(folder)
    if spool.has(part, "counts"):
        return _bytes(spool, part)
    tokenizer = _tokenizer(folder / TOKENIZER)
    kept = [number for number, split in enumerate(splits) if split != DROPPED]
    counts = np.zeros(len(splits), dtype=COUNTS)
    dtype = token_dtype(tokenizer.size)
    with opened_aside(spool.path(part, "tokens")) as file:
        ids = tokenizer.encode_many(spool.texts(part, kept))
        for number, document in zip(kept, map(tokenizer.document, ids), strict=True):
            file.write(document.astype(dtype).tobytes())
            counts["tokens"][number] = len(document)
    _measure(spool, part, tokenizer, counts, [n for n in kept if references and splits[n] == _VAL], kept)
    spool.save(part, "counts", counts)
    return _bytes(spool, part)


def _measure(
    spool: Spool, part: int, tokenizer: Tokenizer, counts: np.ndarray, val: list[int], kept: list[int]
) -> None:
    missing = list(tokenizer.missing_bytes)
    for number, text in zip(kept, spool.texts(part, kept), strict=True) if missing else ():
        found = np.bincount(np.frombuffer(text.encode("utf-8"), np.uint8), minlength=256)
        counts["lost"][number] = found[missing].sum()
    for number, text in zip(val, spool.texts(part, val), strict=True):
        data = text.encode("utf-8")
        counts["gzip"][number] = len(gzip.compress(data, 9, mtime=0))
        counts["xz"][number] = xz_size(data)


def xz_size(data: bytes) -> int:
    """Bytes that `xz -9` makes of the data. A dictionary no larger than the data gives the same size much faster."""
    dictionary = min(64 << 20, max(4096, 1 << len(data).bit_length()))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": dictionary}]
    return len(lzma.compress(data, lzma.FORMAT_XZ, filters=filters))


@lru_cache(maxsize=1)
def _tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.load(path)


def _bytes(spool: Spool, part: int) -> int:
    return int(spool.load(part, "facts")["bytes"].sum())
