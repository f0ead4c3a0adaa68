"""What the files of a folder of token shards have to be like; each check raises UsageError that names file and fact."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from lmforge.config.errors import UsageError

MANIFEST, TOKENIZER, NAMES = "manifest.json", "tokenizer.json", "documents.json"


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32, little-endian, that holds every id below `vocab_size`."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def check_dtype(folder: Path, manifest: dict[str, Any]) -> None:
    size = manifest["vocab_size"]
    expected = token_dtype(size).name
    if manifest["dtype"] != expected:
        raise UsageError(
            f"{folder / MANIFEST}: dtype {expected} expected for vocabulary {size}, found {manifest['dtype']}"
        )


def check_tokenizer(folder: Path, manifest: dict[str, Any]) -> None:
    if manifest.get("tokenizer") is None:
        return
    path, expected = folder / TOKENIZER, manifest["tokenizer"]["sha256"]
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}, but the manifest names a tokenizer") from error
    if found != expected:
        raise UsageError(f"{path}: not the tokenizer of these tokens, expected sha256 {expected}, found {found}")


def inside(folder: Path, name: str) -> Path:
    if Path(name).name != name:  # a manifest may come from a stranger
        raise UsageError(f"{folder / MANIFEST}: file name {name!r} leaves the folder")
    return folder / name


def map_tokens(folder: Path, shard: dict[str, Any], dtype: np.dtype) -> np.ndarray:
    path, expected = inside(folder, shard["file"]), shard["tokens"] * dtype.itemsize
    found = path.stat().st_size if path.is_file() else None
    if found != expected:
        what = "no such file" if found is None else f"found {found}"
        raise UsageError(f"{path}: {expected} bytes expected ({shard['tokens']} {dtype.name} tokens), {what}")
    return np.memmap(path, dtype=dtype, mode="r") if expected else np.empty(0, dtype)


def load_offsets(path: Path, documents: int, tokens: int) -> np.ndarray:
    try:
        offsets = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from error
    if offsets.shape != (documents + 1,) or offsets.dtype != np.int64:
        raise UsageError(f"{path}: int64 [{documents + 1}] expected, found {offsets.dtype} {list(offsets.shape)}")
    if offsets[0] != 0 or offsets[-1] != tokens or np.any(np.diff(offsets) < 0):
        raise UsageError(f"{path}: has to rise from 0 to {tokens}, found {offsets[0]} to {offsets[-1]}")
    return offsets
