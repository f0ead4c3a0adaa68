"""What a page of the documentation shows, run: its files written, its commands typed one after the other.

In a page every ```bash fence holds commands that are run here; one that cannot be says so in its title,
```bash title="not run by the tests: REASON". Any other fence whose title is the path of a file is a file of the page.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from commands import ROOT, Outcome, start_command

SET_UP = ("git clone ", "source ", "conda ")  # getting the project, which the tests have
FAST = ("debug=fast", "trainer.threads=1")
NOT_RUN = "not run by the tests: "
FENCE = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```$", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Fence:
    language: str
    title: str
    body: str


def fences(page: str) -> list[Fence]:
    found = FENCE.findall(page)
    titles = [re.search(r'title="([^"]*)"', info) for _, _, info, _ in found]
    return [
        Fence(language, title[1] if title else "", re.sub(f"^{indent}", "", body, flags=re.MULTILINE))
        for (indent, language, _, body), title in zip(found, titles, strict=True)
    ]


def commands(page: str) -> list[str]:
    """Every command to run, comments taken off and continued lines joined."""
    blocks = [f.body for f in fences(page) if f.language == "bash" and not f.title.startswith(NOT_RUN)]
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith((*SET_UP, "#"))]


def files(page: str) -> dict[str, str]:
    """Path and content of the files that a page asks for."""
    return {f.title: f.body for f in fences(page) if re.fullmatch(r"[\w-][\w./-]*\.\w+", f.title)}


def run_line(line: str, folder: Path, **environment: str) -> Outcome:
    """Run one command as a user would in `folder`, with a fast preset on top of what trains.

    `make` is asked what it would do. Where `folder` is a copy of the project, its own code runs.
    """
    words = shlex.split(line.replace("runs/default/RUN", str(next((folder / "runs" / "first").glob("*"), ""))))
    if words[0] == "make":
        return _shell(f"make -n {shlex.join(words[1:])}", ROOT)
    if words[0] not in ("python", "lmforge") or words[1] == "-m":
        return _shell(line, folder)
    changes: tuple[Callable[[], None], ...] = ()
    if (folder / "src").is_dir():
        changes = (partial(_own_package, str(folder / "src")),)
        words = [str(folder / word) if (folder / word).is_file() and word.endswith(".py") else word for word in words]
    return start_command([*words, *_fast(words)], folder, *changes, **environment).finish(180.0)


def _fast(words: list[str]) -> tuple[str, ...]:
    if {"--help", "--cfg", "--info"} & set(words):
        return ()
    if words[1].endswith("evaluate.py"):
        return ("limit_batches=2",)
    if not words[1].endswith("train.py"):
        return ()
    continues = any(word.startswith("resume=") and word != "resume=auto" for word in words)
    presets = any(word.startswith("debug=") for word in words)
    fast = FAST[1:] if continues else (*FAST[1:], "trainer.max_steps=4") if presets else FAST
    searches = "sweep=optuna" in words and not any(word.startswith("sweep.trials=") for word in words)
    return (*fast, "sweep.trials=1") if searches else fast


def _own_package(source: str) -> None:
    """In a process that has the project's package loaded already: the one below `source` in its place."""
    package = next(Path(source).iterdir()).name
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
    sys.path.insert(0, source)
    os.environ["PYTHONPATH"] = source


def _shell(line: str, folder: Path) -> Outcome:
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=60)
    return Outcome(done.returncode, done.stdout + done.stderr)


def pages() -> Iterator[Path]:
    return iter(sorted((ROOT / "docs").rglob("*.md")))
