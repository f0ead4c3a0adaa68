"""One tokenizer for all sources of a mixture, and their folders of token shards."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from lmforge.config.errors import UsageError
from lmforge.data.prepare import SAMPLE, prepare_text
from lmforge.data.shards import TokenShards, read_manifest
from lmforge.data.tokenizer import MIN_SIZE, Tokenizer

_BLOCK = 1 << 14  # bytes

log = logging.getLogger(__name__)


def one_tokenizer(
    paths: Mapping[str, str], counts: Mapping[str, int], vocab_size: int, tokenizer: str | None, cache: Path
) -> dict[str, Path]:
    """A folder of token shards for each source; text is prepared with the tokenizer that the others have.

    That is `tokenizer`, a file; else that of the sources that are shards already; else one of at most `vocab_size`
    tokens, learnt from train text of all sources by their weights. Raises UsageError when they do not share it.
    """
    ready = {name: Path(path) for name, path in paths.items() if (Path(path) / "manifest.json").is_file()}
    check_same(ready, tokenizer)
    texts = {name: path for name, path in paths.items() if name not in ready}
    if texts and tokenizer is None:
        tokenizer = _of_shards(ready) if ready else _learnt(texts, counts, vocab_size, cache)
    made = {name: _prepared(name, path, vocab_size, tokenizer, cache) for name, path in texts.items()}
    return {name: ready.get(name) or made[name] for name in paths}


def _prepared(name: str, path: str, vocab_size: int, tokenizer: str | None, cache: Path) -> Path:
    try:
        return prepare_text(path, vocab_size, tokenizer, cache)
    except UsageError as error:
        own = f"data.sources.{name}.path"
        raise UsageError([problem.replace("data.path", own) for problem in error.problems]) from error


def check_same(ready: Mapping[str, Path], tokenizer: str | None) -> None:
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


def _learnt(texts: Mapping[str, str], counts: Mapping[str, int], vocab_size: int, cache: Path) -> str:
    """The file of a tokenizer learnt once from the sources' train text, kept under the hash of all that decides it.

    Shards of bare bytes come first: they settle what is train text, for each source by itself as always.
    """
    bytes_of = {name: _prepared(name, path, MIN_SIZE, None, cache) for name, path in texts.items()}
    keys = {name: [folder.name, counts[name]] for name, folder in bytes_of.items()}
    key = hashlib.sha256(json.dumps([SAMPLE, vocab_size, keys]).encode()).hexdigest()[:16]
    file = cache / "tokenizers" / f"mix-{key}.json"
    if not file.is_file():
        log.info("learning one tokenizer for %s (once)", ", ".join(texts))
        total = sum(counts[name] for name in texts)
        sample = [t for name, f in bytes_of.items() for t in _sample(f, int(SAMPLE * counts[name] / total))]
        file.parent.mkdir(parents=True, exist_ok=True)
        _keep(Tokenizer.train(sample, vocab_size), file)
    return str(file)


def _sample(folder: Path, size: int) -> list[str]:
    """About `size` bytes of train text in blocks spread evenly over it; all of it when it is smaller."""
    train, tokenizer = TokenShards.open(folder, "train"), Tokenizer.load(folder / "tokenizer.json")
    share = min(1.0, size / max(1, train.n_tokens))
    starts = [i * _BLOCK for i in range(-(-train.n_tokens // _BLOCK)) if int((i + 1) * share) > int(i * share)]
    blocks = (train.tokens(at, min(at + _BLOCK, train.n_tokens)) for at in starts)
    return [tokenizer.decode(block).strip("\ufffd") for block in blocks]  # a cut may go through a character


def _keep(tokenizer: Tokenizer, file: Path) -> None:
    """Whole or not there, also when two processes learn the same one at once."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    tokenizer.save(aside)
    aside.rename(file)
