"""From a config's `data` node to its folder of token shards, without importing torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lmforge.data.head import head_shards
from lmforge.data.hub_source import hub_source
from lmforge.data.mix_sources import mixed_shards
from lmforge.data.prepare import prepare
from lmforge.data.sources import stdlib_source, text_source


def stdlib_shards(data: Mapping[str, Any], **how: Any) -> Path:
    return prepare(stdlib_source(), vocab_size=data["vocab_size"], **how)


def text_shards(data: Mapping[str, Any], **how: Any) -> Path:
    source = text_source(data["path"], data["text_key"], data["on_bad"])
    return prepare(source, vocab_size=data["vocab_size"], tokenizer=data["tokenizer"], **how)


def hub_shards(data: Mapping[str, Any], **how: Any) -> Path:
    """All of a data set, or of one that is streamed what is scored and the tokenizer."""
    make = head_shards if data["streaming"] else hub_prepared
    return make(data, **how)


def hub_prepared(data: Mapping[str, Any], **how: Any) -> Path:
    return prepare(hub_source(data), vocab_size=data["vocab_size"], tokenizer=data["tokenizer"], **how)


def mix_shards(data: Mapping[str, Any], **how: Any) -> Path:
    """The folder of the cache with the shards of all sources."""
    mixed_shards(data, **how)
    return Path(how["cache"]) / "tokens"


def ready_shards(data: Mapping[str, Any], **how: Any) -> Path:
    """Shards that somebody prepared."""
    return Path(data["path"])


# By the class that the node's _target_ names. `how` is handed on to prepare(): cache, workers, make.
SHARDS: dict[str, Callable[..., Path]] = {
    "StdlibData": stdlib_shards,
    "TextData": text_shards,
    "TokenData": ready_shards,
    "hub_data": hub_shards,
    "MixedData": mix_shards,
}


def shards_of(data: Mapping[str, Any], **how: Any) -> Path:
    """The folder of token shards of a `data` node; prepared first when it is missing and `make` is not false."""
    return SHARDS[data["_target_"].rpartition(".")[2]](data, **how)
