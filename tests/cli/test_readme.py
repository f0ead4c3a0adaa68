"""Every command of the README is run, with a fast preset on top of what trains."""

import re
import shlex
from pathlib import Path

import pytest

from commands import ROOT, run_command
from pages import commands, fences, run_line

README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("line", commands(README))
def test_readme_command(workplace: Path, line: str) -> None:
    outcome = run_line(line, workplace)
    assert outcome.code == 0, outcome.output


def test_the_readme_shows_what_is_really_answered(workplace: Path) -> None:
    """The example of a wrong word, as the program answers it today."""
    shown = re.search(r"```text\n\$ (python train.py .*?)\n(.*?)```", README, flags=re.DOTALL)
    assert shown is not None
    outcome = run_command(shlex.split(shown[1]), workplace)
    assert outcome.code == 2
    assert outcome.output.startswith(shown[2].rstrip())


def test_both_languages_type_the_same() -> None:
    """README.zh.md holds the README's fences, but for the comments in them."""

    def typed(text: str) -> list[tuple[str, list[str]]]:
        lines = [(fence.language, fence.body.splitlines()) for fence in fences(text)]
        return [(language, [re.sub(r"(^|\s{2,})#.*", "", line) for line in body]) for language, body in lines]

    chinese = (ROOT / "README.zh.md").read_text()
    bash = [block for block in typed(README) if block[0] == "bash"]
    assert bash
    assert [block for block in typed(chinese) if block[0] == "bash"] == bash
    assert [language for language, _ in typed(chinese)] == [language for language, _ in typed(README)]
    assert "(README.zh.md)" in README
    assert "(README.md)" in chinese
