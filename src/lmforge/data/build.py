"""The stages of a preparation: read into a spool and sign, decide about copies and splits, tokenise, write shards."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lmforge.config.errors import UsageError
from lmforge.data.documents import Document, Report
from lmforge.data.duplicates import Bands, Words, first_copies, near_duplicates
from lmforge.data.meter import Meter, meter
from lmforge.data.parts import DROPPED, encode, sign
from lmforge.data.pool import Pool, pool
from lmforge.data.shards import TOKENIZER, token_dtype, write_shards
from lmforge.data.sources import Source
from lmforge.data.split import SPLITS, cut_document, family_key, split_digest, split_documents
from lmforge.data.spool import Spool
from lmforge.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SALT = "lmforge/split"  # the name stays: another would split the same text anew
NEAR_COPY = 0.4  # Jaccard of five-word runs
SAMPLE = 4_000_000  # characters of the train split the BPE learns from
REPORT = "dropped.json"
_BLOCK = 1 << 14
_COMPRESS_LIMIT = 64 << 20  # bytes of validation text above which the gzip and xz references are left out


class _Decided(NamedTuple):
    """What is to be written: the spool, one split a document (or DROPPED), and what the manifest says."""

    spool: Spool
    splits: np.ndarray
    facts: dict[str, Any]


def build(
    source: Source,
    digest: str,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    work: Path,
    folder: Path,
    workers: int | str,
) -> None:
    """Prepares `source` in the folder `work`, goes on with what an earlier call left there, and writes `folder`."""
    with meter() as shown, pool(workers, source.size) as processes:
        spool = Spool(work)
        _read(source, spool, processes, shown)
        shown.stage("comparing", 0)
        decided = _decide(source, spool, {"source": source.kind, "source_sha256": digest})
        tokenizer = _save_tokenizer(decided, tokenizer, vocab_size)
        _encode(decided, processes, shown)
    _write(decided, tokenizer, folder)


def _read(source: Source, spool: Spool, processes: Pool, shown: Meter) -> None:
    """Fills the spool, and signs its parts while it grows."""
    parts: Iterable[int] = range(spool.parts) if spool.is_read else _spooled(source, spool, shown)
    signed = 0
    for size in processes.map(sign, ((spool.folder, part) for part in parts)):
        signed += size
        shown.show(signed)


def _spooled(source: Source, spool: Spool, shown: Meter) -> Iterator[int]:
    before, report = source.stamps(), Report(source.lenient)

    def notes() -> dict[str, Any]:
        return {"dropped": report.counts, "bad_rows": report.bad_rows}

    def watched() -> Iterator[Document]:
        for document in source.read(report):
            shown.show(report.position())
            yield document
        source.check_unchanged(before)

    shown.stage("reading", source.size)
    yield from spool.write(watched(), lambda document: family_key(SALT, source.family(document)), notes)
    if not spool.parts:
        left_out = ", ".join(f"{count} {why}" for why, count in report.counts.items())
        raise UsageError(f"data={source.kind}: no document with text (left out: {left_out or 'nothing'})")
    shown.stage("signing", int(spool.facts["bytes"].sum()))


def _decide(source: Source, spool: Spool, facts: dict[str, Any]) -> _Decided:
    """Drops copies and places every other document in a split."""
    kept, groups = first_copies(spool.facts["digest"])
    facts["content_sha256"] = hashlib.sha256(spool.facts["digest"][kept].tobytes()).hexdigest()
    copies = {"exact_duplicates": len(spool.facts) - len(kept), "exact_duplicate_groups": groups}
    facts["dropped"] = {**spool.done["dropped"], **copies}
    facts["bad_rows"] = spool.done["bad_rows"]
    labels = _near_copies(spool, kept)
    members = np.unique(labels, return_counts=True)[1]
    copied = members[members > 1]
    facts["near_duplicates"] = {"documents": int(copied.sum()), "groups": len(copied), "jaccard": NEAR_COPY}
    if not source.keep_copies:
        first = labels == np.arange(len(labels))
        facts["dropped"]["near_copies"] = int((~first).sum())
        kept, labels = kept[first], labels[first]
    splits = np.full(len(spool.facts), DROPPED, dtype=np.uint8)
    chosen = spool.facts[kept]
    splits[kept] = split_documents(chosen["key"], labels, chosen["bytes"], *source.targets(len(kept)))
    facts["split_rule"] = f"whole families by hash, salt {SALT}"
    decided = _Decided(spool, splits, facts)
    return decided if SPLITS.index("val") in splits[kept] else _cut_first(decided, int(kept[0]), len(kept))


def _near_copies(spool: Spool, kept: np.ndarray) -> np.ndarray:
    words = Words()

    def keys(band: int) -> np.ndarray:
        return np.concatenate([spool.load(part, "bands", mapped=True)[band] for part in range(spool.parts)])[kept]

    return near_duplicates(len(kept), Bands(keys, lambda i: words.shingles(spool.text(int(kept[i])))), NEAR_COPY)


def _cut_first(decided: _Decided, position: int, documents: int) -> _Decided:
    """With one document, or only near-copies of one, the first is cut in two and the others are dropped."""
    spool, _, facts = decided
    name, text = spool.name(position), spool.text(position)
    head, tail = cut_document(text)
    if not (head.strip() and tail.strip()):
        raise UsageError(f"data: the only document, {name}, is too short to be cut into train and validation")
    facts["split_rule"] = f"the only document, {name}, cut at character {len(head)} of {len(text)}"
    facts["dropped"]["near_copies_of_the_only_document"] = documents - 1
    log.warning("data: %s", facts["split_rule"])
    halves = Spool(spool.folder / "halves")
    halves.folder.mkdir(exist_ok=True)
    parts = [Document(f"{name}[:{len(head)}]", head), Document(f"{name}[{len(head)}:]", tail)]
    list(halves.write(parts, lambda half: b""))
    return _Decided(halves, np.array([SPLITS.index("train"), SPLITS.index("val")], dtype=np.uint8), facts)


def _save_tokenizer(decided: _Decided, tokenizer: Tokenizer | None, vocab_size: int) -> Tokenizer:
    """The given one, or one trained on the train split; where the workers find it."""
    path = decided.spool.folder / TOKENIZER
    if tokenizer is None:
        train = np.flatnonzero(decided.splits == SPLITS.index("train"))
        tokenizer = Tokenizer.train(sample(decided.spool, train), vocab_size)
    tokenizer.save(path)
    return tokenizer


def sample(spool: Spool, positions: np.ndarray) -> Iterator[str]:
    """About SAMPLE characters in blocks spread evenly over the documents; all of them when they are fewer."""
    characters = spool.facts["characters"][positions]
    blocks = -(-characters // _BLOCK)
    share = min(1.0, SAMPLE / max(1, int(characters.sum())))
    number = np.arange(int(blocks.sum()))
    chosen = number[((number + 1) * share).astype(np.int64) > (number * share).astype(np.int64)]
    ends = np.cumsum(blocks)
    owners = np.searchsorted(ends, chosen, side="right")
    for owner in np.unique(owners):
        text = spool.text(int(positions[owner]))
        for block in chosen[owners == owner] - (ends[owner] - blocks[owner]):
            yield text[int(block) * _BLOCK : (int(block) + 1) * _BLOCK]


def _encode(decided: _Decided, processes: Pool, shown: Meter) -> None:
    spool, splits, facts = decided
    val = int(spool.facts["bytes"][splits == SPLITS.index("val")].sum())
    calls = (
        (spool.folder, part, splits[spool.starts[part] : spool.starts[part + 1]].tobytes(), val <= _COMPRESS_LIMIT)
        for part in range(spool.parts)
    )
    done = 0
    shown.stage("tokenising", int(spool.facts["bytes"].sum()))
    for size in processes.map(encode, calls):
        done += size
        shown.show(done)
    counts = np.concatenate([spool.load(part, "counts") for part in range(spool.parts)])
    if lost := int(counts["lost"].sum()):
        log.warning("data: the tokenizer has no token for %d bytes of the text; they are lost", lost)
    facts["dropped"]["bytes_without_token"] = lost
    for packer in ("gzip", "xz"):
        facts[f"{packer}_bits_per_byte"] = 8 * int(counts[packer].sum()) / val if val <= _COMPRESS_LIMIT else None


def _write(decided: _Decided, tokenizer: Tokenizer, folder: Path) -> None:
    spool, splits, facts = decided
    facts["split_sha256"] = split_digest(_each(lambda split: _names(spool, splits, split)))
    write_shards(
        folder,
        _each(lambda split: _tokens(spool, splits, split, token_dtype(tokenizer.size))),
        tokenizer.size,
        tokenizer,
        facts,
        _each(lambda split: {"bytes": int(spool.facts["bytes"][splits == split].sum())}),
        names=_each(lambda split: _names(spool, splits, split)),
        beside={REPORT: {"dropped": facts["dropped"], "bad_rows": facts["bad_rows"]}},
    )


def _each(make: Callable[[int], Any]) -> dict[str, Any]:
    return {split: make(number) for number, split in enumerate(SPLITS)}


def _names(spool: Spool, splits: np.ndarray, split: int) -> Iterator[str]:
    for part in range(spool.parts):
        here = splits[spool.starts[part] : spool.starts[part + 1]]
        if split in here:
            names = spool.names(part)
            yield from (names[number] for number in np.flatnonzero(here == split))


def _tokens(spool: Spool, splits: np.ndarray, split: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    for part in range(spool.parts):
        here = splits[spool.starts[part] : spool.starts[part + 1]]
        if split not in here:
            continue
        ends = np.cumsum(spool.load(part, "counts")["tokens"])
        ids = np.fromfile(spool.path(part, "tokens"), dtype=dtype)
        for number in np.flatnonzero(here == split):
            yield ids[ends[number - 1] if number else 0 : ends[number]]
