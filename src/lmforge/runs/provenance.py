"""Where a run came from: code version, packages, machine."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from lmforge.config.machine import cpu_model

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
        "cpu": cpu_model(),
        "host": socket.gethostname(),
        "executable": sys.executable,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }
    return facts, diff or ""


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`fact old -> new` for the facts that can change a run's numbers; facts that one side lacks are passed over."""
    old, new = _telling(before), _telling(now)
    return [f"{name} {old[name]} -> {new[name]}" for name in old if name in new and old[name] != new[name]]


def _telling(facts: dict[str, Any]) -> dict[str, str]:
    packages = facts.get("packages")
    packages = packages if isinstance(packages, dict) else {}
    revision = facts.get("git_revision")
    told = {
        "python": facts.get("python"),
        "torch": packages.get("torch"),
        "lightning": packages.get("lightning"),
        "CPU": facts.get("cpu"),
        "code": None if revision == "unknown" else revision,
    }
    return {name: str(fact) for name, fact in told.items() if fact}


def read_facts(file: Path) -> dict[str, Any]:
    """A stored provenance.json; empty where there is none that can be read."""
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    usable = isinstance(facts, dict) and isinstance(facts.get("resumed", []), list)
    return facts if usable else {}


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
