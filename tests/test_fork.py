"""docs/fork.md, typed command by command: a fork is started, both sides go on, and a newer template is merged."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pages import fences
from project_copy import commit, copy_project, git, git_environment
from test_rename import NEW, OLD, SHOWN

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "fork.md").read_text()


def section(title: str) -> list[str]:
    """The commands below a heading."""
    (text,) = re.findall(rf"^##+ {title}\n(.*?)(?=^##)", PAGE, flags=re.DOTALL | re.MULTILINE)
    return [line for fence in fences(text) if fence.language == "bash" for line in fence.body.splitlines()]


def run(folder: Path, lines: list[str], **places: str) -> None:
    """The lines in one shell; `make format` is what it would call."""
    script = "\n".join(["set -e", *lines])
    for name, place in {SHOWN: NEW, **places}.items():
        script = script.replace(name, place)
    ruff = Path(sys.executable).with_name("ruff")
    formatting = f"{ruff} check --quiet --fix . || true; {ruff} format --quiet ." if ruff.exists() else "true"
    script = script.replace("make format", formatting)
    environment = {**git_environment(), "PATH": f"/usr/bin:/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stdout + done.stderr


def append(folder: Path, name: str, text: str, message: str) -> None:
    file = folder / name
    file.write_text(file.read_text() + text)
    commit(folder, message)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A template, a place for the fork's own remote, and a fork started as the page says."""
    world = tmp_path_factory.mktemp("world")
    copy_project(world / "template")
    git(world, "init", "--quiet", "--bare", "origin")
    run(
        world,
        section("Start so that newer releases can be merged"),
        TEMPLATE_URL=str(world / "template"),
        YOUR_URL=str(world / "origin"),
    )
    return world


def test_a_newer_template_is_merged_and_both_changes_are_there(world: Path) -> None:
    template, fork = world / "template", world / "fork"
    assert git(fork, "status", "--porcelain") == ""
    append(fork, f"src/{NEW}/models/gpt.py", "\n\nOURS = 1\n", "Our change")
    append(fork, "README.md", "\nOurs.\n", "Our README")
    file = template / "src" / OLD / "models" / "gpt.py"
    file.write_text(file.read_text().replace("Decoder-only transformer", "A decoder-only transformer"))
    (template / "src" / OLD / "models" / "newer.py").write_text(f"from {OLD}.models.gpt import GPT\n\nNEWER = GPT\n")
    (template / "CONTRIBUTING.md").unlink()
    commit(template, "A newer release")

    run(fork, section("Merge a newer release"))

    assert git(fork, "status", "--porcelain") == ""
    assert git(fork, "branch", "--show-current").strip() == "main"
    merged = (fork / "src" / NEW / "models" / "gpt.py").read_text()
    assert merged.rstrip().endswith("OURS = 1")
    assert "A decoder-only transformer" in merged
    assert (fork / "src" / NEW / "models" / "newer.py").read_text().startswith(f"from {NEW}.models.gpt")
    assert (fork / "README.md").read_text().endswith("\nOurs.\n")
    assert not (fork / "CONTRIBUTING.md").exists()
    assert not (fork / "src" / OLD).exists()
    assert git(fork, "merge-base", "main", "template/main") == git(fork, "rev-parse", "template/main")

    append(template, "SECURITY.md", "\nOne more.\n", "The release after that")
    run(fork, section("Merge a newer release"))
    assert (fork / "SECURITY.md").read_text().endswith("\nOne more.\n")
    assert (fork / "README.md").read_text().endswith("\nOurs.\n")


def test_lines_both_changed_are_a_conflict_and_nothing_else(world: Path) -> None:
    shutil.copytree(world, world.with_name("apart"), symlinks=True)
    template, fork = world.with_name("apart") / "template", world.with_name("apart") / "fork"
    git(fork, "remote", "set-url", "template", str(template))
    append(fork, "SECURITY.md", "\nOurs.\n", "Our change")
    append(template, "SECURITY.md", "\nTheirs.\n", "A newer release")
    with pytest.raises(AssertionError, match="CONFLICT"):
        run(fork, section("Merge a newer release"))
    assert git(fork, "diff", "--name-only", "--diff-filter=U").split() == ["SECURITY.md"]


def test_a_run_from_before_the_rename_lives_on(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "default" / "1"
    folder.mkdir(parents=True)
    before = f"name: {OLD}\nmodel:\n  _target_: {OLD}.models.gpt.GPT\n  d_model: 8\n"
    (folder / "config.yaml").write_text(before)
    run(tmp_path, section("Runs from before"), OLD=OLD, NEW=NEW)
    assert (folder / "config.yaml").read_text() == before.replace(f": {OLD}.models", f": {NEW}.models")
