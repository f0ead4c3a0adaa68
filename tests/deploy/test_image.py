"""The image's recipe, read: it cannot be built where these tests run."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXT = (ROOT / "deploy" / "Dockerfile").read_text()


def instructions(text: str = TEXT) -> list[tuple[str, str]]:
    """(instruction, its arguments), comments left out and continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def given(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def complaints(text: str) -> list[str]:
    """What a careful reader would object to, instruction by instruction."""
    found = []
    for name, rest in instructions(text):
        tagless = name == "ARG" and rest.startswith("BASE=") and (":" not in rest or rest.endswith(":latest"))
        found += [f"{rest}: no fixed tag"] * tagless
        found += [f"ADD {rest}: COPY takes no address"] * (name == "ADD")
        found += [f"{name} {rest}: a secret"] * (
            name in ("ARG", "ENV") and bool(re.search("TOKEN|PASSW|SECRET|KEY", rest))
        )
        found += ["apt's lists stay in the layer"] * ("apt-get" in rest and "rm -rf /var/lib/apt/lists" not in rest)
        found += ["sudo"] * ("sudo" in rest)
        found += ["pip without pins"] * (
            "pip install" in rest and "-c pins.txt" not in rest and "--no-deps" not in rest
        )
    found += ["runs as root"] * ([r for n, r in instructions(text) if n == "USER"][-1:] in ([], ["root"], ["0"]))
    source = instructions(text).index(("COPY", ". .")) if ("COPY", ". .") in instructions(text) else 0
    installs = [i for i, (_, rest) in enumerate(instructions(text)) if "pip install -r" in rest]
    return found + ["dependencies after the source"] * (not installs or installs[0] > source)


def test_nothing_to_object_to() -> None:
    assert complaints(TEXT) == []
    assert given("WORKDIR") == ["/app"]
    assert json.loads(given("ENTRYPOINT")[0]) == ["python"]
    assert (ROOT / json.loads(given("CMD")[0])[0]).is_file()


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("USER lmforge", "USER root", "runs as root"),
        ("USER lmforge\n", "", "runs as root"),
        (":3.11-slim-bookworm\nFROM", ":latest\nFROM", "no fixed tag"),
        ("COPY . .", "ADD https://example.org/x.tar .", "COPY takes no address"),
        (" -c pins.txt", "", "pip without pins"),
        (" && rm -rf /var/lib/apt/lists/* \\\n", "", "apt's lists stay"),
        ("ARG REVISION=unknown", "ARG WANDB_API_KEY", "a secret"),
        ("COPY . .\n", "", "dependencies after the source"),
    ],
)
def test_a_worse_recipe_is_noticed(before: str, after: str, complaint: str) -> None:
    assert before in TEXT
    worse = TEXT.replace(before, after)
    if complaint == "dependencies after the source":
        worse = worse.replace("COPY pyproject.toml", "COPY . .\nCOPY pyproject.toml")
    assert complaint in " ".join(complaints(worse))


def test_what_is_copied_is_there_and_reaches_the_build() -> None:
    admitted = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / name).exists() for name in admitted)
    copied = [name for rest in given("COPY") for name in rest.split()[:-1] if name != "."]
    assert set(copied) <= set(admitted)
    needed = {PROJECT["readme"], *PROJECT["license-files"], "train.py", "evaluate.py", "configs", "src"}
    assert needed <= set(admitted)


def test_default_base_has_the_python_of_the_pins() -> None:
    assert given("ARG")[0] == f"BASE=python:{PROJECT['requires-python'].removeprefix('>=')}-slim-bookworm"
    assert f"BASE ?= {given('ARG')[0].removeprefix('BASE=')}\n" in (ROOT / "Makefile").read_text()


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("image_requirements", ROOT / "deploy" / "requirements.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pins_are_those_of_the_constraints(script: ModuleType) -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    ours = [line for line in constraints.splitlines() if line and not line.startswith("#")]
    assert script.pins(constraints, {"pip": "25.0", "numpy": "1.0"}) == ours


def test_a_vendors_torch_and_all_it_came_with_is_kept(script: ModuleType) -> None:
    here = {"torch": "2.13.0a0+vendor", "numpy": "2.1.0", "vendor-kernels": "1.2"}
    pins = script.pins("# a comment\ntorch==2.13.0\nnumpy==2.4.6\nPyYAML==6.0.4\n", here)
    assert pins == ["torch==2.13.0a0+vendor", "numpy==2.1.0", "PyYAML==6.0.4", "vendor-kernels==1.2"]


def test_extras_bring_their_own_and_those_they_name(script: ModuleType) -> None:
    assert list(script.requirements(PROJECT, [])) == PROJECT["dependencies"]
    names = {re.split("[<>=\\[]", text)[0] for text in script.requirements(PROJECT, ["dev"])}
    assert {"torch", "ruff", "pytest", "optuna", "datasets", "mkdocs-material"} <= names
    assert PROJECT["name"] not in names


def test_the_script_runs_alone(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    subprocess.run(
        [sys.executable, ROOT / "deploy" / "requirements.py", "sweep"], cwd=tmp_path, check=True, timeout=20, text=True
    )
    assert "optuna" in (tmp_path / "requirements.txt").read_text()
    assert (tmp_path / "pins.txt").read_text().count("==") >= 20


def dry_run(tmp_path: Path, *words: str, gpus: bool) -> str:
    """What make would do, on a machine with GPUs or without."""
    if gpus:
        (tmp_path / "nvidia-smi").touch(mode=0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    return subprocess.run(
        ["make", "-n", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=20
    ).stdout.replace("\\\n", " ")


def test_make_builds_from_any_base(tmp_path: Path) -> None:
    line = dry_run(tmp_path, "docker-build", "BASE=vendor/pytorch:26.01", "TAG=mine", gpus=False)
    assert re.search(r"^docker build -f deploy/Dockerfile --build-arg BASE=vendor/pytorch:26.01 .* -t mine \.$", line)


@pytest.mark.parametrize("gpus", [True, False])
def test_make_runs_with_the_gpus_there_are_and_as_this_user(tmp_path: Path, gpus: bool) -> None:
    line = dry_run(tmp_path, "docker-run", "ARGS=optimizer.lr=1e-3", gpus=gpus)
    assert ("--gpus all" in line) is gpus
    for part in (
        "--rm",
        "--ipc=host",
        '--user "$(id -u):$(id -g)"',
        f'-v "{ROOT}/runs:/app/runs"',
        f'"{ROOT}/.cache:/app/.cache"',
    ):
        assert part in line
    assert line.rstrip().endswith(" train.py optimizer.lr=1e-3")
    assert "mkdir -p runs .cache" in line  # else the daemon makes them, as root


def test_dev_container_is_this_image() -> None:
    folder = ROOT / ".devcontainer"
    settings = json.loads((folder / "devcontainer.json").read_text())
    build = settings["build"]
    assert (folder / build["dockerfile"]).resolve() == ROOT / "deploy" / "Dockerfile"
    assert (folder / build["context"]).resolve() == ROOT
    assert build["args"]["EXTRAS"] in PROJECT["optional-dependencies"]
    assert settings["remoteUser"] == given("USER")[-1]
    assert settings["workspaceFolder"] == given("WORKDIR")[0]
