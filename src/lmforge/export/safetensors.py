"""format=safetensors: one weights file, config.json and tokenizer.json, read back by `lmforge.export.load`."""

import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from lmforge.export.source import Source
from lmforge.runs.exports import CONFIG, FORMAT, TOKENIZER, VERSION, WEIGHTS, is_export
from lmforge.training.checkpoint import digest, write_json
from lmforge.training.exported import Exported


def write(source: Source, folder: Path) -> None:
    """Fill the empty `folder`; the caller syncs and publishes it."""
    save_file(dict(source.tensors()), folder / WEIGHTS, metadata={"format": "pt"})
    source.tokenizer.save(folder / TOKENIZER)
    shutil.copymode(folder / TOKENIZER, folder / WEIGHTS)  # the library's file is its owner's alone
    entries = {name: _entry(folder / name) for name in (WEIGHTS, TOKENIZER)}
    write_json(folder / CONFIG, {**_head(source), "files": entries})


def same(source: Source, folder: Path) -> bool:
    """Whether `folder` holds this very export, whole. Raises UsageError when it is a damaged export."""
    if not is_export(folder):
        return False
    config = dict(Exported(folder).config)
    del config["files"]
    return config == _head(source)


def _head(source: Source) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION, **source.head()}


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": digest(path)}
