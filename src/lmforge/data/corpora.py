"""From a config's `data` node to its folder of token shards, without importing torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lmforge.config.errors import UsageError
from lmforge.data.head import head_shards
from lmforge.data.hub_source import hub_source
from lmforge.data.mix_sources import mixed_shards
from lmforge.data.prepare import prepare
from lmforge.data.sources import stdlib_source, text_source


def stdlib_shards(data: Mapping[str, Any], **how: Any) -> Path:
    return prepare(stdlib_source(), vocab_size=data["vocab_size"], **how)


def text_shards(data: Mapping[str, Any], **how: Any) -> Path:
    source = text_source(data["path"], data.get("text_key", "text"), data.get("on_bad", "strict"))
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


# By the class that the node's _target_ names. `how` is handed on to prepare(): cache, workers, make.
SHARDS: dict[str, Callable[..., Path]] = {
    "StdlibData": stdlib_shards,
    "TextData": text_shards,
    "hub_data": hub_shards,
    "MixedData": mix_shards,
}


def prepares(data: Mapping[str, Any]) -> bool:
    """Whether the node's kind of data is made from text; `data=tokens` lies ready."""
    return _kind(data) in SHARDS


def shards_of(data: Mapping[str, Any], **how: Any) -> Path:
    """The folder of token shards of a `data` node; prepared first when it is missing and `make` is not false."""
    if not prepares(data):
        raise UsageError(
            f"data: {_kind(data)} holds nothing to prepare; choose data=text, data=stdlib, data=hub or data=mix"
        )
    return SHARDS[_kind(data)](data, **how)


def _kind(data: Mapping[str, Any]) -> str:
    return data["_target_"].rpartition(".")[2]
