"""Every file of the config tree, alone and with every preset."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from lmforge.config.compose import Composer, flatten
from lmforge.config.keys import find_key
from lmforge.config.targets import check_targets

FOLDER = Path(__file__).resolve().parents[2] / "configs"
GROUP_FILES = sorted(FOLDER.glob("*/*.yaml"))
PRESETS = ("experiment", "debug")
NEED_A_PATH = {"data=text", "data=tokens", "experiment=gpt2-124m", "experiment=gpt2-355m"}


def composed(compose, *typed):
    path = ["data.path=x"] if NEED_A_PATH & set(typed) else []
    return compose.plain(*typed, *path)


@pytest.mark.parametrize("file", GROUP_FILES, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_every_choice_composes_and_names_allowed_targets(compose, file):
    plain = composed(compose, f"{file.parent.name}={file.stem}")
    assert "???" not in [value for _, value in flatten(plain)]
    assert not check_targets(plain)


@pytest.mark.parametrize("experiment", sorted(file.stem for file in (FOLDER / "experiment").glob("*.yaml")))
@pytest.mark.parametrize("debug", sorted(file.stem for file in (FOLDER / "debug").glob("*.yaml")))
def test_debug_wins_over_every_experiment(compose, experiment, debug):
    plain = composed(compose, f"experiment={experiment}", f"debug={debug}")
    assert plain["name"] == "debug"


@pytest.mark.parametrize("name", ["train", "evaluate", "generate", "export"])
def test_front_doors_compose(tree, name):
    assert Composer(name, tree).compose([]).problems == {}


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.yaml")), ids=lambda file: str(file.relative_to(FOLDER)))
def test_every_key_is_declared(file):
    group = "" if file.parent == FOLDER or file.parent.name in PRESETS else f"{file.parent.name}."
    content = yaml.safe_load(file.read_text())
    content.pop("defaults", None)
    undeclared = [key for key, _ in flatten(content) if find_key(f"{group}{key}") is None]
    assert not undeclared


@pytest.mark.parametrize(
    "file",
    [f for f in sorted(FOLDER.rglob("*.yaml")) if f.parent.name not in PRESETS],
    ids=lambda f: f.parent.name + f.stem,
)
def test_every_key_has_its_comment(file):
    lines = file.read_text().splitlines()
    for before, line in pairwise(lines):
        opens_part = line.endswith(":")
        if re.match(r"\s*\w+:", line) and not opens_part and "_target_" not in line:
            assert before.lstrip().startswith("#"), line


@pytest.mark.parametrize("kind", ["32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"])
def test_precision_file_says_what_its_name_means(compose, kind):
    precision = compose.plain(f"precision={kind}")["precision"]
    short = {"32": "float32", "64": "float64", "bf16": "bfloat16", "16": "float16"}[kind.split("-")[0]]
    assert precision["word"] == kind
    assert precision["compute"] == short
    assert precision["weights"] == (short if kind.endswith("true") else "float32")
    assert precision["scaler"] is (kind == "16-mixed")


def test_published_shapes(compose):
    plain = composed(compose, "experiment=gpt2-355m")
    model, trainer = plain["model"], plain["trainer"]
    assert (model["n_layer"], model["n_head"], model["d_model"], model["vocab_size"]) == (24, 16, 1024, 50257)
    assert plain["batch"]["sequences"] == 32
    assert (plain["optimizer"]["lr"], trainer["max_epochs"], trainer["max_steps"]) == (1e-4, 10, None)
