"""The workflows that GitHub runs: few rights, pinned actions, an end to every job, and commands that exist."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def workflow(request: pytest.FixtureRequest) -> dict[Any, Any]:
    return yaml.safe_load(request.param.read_text())


def test_there_are_the_two() -> None:
    assert [file.stem for file in FILES] == ["ci", "weekly"]
    ci, weekly = (yaml.safe_load(file.read_text())[True] for file in FILES)  # YAML reads `on` as true
    assert set(ci) == {"push", "pull_request"}
    assert set(weekly) == {"schedule", "workflow_dispatch"}


def test_rights_are_few_and_every_job_ends(workflow: dict[Any, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]
    for job in workflow["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 120
        assert "permissions" not in job


def test_actions_are_pinned_and_keep_no_token(workflow: dict[Any, Any]) -> None:
    for step in (step for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step):
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"])
        assert "checkout" not in step["uses"] or step["with"]["persist-credentials"] is False


def test_every_pin_says_its_version() -> None:
    for file in FILES:
        uses = [line for line in file.read_text().splitlines() if "uses:" in line]
        assert all(re.search(r"@[0-9a-f]{40}  # v\d+\.\d+\.\d+$", line) for line in uses)


def test_commands_exist_and_take_nothing_from_the_event(workflow: dict[Any, Any]) -> None:
    for job in workflow["jobs"].values():
        rows = job.get("strategy", {}).get("matrix", {}).get("include", [{}])
        for command in (step["run"] for step in job["steps"] if "run" in step):
            assert "github." not in command
            for row in rows:
                check_command(re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda found, row=row: row[found[1]], command))


def check_command(command: str) -> None:
    first, *rest = shlex.split(command)
    if first == "make":
        assert rest[0] in TARGETS, command
    else:
        assert (ROOT / first).stat().st_mode & 0o111, command
