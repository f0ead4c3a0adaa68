"""Every file of the config tree, alone and with every preset: composed, resolved, and built where any machine can."""

import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from lmforge.config.compose import Composer
from lmforge.config.keys import find_key
from lmforge.config.parse import Tree
from lmforge.config.plain import flatten, to_config
from lmforge.config.targets import check_targets, load_target

FOLDER = Path(__file__).resolve().parents[2] / "configs"
GROUP_FILES = sorted(FOLDER.glob("*/[!_]*.yaml"))  # what begins with _ is a part of others
PRESETS = ("experiment", "debug")
DOORS = sorted(file.stem for file in FOLDER.glob("*.yaml"))
CHOICES = [
    (door, f"{group}={choice}")
    for door in DOORS
    for group in Composer(door, Tree(FOLDER)).groups()
    for choice in Tree(FOLDER).groups[group]
]


def composed(compose, *typed):
    """The config, with what must be given given: keys whose file says `???`."""
    first = compose.composer.compose(compose.words(*typed))
    needed = [f"{key}=x" for key, said in first.problems.items() if said.startswith(f"{key} must be given: ")]
    return compose.plain(*typed, *needed) if first.problems else first.plain


@pytest.mark.parametrize(("door", "choice"), CHOICES, ids=lambda word: word)
def test_every_choice_composes_and_names_allowed_targets(tree, compose, door, choice):
    plain = composed(type(compose)(Composer(door, tree)), choice)
    leaves = [value for _, value in flatten(plain)]
    assert "???" not in leaves
    assert not [value for value in leaves if isinstance(value, str) and "${" in value]
    assert not check_targets(plain)


def test_every_file_is_a_choice_of_some_front_door():
    offered = {choice for _, choice in CHOICES}
    assert {f"{file.parent.name}={file.stem}" for file in GROUP_FILES} == offered


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.yaml")), ids=lambda file: str(file.relative_to(FOLDER)))
def test_what_must_be_given_says_so(file):
    for before, line in pairwise(file.read_text().splitlines()):
        assert not line.endswith(": ???") or before.endswith("Must be given."), line


def targets(node) -> Iterator[tuple[str, dict]]:
    """Every `_target_` below a node with the keys beside it."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield node["_target_"], {key: value for key, value in node.items() if key != "_target_"}
        for value in node.values():
            yield from targets(value)


def taken(target) -> set[str]:
    """Names of arguments that a class or function takes, those that `**kwargs` hand on to its base classes too."""
    layers = (
        [layer.__init__ for layer in target.__mro__ if "__init__" in vars(layer)] if inspect.isclass(target) else []
    )
    found: set[str] = set()
    for layer in layers or [target]:
        parameters = inspect.signature(layer).parameters.values()
        found |= {p.name for p in parameters}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found


@pytest.mark.parametrize("file", GROUP_FILES, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_keys_are_arguments_of_the_target_they_stand_beside(compose, file):
    if not any(choice == f"{file.parent.name}={file.stem}" for door, choice in CHOICES if door == "train"):
        pytest.skip("no group of train.yaml")
    for name, keys in targets(composed(compose, f"{file.parent.name}={file.stem}")):
        assert set(keys) <= taken(load_target(name)), name


@pytest.mark.parametrize("choice", [choice for door, choice in CHOICES if door == "train"])
def test_what_needs_no_accelerator_is_built(compose, choice):
    """Network on the meta device, optimizers of a network, schedule, plan and precision."""
    import torch

    from lmforge.config.build import build
    from lmforge.training import assemble

    cfg = to_config(composed(compose, choice))
    network = assemble.make_network(cfg, vocab_size=300)
    assert sum(p.numel() for p in network.parameters()) > 0
    assert {p.device.type for p in network.parameters()} == {"meta"}
    with torch.no_grad():
        logits = network(torch.zeros(1, 4, dtype=torch.int64, device="meta"))
    assert logits.shape == (1, 4, network.vocab_size)
    optimizers = build(cfg.optimizer, network=network)
    grouped = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in network.parameters()}
    assert 0.0 <= build(cfg.schedule)(1, 10) <= 1.0
    assert assemble.make_plan(cfg).kind in ("single", "ddp", "fsdp")
    assert assemble.make_precision(cfg, "cpu").describe()


@pytest.mark.parametrize("experiment", sorted(file.stem for file in (FOLDER / "experiment").glob("*.yaml")))
@pytest.mark.parametrize("debug", sorted(file.stem for file in (FOLDER / "debug").glob("*.yaml")))
def test_debug_wins_over_every_experiment(compose, experiment, debug):
    plain = composed(compose, f"experiment={experiment}", f"debug={debug}")
    assert plain["name"] == "debug"


@pytest.mark.parametrize("name", DOORS)
def test_front_doors_compose(tree, name):
    """With nothing typed; `lmforge prepare` alone has to be told what to prepare."""
    problems = Composer(name, tree).compose([]).problems
    assert problems == ({"data.path": "data.path must be given: a path"} if name == "prepare" else {})


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
