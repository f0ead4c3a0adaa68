"""One tokenizer for all sources of a mixture, and their folders of token shards."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmforge.config.errors import UsageError
from lmforge.config.mixture import cycle_counts, switched_on
from lmforge.config.plain import hash_of
from lmforge.data import store
from lmforge.data.build import SAMPLE
from lmforge.data.hub_source import hub_source
from lmforge.data.prepare import prepare
from lmforge.data.shards import TokenShards, read_manifest, write_shards
from lmforge.data.sources import Source, text_source
from lmforge.data.tokenizer import MIN_SIZE, Tokenizer

log = logging.getLogger(__name__)

_BLOCK = 1 << 14  # bytes
# The words of a source in a message, and no file's name.
_KEY = re.compile(r"(?<!\S)data\.((?:path|name|text_key|on_bad|config|split|revision)\b)")
Entry = Mapping[str, Any]


def mixed_shards(data: Mapping[str, Any], cache: Path, **how: Any) -> dict[str, Path]:
    """A folder of token shards for each source of a `data=mix` node, by name; text is prepared with the tokenizer that
    the others have.

    That is `data.tokenizer`, a file; else that of the sources that are shards already; else one of at most
    `data.vocab_size` tokens, learnt from train text of all sources by their weights. Raises UsageError when they do
    not share it. `how` is handed on to `prepare`.
    """
    entries, tokenizer = switched_on(data["sources"]), data["tokenizer"]
    ready = {name: Path(entry["path"]) for name, entry in entries.items() if _is_shards(entry)}
    _check_same(ready, tokenizer)
    texts = {name: entry for name, entry in entries.items() if name not in ready}
    if texts and tokenizer is None:
        counts = cycle_counts({name: entry["weight"] for name, entry in entries.items()})
        tokenizer = _of_shards(ready) if ready else _learnt(texts, counts, data["vocab_size"], cache, **how)
    options = {"vocab_size": data["vocab_size"], "tokenizer": tokenizer, "cache": cache, **how}
    made = {name: _prepared(name, entry, **options) for name, entry in texts.items()}
    return {name: ready.get(name) or made[name] for name in entries}


def _is_shards(entry: Entry) -> bool:
    return entry.get("path") is not None and (Path(entry["path"]) / "manifest.json").is_file()


def _prepared(name: str, entry: Entry, **options: Any) -> Path:
    try:
        return prepare(_source(entry), **options)
    except UsageError as error:
        raise UsageError([_KEY.sub(rf"data.sources.{name}.\1", problem) for problem in error.problems]) from error


def _source(entry: Entry) -> Source:
    how = {"text_key": entry.get("text_key", "text"), "on_bad": entry.get("on_bad", "strict")}
    if entry.get("path") is not None:
        return text_source(entry["path"], **how)
    return hub_source({"config": None, "split": "train", "revision": None, **entry, **how})


def _check_same(ready: Mapping[str, Path], tokenizer: str | None) -> None:
    """Raises UsageError naming both hashes when shards were made with different tokenizers, or not with the given."""
    known = {f"data.sources.{name}.path={folder}": _hash(folder) for name, folder in ready.items()}
    if tokenizer is not None:
        known = {f"data.tokenizer={tokenizer}": Tokenizer.load(tokenizer).fingerprint, **known}
    first = next(iter(known), "")
    for other, found in known.items():
        if found != known[first]:
            raise UsageError(
                f"{other} was made with tokenizer {found or 'unknown'}, but {first} with {known[first] or 'unknown'}; "
                "ids would mean different text: prepare them with one tokenizer"
            )


def _hash(folder: Path) -> str | None:
    return (read_manifest(folder).get("tokenizer") or {}).get("sha256")


def _of_shards(ready: Mapping[str, Path]) -> str:
    name, folder = next(iter(ready.items()))
    if _hash(folder) is None:
        raise UsageError(
            f"data.sources.{name}.path={folder}: these shards have no tokenizer.json, so no text can be mixed with "
            "them; shards alone can, or text alone"
        )
    return str(folder / "tokenizer.json")


def _learnt(texts: Mapping[str, Entry], counts: Mapping[str, int], vocab_size: int, cache: Path, **how: Any) -> str:
    """The file of a tokenizer learnt once from the sources' train text, kept under the hash of all that decides it in a
    folder like that of shards.

    Shards of bare bytes come first: they settle what is train text, for each source by itself as always.
    """
    options = {"vocab_size": MIN_SIZE, "tokenizer": None, "cache": cache, **how}
    bytes_of = {name: _prepared(name, entry, **options) for name, entry in texts.items()}
    keys = {name: [folder.name, counts[name]] for name, folder in bytes_of.items()}
    key = hash_of([SAMPLE, vocab_size, keys])[:16]
    folder = cache / "tokens" / f"tokenizer-{key}"

    def learn() -> None:
        log.info("learning one tokenizer for %s (once)", ", ".join(texts))
        shares = {name: counts[name] / sum(counts[other] for other in texts) for name in texts}
        sample = [text for name, f in bytes_of.items() for text in _sample(f, int(SAMPLE * shares[name]))]
        tokenizer = Tokenizer.train(sample, vocab_size)
        write_shards(folder, {}, tokenizer.size, tokenizer)

    return str(store.cached(folder, learn, how.get("make", True)) / "tokenizer.json")


def _sample(folder: Path, size: int) -> list[str]:
    """About `size` bytes of train text in blocks spread evenly over it; all of it when it is smaller."""
    train, tokenizer = TokenShards.open(folder, "train"), Tokenizer.load(folder / "tokenizer.json")
    share = min(1.0, size / max(1, train.n_tokens))
    starts = [i * _BLOCK for i in range(-(-train.n_tokens // _BLOCK)) if int((i + 1) * share) > int(i * share)]
    blocks = (train.tokens(at, min(at + _BLOCK, train.n_tokens)) for at in starts)
    return [tokenizer.decode(block).strip("\ufffd") for block in blocks]  # a cut may go through a character
