"""A precision is one word; the dtypes it stands for are in configs/precision/<word>.yaml and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lmforge.config.keys import PRECISIONS

KEYS = "precision."


def read_precision(folder: Path, word: str) -> dict[str, Any]:
    """The node that a word stands for; `folder` is the config tree's."""
    return yaml.safe_load((folder / "precision" / f"{word}.yaml").read_text(encoding="utf-8"))


def refusal(raw: str) -> str:
    """What is said to a typed key of the node."""
    return f"{raw}: follows from the word; choose precision=WORD ({', '.join(PRECISIONS)})"


def precision_problems(node: Any, folder: Path) -> dict[str, str]:
    """Keys of a resolved node that are not what its word means. A word that is none is the schema's problem."""
    word = node.get("word") if isinstance(node, dict) else None
    if word not in PRECISIONS:
        return {}
    meant = read_precision(folder, word)
    wrong = [key for key in {**meant, **node} if node.get(key) != meant.get(key)]
    return {
        f"{KEYS}{key}": f"{KEYS}{key}={node.get(key)}: precision={word} means {meant.get(key)}; choose precision=WORD"
        for key in wrong
    }
