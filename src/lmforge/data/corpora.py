"""From a config's `data` node to its folder of token shards, without importing torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lmforge.data.prepare import prepare
from lmforge.data.sources import stdlib_source, text_source


def stdlib_shards(data: Mapping[str, Any], **how: Any) -> Path:
    return prepare(stdlib_source(), vocab_size=data["vocab_size"], **how)


def text_shards(data: Mapping[str, Any], **how: Any) -> Path:
    source = text_source(data["path"], data["text_key"], data["on_bad"])
    return prepare(source, vocab_size=data["vocab_size"], tokenizer=data["tokenizer"], **how)


def ready_shards(data: Mapping[str, Any], **how: Any) -> Path:
    """Shards that somebody prepared."""
    return Path(data["path"])


# By the class that the node's _target_ names. `how` is handed on to prepare(): cache, workers, make.
SHARDS: dict[str, Callable[..., Path]] = {
    "StdlibData": stdlib_shards,
    "TextData": text_shards,
    "TokenData": ready_shards,
}


def shards_of(data: Mapping[str, Any], **how: Any) -> Path:
    """The folder of token shards of a `data` node; prepared first when it is missing and `make` is not false."""
    return SHARDS[data["_target_"].rpartition(".")[2]](data, **how)
