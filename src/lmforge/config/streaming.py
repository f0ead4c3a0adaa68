"""What `data=hub` cannot be asked for, found before anything is read."""

from __future__ import annotations

import re
from pathlib import Path

from lmforge.config.errors import UsageError
from lmforge.config.optional import missing
from lmforge.config.plain import Plain
from lmforge.config.schema import SAFE_NAME

LOCAL_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst", ".txt")


def check_hub(cfg: Plain) -> None:
    data = cfg["data"]
    if "streaming" not in data:
        return
    problems = [problem for problem in [missing("datasets", "data=hub")] if problem]
    if not Path(data["name"]).exists() and not on_the_hub(data["name"]):
        problems.append(f"data.name={data['name']}: no such file or folder")
    if data["revision"] is not None and Path(data["name"]).exists():
        problems.append(f"data.revision={data['revision']}: {data['name']} lies here, and has no other versions")
    if not data["streaming"] and data["val_split"] is not None:
        problems.append(
            f"data.val_split={data['val_split']}: for data.streaming=true; without it documents of data.split="
            f"{data['split']} are held out by their hash"
        )
    problems += _stream_problems(cfg) if data["streaming"] else []
    if problems:
        raise UsageError(problems)


def on_the_hub(name: str) -> bool:
    """Whether the Hub could have a data set of this name; else it can only be a place on this machine."""
    return bool(re.fullmatch(rf"({SAFE_NAME}/)?{SAFE_NAME}", name)) and Path(name).suffix not in LOCAL_SUFFIXES


def _stream_problems(cfg: Plain) -> list[str]:
    data, trainer = cfg["data"], cfg.get("trainer", {})
    problems = [
        f"data.{key}={data[key]}: a stream is read by the training process itself, from where it left off; "
        f"data.{key}={free}, or data.streaming=false"
        for key, free in (("num_workers", "0"), ("limit_train_rows", "null"))
        if data.get(key)
    ]
    if trainer.get("max_epochs") is not None or trainer.get("max_steps", 1) is None:
        problems.append(
            "data.streaming=true: how long an epoch is comes out only at its end; type trainer.max_steps=NUMBER, and "
            "trainer.max_epochs=null"
        )
    return problems
