"""From text to token shards, done once: the result is cached under the hash of all that decides it.

The key covers every byte of the source, the tokenizer (or how one is trained), the split and this module's version, so
a warm call reads the source, compares and returns. One process prepares while others wait; a killed preparation leaves
a `.partial` folder that nobody reads and the next one removes. Documents are held in memory while they are prepared.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import logging
import lzma
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lmforge.config.errors import UsageError
from lmforge.data.duplicates import first_copies, near_duplicates, text_digest
from lmforge.data.shards import VERSION, TokenShards, read_manifest, write_shards
from lmforge.data.sources import (
    Document,
    SourceFile,
    files_digest,
    stdlib_documents,
    stdlib_family,
    stdlib_files,
    text_documents,
    text_files,
)
from lmforge.data.split import SPLITS, cut_document, split_digest, split_documents
from lmforge.data.tokenizer import SPLIT_PATTERN, Tokenizer, check_vocab_size

log = logging.getLogger(__name__)

RECIPE = 3  # raise when a change here or in the modules used would give other shards
SALT = "lmforge/split"  # the name stays: another would split the same text anew
NEAR_COPY = 0.4  # Jaccard of five-word runs
SAMPLE = 4_000_000  # characters of the train split the BPE learns from
_BLOCK = 1 << 14
_COMPRESS_LIMIT = 64 << 20  # bytes of validation text above which the gzip and xz references are left out
_VERIFY_LIMIT = 64 << 20  # bytes of shards up to which a warm call compares their sha256 too, not only their sizes


@dataclass(frozen=True)
class _Source:
    kind: str
    files: list[SourceFile]
    read: Callable[[Counter[str]], Iterable[Document]]
    family: Callable[[Document], str]
    targets: Callable[[int], tuple[int, int]]  # number of documents -> wanted in val, in test
    keep_copies: bool = True  # near-copies stay (in one split); a user's text is not thinned without being asked


def prepare_stdlib(vocab_size: int, cache: Path) -> Path:
    """The folder of token shards of this Python's standard library; made in `cache` when it is not there yet.

    Split by top-level package; documents are the files, of near-copies (most of `encodings/`) the first alone: the
    others would be an eighth of the train text and teach nothing. Logs one line when it had to work.
    """
    source = _Source(
        "stdlib",
        stdlib_files(),
        stdlib_documents,
        lambda document: stdlib_family(document.name),
        lambda n: (60, 10),
        keep_copies=False,
    )
    return _prepare(source, vocab_size, None, cache)


def prepare_text(pattern: str, vocab_size: int, tokenizer: str | None, cache: Path) -> Path:
    """The folder of token shards of a user's files (see `sources.text_documents` for `pattern`).

    With `tokenizer` (path of a byte-level tokenizer.json) `vocab_size` is not used; without, a BPE of at most that
    size is trained. Each document is its own family unless it has near-copies; a single document is cut.
    """
    source = _Source(
        "text",
        text_files(pattern),
        partial(text_documents, pattern),
        lambda document: text_digest(document.text).hex(),  # not the name: renaming a file moves nothing
        _text_targets,
    )
    return _prepare(source, vocab_size, tokenizer, cache)


def _text_targets(n: int) -> tuple[int, int]:
    return min(max(60, n // 200), max(1, n // 10)), min(max(40, n // 300), n // 20)


def _prepare(source: _Source, vocab_size: int, tokenizer_path: str | None, cache: Path) -> Path:
    tokenizer = _given_tokenizer(tokenizer_path, vocab_size)
    digest = files_digest(source.files)
    how = [SPLIT_PATTERN, SAMPLE, vocab_size] if tokenizer is None else tokenizer.fingerprint
    decides = [VERSION, RECIPE, SALT, NEAR_COPY, source.kind, digest, how]
    key = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]
    root = Path(cache) / "tokens"
    folder = root / f"{source.kind}-{key}"
    if _is_whole(folder):
        return folder
    with _locked(root, folder.name):
        if not _is_whole(folder):
            log.info("preparing data=%s (once; some seconds)", source.kind)
            _remove_leftovers(root)
            _build(source, vocab_size, tokenizer, folder, digest)
    return folder


def _given_tokenizer(path: str | None, vocab_size: int) -> Tokenizer | None:
    if path is None:
        check_vocab_size(vocab_size)
        return None
    try:
        tokenizer = Tokenizer.load(path)
        tokenizer.document(np.empty(0, dtype=np.uint32))
    except UsageError as error:
        raise UsageError(f"data.tokenizer={path}: {error}") from error
    return tokenizer


def _is_whole(folder: Path) -> bool:
    """Whether the folder holds shards that fit their manifest; a damaged one is made again."""
    if not folder.exists():
        return False
    try:
        splits = [TokenShards.open(folder, split) for split in read_manifest(folder)["splits"]]
        if sum(path.stat().st_size for path in folder.glob("*.tokens")) <= _VERIFY_LIMIT:
            for split in splits:
                split.verify()
    except (UsageError, KeyError) as error:
        log.warning("the cached shards are prepared again: %s", error)
        return False
    return True


@contextmanager
def _locked(root: Path, name: str) -> Iterator[None]:
    """Holds the lock of one folder; waits for a process that prepares the same."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = (root / f"{name}.lock").open("w")
    except OSError as error:
        raise UsageError(f"paths.cache: cannot write in {root} ({error.strerror}); set paths.cache=FOLDER") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that prepares %s", root / name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(root: Path) -> None:
    """Removes what killed preparations left: partial folders whose lock nobody holds."""
    for leftover in root.glob("*.partial"):
        with (root / f"{leftover.stem}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(leftover, ignore_errors=True)


def _build(source: _Source, vocab_size: int, tokenizer: Tokenizer | None, folder: Path, digest: str) -> None:
    start = time.perf_counter()
    skipped: Counter[str] = Counter()
    read = list(source.read(skipped))
    if not read:
        raise UsageError(f"data={source.kind}: no document with text in {len(source.files)} files")
    kept, groups = first_copies(document.text for document in read)
    documents = [read[i] for i in kept]
    facts: dict[str, Any] = {
        "source": source.kind,
        "source_sha256": digest,
        "content_sha256": hashlib.sha256(b"".join(text_digest(d.text) for d in documents)).hexdigest(),
        "dropped": dict(skipped) | {"exact_duplicates": len(read) - len(kept), "exact_duplicate_groups": groups},
    }
    splits = _split(source, documents, facts)
    if files_digest(source.files) != digest:
        raise UsageError(f"data={source.kind}: the files changed while they were read; start again")
    tokenizer = tokenizer or Tokenizer.train(_sample([d.text for d in splits["train"]]), vocab_size)
    _write(splits, tokenizer, folder, facts)
    _report(source, folder, time.perf_counter() - start)


def _split(source: _Source, documents: list[Document], facts: dict[str, Any]) -> dict[str, list[Document]]:
    """Documents per split; adds what the manifest says about near-copies and the split to `facts`."""
    labels = near_duplicates([d.text for d in documents], NEAR_COPY)
    members = Counter(labels)
    copies = [count for count in members.values() if count > 1]
    facts["near_duplicates"] = {"documents": sum(copies), "groups": len(copies), "jaccard": NEAR_COPY}
    if not source.keep_copies:
        first = [i for i, label in enumerate(labels) if labels.index(label) == i]
        facts["dropped"]["near_copies"] = len(documents) - len(first)
        documents, labels = [documents[i] for i in first], [labels[i] for i in first]
    families = [source.family(d) for d in documents]
    sizes = [len(d.text.encode("utf-8")) for d in documents]
    val, test = source.targets(len(documents))
    positions = split_documents([d.name for d in documents], families, labels, SALT, sizes, val, test)
    splits = {split: [documents[i] for i in positions[split]] for split in SPLITS}
    facts["split_rule"] = f"whole families by hash, salt {SALT}"
    if not splits["val"]:
        splits = _cut_first(documents, facts)
    facts["split_sha256"] = split_digest({split: [d.name for d in part] for split, part in splits.items()})
    return splits


def _cut_first(documents: list[Document], facts: dict[str, Any]) -> dict[str, list[Document]]:
    """With one document, or only near-copies of one, the first is cut in two and the others are dropped."""
    name, text = documents[0]
    head, tail = cut_document(text)
    if not (head.strip() and tail.strip()):
        raise UsageError(f"data: the only document, {name}, is too short to be cut into train and validation")
    facts["split_rule"] = f"the only document, {name}, cut at character {len(head)} of {len(text)}"
    facts["dropped"]["near_copies_of_the_only_document"] = len(documents) - 1
    log.warning("data: %s", facts["split_rule"])
    return {
        "train": [Document(f"{name}[:{len(head)}]", head)],
        "val": [Document(f"{name}[{len(head)}:]", tail)],
        "test": [],
    }


def _sample(texts: Sequence[str]) -> list[str]:
    """About SAMPLE characters in blocks spread evenly over the texts; all of them when they are fewer."""
    share = min(1.0, SAMPLE / max(1, sum(map(len, texts))))
    blocks = (text[at : at + _BLOCK] for text in texts for at in range(0, len(text), _BLOCK))
    return [block for i, block in enumerate(blocks) if int((i + 1) * share) > int(i * share)]


def _write(splits: dict[str, list[Document]], tokenizer: Tokenizer, folder: Path, facts: dict[str, Any]) -> None:
    texts = {split: [d.text for d in part] for split, part in splits.items()}
    if lost := _bytes_without_token(texts.values(), tokenizer):
        log.warning("data: the tokenizer has no token for %d bytes of the text; they are lost", lost)
    facts["dropped"]["bytes_without_token"] = lost
    facts |= _compression([text.encode("utf-8") for text in texts["val"]])
    write_shards(
        folder,
        {split: map(tokenizer.document, tokenizer.encode_many(part)) for split, part in texts.items()},
        tokenizer.size,
        tokenizer,
        facts,
        {split: {"bytes": sum(len(text.encode("utf-8")) for text in part)} for split, part in texts.items()},
        names={split: [d.name for d in part] for split, part in splits.items()},
    )


def _bytes_without_token(parts: Iterable[Sequence[str]], tokenizer: Tokenizer) -> int:
    missing = list(tokenizer.missing_bytes)
    if not missing:
        return 0
    counts = sum(
        np.bincount(np.frombuffer(text.encode("utf-8"), np.uint8), minlength=256) for part in parts for text in part
    )
    return int(np.asarray(counts)[missing].sum())


def _compression(files: Sequence[bytes]) -> dict[str, float | None]:
    """Bits per byte of gzip -9 and xz -9, each file compressed alone, summed over files; None for very much text."""
    total = sum(map(len, files))
    if total > _COMPRESS_LIMIT:
        return {"gzip_bits_per_byte": None, "xz_bits_per_byte": None}
    gzipped = sum(len(gzip.compress(data, 9, mtime=0)) for data in files)
    return {"gzip_bits_per_byte": 8 * gzipped / total, "xz_bits_per_byte": 8 * sum(map(xz_size, files)) / total}


def xz_size(data: bytes) -> int:
    """Bytes that `xz -9` makes of the data. A dictionary no larger than the data gives the same size much faster."""
    dictionary = min(64 << 20, max(4096, 1 << len(data).bit_length()))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": dictionary}]
    return len(lzma.compress(data, lzma.FORMAT_XZ, filters=filters))


def _report(source: _Source, folder: Path, seconds: float) -> None:
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
