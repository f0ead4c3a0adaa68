"""A copy of the project as git would hand it out, for tests that change it."""

import os
import shutil
import subprocess
from pathlib import Path

from commands import ROOT


def copy_project(folder: Path) -> Path:
    """Copies what git tracks, and what it would track, into `folder` as a repository with one commit."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=20,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(folder, "The template")
    return folder


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", message)


def git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=folder, env=git_environment(), capture_output=True, text=True, check=True, timeout=30
    ).stdout


def git_environment() -> dict[str, str]:
    """Git with an author, and nothing of this machine's own settings or of a hook that runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    author = {
        f"GIT_{role}_{part}": "someone@example.org" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")
    }
    return {**kept, **author, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
