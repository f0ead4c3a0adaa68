"""Every page of the documentation does what it says: its files are written, its commands typed in order."""

import re
import shutil
from pathlib import Path

import pytest

from commands import ROOT
from pages import commands, fences, files, pages, run_line
from project_copy import copy_project

WITH_COMMANDS = [
    page for page in pages() if commands(page.read_text()) and page.name != "fork.md"
]  # tests/test_fork.py


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_page(page: Path, first_run: Path, tmp_path: Path) -> None:
    text = page.read_text()
    if files(text):
        copy_project(tmp_path)
    shutil.copytree(first_run, tmp_path, symlinks=True, dirs_exist_ok=True)
    for name, content in files(text).items():
        assert not (ROOT / name).exists(), f"{name} is not a new file"
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    for line in commands(text):
        outcome = run_line(line, tmp_path)
        assert outcome.code == 0, f"{line}\n{outcome.output}"


@pytest.mark.parametrize("page", [*pages(), ROOT / "README.md"], ids=lambda page: page.stem)
def test_what_is_not_run_says_why(page: Path) -> None:
    for fence in fences(page.read_text()):
        assert fence.language not in ("sh", "shell", "console", "zsh"), "commands stand in bash fences"
        if fence.language == "bash" and fence.title:
            assert fence.title.startswith("not run by the tests: "), fence.title
    assert len(fences(page.read_text())) * 2 == page.read_text().count("```"), "a fence that is not read"


@pytest.mark.parametrize("page", [*pages(), ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_files_that_are_named_are_there(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(r"(?<![\w/.])(?:src|tests|configs|deploy|scripts|docs)/[\w./-]+\.\w+", text))
    assert not [name for name in named - set(files(text)) if not (ROOT / name).exists()]


def test_a_page_that_is_wrong_is_noticed(first_run: Path) -> None:
    assert commands('```bash\nls a  # b\nls \\\n  c\n```\n```bash title="not run by the tests: x"\nls d\n```') == [
        "ls a",
        "ls    c",
    ]
    assert run_line("python train.py strategy=fspd", first_run).code == 2
    assert run_line("make no-such-target", first_run).code != 0
    assert run_line("false", first_run).code != 0
