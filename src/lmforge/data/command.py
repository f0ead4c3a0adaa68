"""`lmforge prepare`: token shards without a run. Training starts it too when its shards are missing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lmforge.config.errors import Exit, UsageError
from lmforge.config.launch import end_with_parent
from lmforge.config.lines import show_log
from lmforge.config.plain import to_plain

PROBLEMS_VARIABLE = "LMFORGE_PROBLEMS"  # a file for what is wrong, set by a process that says it itself


def prepare(cfg: DictConfig) -> Mapping[str, Any]:
    """Makes the shards of `cfg.data` where they are missing and says where they are; returns the folder."""
    from lmforge.data.corpora import shards_of
    from lmforge.data.shard_checks import MANIFEST

    show_log()
    plain = to_plain(cfg)
    problems_file = os.environ.get(PROBLEMS_VARIABLE)
    if problems_file:
        end_with_parent(grace=0.0)
    try:
        folder = shards_of(plain["data"], cache=Path(plain["paths"]["cache"]), workers=plain["workers"])
    except UsageError as error:
        if not problems_file:
            raise
        Path(problems_file).write_text(json.dumps(error.problems), encoding="utf-8")
        sys.exit(int(Exit.WRONG_INPUT))
    if not problems_file:
        print(f"token shards in {folder}")
        alone = (folder / MANIFEST).is_file() and not plain["data"].get("streaming")
        own = f"python train.py data=tokens data.path={folder}, or " if alone else ""
        print(f"train on them: {own}with the same data words")
    return {"folder": str(folder)}
