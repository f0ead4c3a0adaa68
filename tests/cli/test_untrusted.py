"""A run folder from a stranger can execute nothing: no marker appears, whatever its files say."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

MARK = "touch marker"


@pytest.fixture
def stranger(program) -> Path:
    assert program.train("trainer.max_steps=2").code == 0
    return program.run()


def with_config(run: Path, **changes: Any) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (run / "config.yaml").write_text(yaml.safe_dump(config))


CONFIGS: dict[str, dict[str, Any]] = {
    "in a group": {"callbacks": {"evil": {"_target_": "os.system", "command": MARK}}},
    "through a module": {"callbacks": {"evil": {"_target_": "logging.os.system", "command": MARK}}},
    "exec": {"logger": {"evil": {"_target_": "builtins.exec", "_args_": [f"import os; os.system('{MARK}')"]}}},
    "nested": {"callbacks": {"samples": {"prompt": {"_target_": "os.system", "command": MARK}}}},
    "interpolated": {"name": "os.system", "callbacks": {"evil": {"_target_": "${name}", "command": MARK}}},
    "the model": {"model": {"_target_": "os.system", "command": MARK}},
    "partial": {"model": {"_partial_": True}},
}


def test_targets_in_the_config(program, stranger) -> None:
    for name, changes in CONFIGS.items():
        run = stranger.with_name("evil")
        shutil.copytree(stranger, run)
        with_config(run, **changes)
        for line in (f"python evaluate.py run={run}", f"python train.py resume={run} trainer.max_steps=4"):
            outcome = program(line)
            assert outcome.code == 2, (name, outcome.output)
            assert "not an allowed class" in outcome.output or "not allowed" in outcome.output, (name, outcome.output)
        shutil.rmtree(run)
    assert not list(program.folder.rglob("marker"))


def test_objects_in_yaml(program, stranger) -> None:
    with (stranger / "config.yaml").open("a") as file:
        file.write(f"\nevil: !!python/object/apply:os.system ['{MARK}']\n")
    for line in ("python evaluate.py run=", "lmforge generate run=", "python train.py resume="):
        assert program(f"{line}{stranger}").code == 2
    assert not list(program.folder.rglob("marker"))


STATES: dict[str, dict[str, Any]] = {
    "a path outside": {"files": [{"file": "../../../secret", "bytes": 0, "sha256": ""}]},
    "no files": {"files": "os.system"},
    "no step": {"step": "$(touch marker)"},
    "no count": {"samples": "os.system"},
    "no metrics": {"metrics": ["os.system"]},
}


def test_crafted_states(program, stranger) -> None:
    (state,) = stranger.glob("checkpoints/*/state.json")
    whole = json.loads(state.read_text())
    for name, changes in STATES.items():
        state.write_text(json.dumps(whole | changes))
        outcome = program(f"python evaluate.py run={stranger} ckpt={state.parent}")
        assert outcome.code == 2, (name, outcome.output)
        assert "incomplete or corrupt checkpoint" in outcome.output
    hidden = {"_instantiator": "os.system", "hyper_parameters": {"_class_path": "os.system", "command": MARK}}
    state.write_text(json.dumps(whole | hidden | {"callbacks": {"EarlyStop": {"_target_": "os.system", "best": MARK}}}))
    assert program(f"python evaluate.py run={stranger}").code == 0
    resumed = program(f"python train.py resume={stranger} trainer.max_steps=3")
    assert resumed.code == 2
    assert "incomplete or corrupt checkpoint" in resumed.output
    assert not list(program.folder.rglob("marker"))
