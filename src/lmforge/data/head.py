"""What a streamed data set needs before its first step: documents to score, and a tokenizer. Made once and cached like
any other shards, with a train split that is empty: its documents are never stored."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lmforge.config.errors import UsageError
from lmforge.config.plain import hash_of
from lmforge.data import store
from lmforge.data.build import SAMPLE
from lmforge.data.documents import Document, Report
from lmforge.data.files import files_digest
from lmforge.data.hub_source import documents, identity, local_files, open_rows
from lmforge.data.prepare import given_tokenizer
from lmforge.data.shards import VERSION, write_shards
from lmforge.data.tokenizer import SPLIT_PATTERN, Tokenizer

log = logging.getLogger(__name__)

RECIPE = 1  # raise when a change here would give another head
HELD_OUT = "held-out.json"


def head_shards(data: Mapping[str, Any], *, cache: Path, make: bool = True, **how: Any) -> Path:
    """The folder with the val split of a streamed data set: `val_documents` of `val_split`, or the first of `split`.

    Without a tokenizer.json in `data.tokenizer` one is trained on the documents that follow, about 4 million
    characters. Raises NotPrepared instead of working when `make` is false.
    """
    given = given_tokenizer(data["tokenizer"], data["vocab_size"])
    root = Path(cache) / "tokens"
    content = [files_digest(local_files(data["name"]), root), identity(data), data["val_split"], data["val_documents"]]
    tokens = [SPLIT_PATTERN, SAMPLE, data["vocab_size"]] if given is None else given.fingerprint
    key = hash_of([VERSION, RECIPE, content, tokens])[:16]
    folder = root / f"head-{key}"
    return store.cached(folder, partial(_make, data, given, folder, hash_of(content)), make)


def text_hash(text: str) -> str:
    """Names a text among those that are held out."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def _make(data: Mapping[str, Any], tokenizer: Tokenizer | None, folder: Path, content: str) -> None:
    log.info("preparing data=hub: the documents to score%s (once)", "" if tokenizer else " and a tokenizer")
    train, count = _read(data, data["split"]), data["val_documents"]
    scored = list(islice(train if data["val_split"] is None else _read(data, data["val_split"]), count))
    held_out = {text_hash(document.text) for document in scored}
    rest = (document for document in train if text_hash(document.text) not in held_out)
    first = next(rest, None)
    if len(scored) < count or first is None:
        raise UsageError(
            f"data.val_documents={count}: {data['name']} has {len(scored)} documents to score"
            f"{' and none is left to train on' if first is None else ''}; give fewer"
        )
    if tokenizer is None:
        tokenizer = Tokenizer.train(_sample(first, rest), data["vocab_size"])
    texts = [document.text for document in scored]
    write_shards(
        folder,
        {"train": [], "val": map(tokenizer.document, tokenizer.encode_many(texts))},
        tokenizer.size,
        tokenizer,
        {"source": "hub", "source_sha256": content, "split_sha256": hash_of(sorted(held_out))},
        {"val": {"bytes": sum(len(text.encode("utf-8")) for text in texts)}},
        names={"val": [document.name for document in scored]},
        beside={HELD_OUT: sorted(held_out)},
    )


def _read(data: Mapping[str, Any], split: str) -> Iterator[Document]:
    chosen = {**data, "split": split}
    return documents(open_rows(chosen), chosen, Report(data["on_bad"] == "lenient"))


def _sample(first: Document, rest: Iterator[Document]) -> Iterator[str]:
    """Documents until they hold SAMPLE characters."""
    characters, document = 0, first
    while characters < SAMPLE and document is not None:
        yield document.text
        characters += len(document.text)
        document = next(rest, None)  # type: ignore[assignment]
