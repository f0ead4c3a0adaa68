"""Where a run came from: code version, packages, machine."""

from __future__ import annotations

import importlib.metadata
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("lmforge", "torch", "lightning", "hydra-core", "omegaconf", "torchmetrics", "numpy", "tokenizers",
            "tiktoken", "safetensors", "wandb", "tensorboard")  # fmt: skip


def provenance() -> tuple[dict[str, Any], str]:
    """(facts for provenance.json, the diff of uncommitted changes or ''). Outside git the revision is 'unknown'."""
    code = Path(__file__).resolve().parents[3]
    revision = _git(code, "rev-parse", "HEAD")
    diff = _git(code, "diff", "HEAD") if revision else None
    facts = {
        "git_revision": revision.strip() if revision else "unknown",
        "git_dirty": bool(diff) if revision else "unknown",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "executable": sys.executable,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }
    return facts, diff or ""


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
