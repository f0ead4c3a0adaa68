"""From text to token shards, done once: the result is cached under the hash of all that decides it.

The key covers every byte of the source, the tokenizer (or how one is trained), the split and this module's version; a
warm call compares and returns. One process prepares while others wait. Documents go through a spool on the disk, so
that memory does not grow with the corpus; a killed preparation leaves its finished parts, which nobody reads but the
next call for the same.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from functools import lru_cache
from pathlib import Path

import numpy as np

from lmforge.config.errors import UsageError
from lmforge.config.plain import hash_of
from lmforge.data import store
from lmforge.data.build import NEAR_COPY, SALT, SAMPLE, build
from lmforge.data.files import SourceFile, Stamps, files_digest
from lmforge.data.shards import VERSION, read_manifest
from lmforge.data.sources import Source
from lmforge.data.tokenizer import SPLIT_PATTERN, Tokenizer, check_vocab_size

log = logging.getLogger(__name__)

RECIPE = 5  # raise when a change here or in the modules used would give other shards


def prepare(
    source: Source,
    *,
    vocab_size: int,
    tokenizer: str | None = None,
    cache: Path,
    workers: int | str = "auto",
    make: bool = True,
) -> Path:
    """The folder of token shards of a source; made in `cache` when it is not there yet.

    With `tokenizer` (path of a byte-level tokenizer.json) `vocab_size` is not used; without, a BPE of at most that
    size is trained on the train split. `workers` processes do the work (`auto`: one for a small corpus, else one a
    core) and change nothing in the result. Logs what it did. Raises UsageError for wrong input, and NotPrepared
    instead of working when `make` is false.
    """
    given = given_tokenizer(tokenizer, vocab_size)
    root = Path(cache) / "tokens"
    before = source.stamps()
    digest = _digest(source, before, root)
    folder = root / f"{source.kind}-{_key(source, digest, vocab_size, given)}"

    def build_now() -> None:
        source.check_unchanged(before)  # since they were hashed; another process may have been waited for
        _make(source, vocab_size, given, folder, digest, workers)

    return store.cached(folder, build_now, make)


def given_tokenizer(path: str | None, vocab_size: int) -> Tokenizer | None:
    if path is None:
        check_vocab_size(vocab_size)
        return None
    try:
        tokenizer = Tokenizer.load(path)
        tokenizer.document(np.empty(0, dtype=np.uint32))
    except UsageError as error:
        raise UsageError(f"data.tokenizer={path}: {error}") from error
    return tokenizer


def _digest(source: Source, now: Stamps, root: Path) -> str:
    """Of everything in the source; asked twice in one process about the same files it does not read them twice."""
    digest = _files_digest(tuple(source.files), tuple(now), root)
    return hashlib.sha256(f"{digest}\0{source.identity}".encode()).hexdigest() if source.identity else digest


@lru_cache(maxsize=8)
def _files_digest(files: tuple[SourceFile, ...], now: object, root: Path) -> str:
    return files_digest(files, root)


def _key(source: Source, digest: str, vocab_size: int, tokenizer: Tokenizer | None) -> str:
    how = [SPLIT_PATTERN, SAMPLE, vocab_size] if tokenizer is None else tokenizer.fingerprint
    decides = [VERSION, RECIPE, SALT, NEAR_COPY, source.kind, digest, how]
    return hash_of(decides)[:16]


def _make(
    source: Source, vocab_size: int, tokenizer: Tokenizer | None, folder: Path, digest: str, workers: int | str
) -> None:
    start = time.perf_counter()
    work = folder.with_name(folder.name + store.WORK)
    again = "going on with what an earlier call finished" if work.exists() else "once"
    log.info("preparing data=%s (%s)", source.kind, again)
    try:
        work.mkdir(exist_ok=True)
        build(source, digest, tokenizer, vocab_size, work, folder, workers)
    except UsageError:
        shutil.rmtree(work, ignore_errors=True)
        raise
    except OSError as error:  # those of the source's own files are UsageErrors by now
        raise store.unwritable(folder.parent, error) from error
    shutil.rmtree(work, ignore_errors=True)
    _report(source, folder, time.perf_counter() - start)


def _report(source: Source, folder: Path, seconds: float) -> None:
    manifest = read_manifest(folder)
    counts = {split: part["documents"] for split, part in manifest["splits"].items()}
    tokens = sum(part["tokens"] for part in manifest["splits"].values())
    log.info(
        "prepared data=%s: %d documents (%s), %d tokens, vocabulary %d, %.1f s, in %s",
        source.kind,
        sum(counts.values()),
        ", ".join(f"{count} {split}" for split, count in counts.items()),
        tokens,
        manifest["vocab_size"],
        seconds,
        folder,
    )
    left_out = {why: count for why, count in manifest["dropped"].items() if count and not why.endswith("_groups")}
    if left_out:
        listed = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        log.info("left out: %s (examples in dropped.json there)", listed)
