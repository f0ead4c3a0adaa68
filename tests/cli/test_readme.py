"""Every command of the README is run, with a fast preset on top of what trains."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from commands import ROOT, run_command

README = (ROOT / "README.md").read_text()
NOT_HERE = ("git ", "make ", "source ", "conda ")  # getting and setting up the project
FAST = "debug=fast trainer.threads=1"


def shell_lines() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(NOT_HERE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder as a user has it: a first run, a README and a folder of text."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copy(ROOT / "README.md", folder)
    (folder / "corpus").mkdir()
    for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / "corpus")
    first = run_command(shlex.split(f"python train.py {FAST} name=first"), folder)
    assert first.code == 0, first.output
    return folder


@pytest.mark.parametrize("line", shell_lines())
def test_readme_command(folder: Path, line: str) -> None:
    words = shlex.split(line)
    run = next((folder / "runs" / "first").iterdir())
    words = [word.replace("runs/default/RUN", str(run)) for word in words]
    if words[1] == "train.py" and not {"--help", "--cfg"} & set(words):
        words += [*FAST.split(), *(["sweep.trials=1"] if "sweep=optuna" in words else [])]
    if words[1] == "evaluate.py":
        words += ["limit_batches=2"]
    outcome = run_command(words, folder)
    assert outcome.code == 0, outcome.output


def test_the_readme_shows_what_is_really_answered(folder: Path) -> None:
    """The example of a wrong word, as the program answers it today."""
    shown = re.search(r"```text\n\$ (python train.py .*?)\n(.*?)```", README, flags=re.DOTALL)
    assert shown is not None
    outcome = run_command(shlex.split(shown[1]), folder)
    assert outcome.code == 2
    assert outcome.output.startswith(shown[2].rstrip())
