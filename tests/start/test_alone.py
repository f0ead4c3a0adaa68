"""A front door without a run: its words, and its config handed over by another process."""

import os
import subprocess
import sys

import pytest
import yaml

from lmforge.config.compose import Composer
from lmforge.config.errors import UsageError
from lmforge.config.parse import read_words
from lmforge.start.alone import plan_alone

DOOR = """
import json, sys
from lmforge.config.plain import to_plain
from lmforge.start.entry import run_front_door
run_front_door("prepare", lambda cfg: print("JOB " + json.dumps(to_plain(cfg))))
"""


@pytest.fixture
def plan(tree):
    def plan(*typed):
        problems: list[str] = []
        words = read_words(typed, tree, False, problems)
        return plan_alone(Composer("prepare", tree), words, [], problems)

    return plan


def test_only_what_decides_the_shards_is_composed(plan, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    planned = plan("data=text", "data.path=a.txt", "workers=2")
    assert planned.run is None
    assert planned.plain["data"] == {
        "_target_": "lmforge.data.module.TextData",
        "path": str(tmp_path / "a.txt"),
        "text_key": "text",
        "on_bad": "strict",
        "vocab_size": 4096,
        "tokenizer": None,
    }
    assert planned.plain["workers"] == 2


def test_all_problems_at_once(plan):
    with pytest.raises(UsageError) as caught:
        plan("data=text", "data.path=.", "data.vocab_size=3", "data.context=8", "workres=2", "model.d_model=64")
    said = caught.value.problems
    assert len(said) == 4
    for part in (
        "data.vocab_size=3: not allowed",
        "data.context says how training reads the shards",
        "did you mean workers?",
        "unknown key model.d_model",
    ):
        assert any(part in problem for problem in said), (part, said)


def _door(*words, **environment):
    command = [sys.executable, "-c", DOOR, *words]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_a_config_handed_over_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": {"path": "a ${b}"}}))
    done = _door(LMFORGE_CONFIG=str(tmp_path / "config.yaml"))
    assert done.stdout == 'JOB {"data": {"path": "a ${b}"}}\n'


def test_the_run_of_the_environment_is_not_its_own(tmp_path):
    done = _door("--cfg", "job", LMFORGE_RUN=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "workers: auto" in done.stdout


def test_it_is_started_once():
    ranks = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = _door("data=stdlib", **ranks)
    assert done.returncode == 2
    assert "start it without torchrun" in done.stderr
    assert "JOB" not in done.stdout
