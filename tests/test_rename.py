"""`make rename` in a copy of the project: everything follows, nothing is left half done, and the fork's tests pass."""

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from project_copy import commit, copy_project, git

TEMPLATE = Path(__file__).resolve().parents[1]
OLD = Path(
    tomllib.loads((TEMPLATE / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"][
        0
    ]
).name
SHOWN = re.findall(r"NAME=(\w+)", (TEMPLATE / "docs" / "fork.md").read_text())[0]
# Put together here, so that none of them is a word of the project.
NEW, NEWER = SHOWN if SHOWN != OLD else "quux_" + "lm", "zed_" + "lm"
TITLE = " ".join(part.upper() if len(part) < 4 else part.capitalize() for part in NEW.split("_"))
SMOKE = (
    "tests/test_packaging.py",
    "tests/deploy",
    "tests/docs",
    "tests/config/test_targets.py",
    "tests/start/test_front_door.py::test_questions_are_cheap_and_leave_nothing",
    "tests/config/test_launch.py",
    "tests/cli/test_train_evaluate.py::test_fsdp_in_bf16[2]",
    "tests/cli/test_train_evaluate.py::test_generate",
)


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """make rename with a PATH that holds nothing of the environment these tests run in."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    python = f"PYTHON={sys._base_executable} -S"  # type: ignore[attr-defined]
    return subprocess.run(
        ["make", "rename", python, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def snapshot(folder: Path) -> dict[str, bytes]:
    names = filter(None, git(folder, "ls-files", "-z", "--cached", "--others").split("\0"))
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that also holds what must not be touched: a binary file, an ignored one, and another's copyright."""
    folder = copy_project(tmp_path_factory.mktemp("template"))
    (folder / "logo.bin").write_bytes(b"\0" + OLD.encode())
    commit(folder, "A binary file")
    (folder / "runs").mkdir()
    (folder / "runs" / "config.yaml").write_text(f"_target_: {OLD}.models.gpt.GPT\n")
    return folder


@pytest.fixture(scope="module")
def fork(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fork")
    git(folder, "clone", "--quiet", str(template), ".")
    (folder / "runs").mkdir()
    (folder / "runs" / "config.yaml").write_text(f"_target_: {OLD}.models.gpt.GPT\n")
    done = make(folder, f"NAME={NEW}")
    assert done.returncode == 0, done.stderr
    commit(folder, "Rename")
    return folder


def test_every_name_follows(template: Path, fork: Path) -> None:
    kept = [line for line in git(template, "grep", "-hI", OLD).splitlines() if re.search("NAME=|name stays", line)]
    left = git(fork, "grep", "-hiI", OLD, "--", ".", ":!LICENSE").splitlines()
    assert sorted(left) == sorted(kept)
    assert not (fork / "src" / OLD).exists()
    project = tomllib.loads((fork / "pyproject.toml").read_text())
    assert project["project"]["name"] == NEW.replace("_", "-")
    assert project["project"]["scripts"] == {NEW: f"{NEW}.cli:main"}
    assert f"{NEW.replace('_', '-')}[" in " ".join(project["project"]["optional-dependencies"]["dev"])
    assert (fork / "README.md").read_text().startswith(f"# {TITLE}\n")
    assert f'RUN_VARIABLE = "{NEW.upper()}_RUN"' in (fork / "src" / NEW / "config" / "launch.py").read_text()
    assert f"_target_: {NEW}.models.gpt.GPT" in (fork / "configs" / "model" / "nano.yaml").read_text()


def test_what_is_not_the_projects_own_text_stays(template: Path, fork: Path) -> None:
    for name in ("logo.bin", "LICENSE", "runs/config.yaml"):
        assert (fork / name).read_bytes() == (template / name).read_bytes()
    assert (fork / ".ci" / "run").stat().st_mode == (template / ".ci" / "run").stat().st_mode


@pytest.fixture
def python(fork: Path, tmp_path: Path) -> Path:
    """An environment that has the dependencies and the fork's package, but not the template's."""
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    shared = [path for path in sys.path if path.endswith("-packages")]
    (packages / "fork.pth").write_text("\n".join([str(fork / "src"), *shared]))
    return tmp_path / "venv" / "bin" / "python"


def test_renamed_fork_passes_its_tests(fork: Path, python: Path) -> None:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    words = [str(python), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    done = subprocess.run([*words, *SMOKE], cwd=fork, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def test_renamed_again_and_back_is_the_same_to_the_byte(template: Path, fork: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", str(fork), "again")
    again = tmp_path / "again"
    first = re.search("site_name: (.*)", (template / "mkdocs.yml").read_text())
    assert first is not None
    for name, title in ((NEWER, NEWER.upper()), (OLD, first[1])):
        done = make(again, f"NAME={name}", f"TITLE={title}")
        assert done.returncode == 0, done.stderr
        commit(again, name)
    assert git(again, "rev-parse", "HEAD^{tree}") == git(template, "rev-parse", "HEAD^{tree}")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "not a package name"),
        ("with-dash", "not a package name"),
        ("1st", "not a package name"),
        ("class", "not a package name"),
        ("../x", "not a package name"),
        ("json", "there is a module of this name already"),
        ("torch", "already means something else here"),
        ("lightning", "already means something else here"),
        ("wandb", "already means something else here"),
        ("tests", "already means something else here"),
        (OLD, "this is the present name"),
    ],
)
def test_names_that_cannot_be(template: Path, name: str, why: str) -> None:
    before = snapshot(template)
    done = make(template, f"NAME={name}")
    assert (done.returncode, why in done.stderr) == (2, True), done.stderr
    assert snapshot(template) == before


@pytest.mark.parametrize(
    ("title", "why"),
    [('Say "x"', "allowed: words of letters"), ("a\\b", "allowed"), ("GPT", "GPT already means something")],
)
def test_titles_that_cannot_be(template: Path, title: str, why: str) -> None:
    done = make(template, f"NAME={NEW}", f"TITLE={title}")
    assert (done.returncode, why in done.stderr) == (2, True), done.stderr


def test_uncommitted_changes_are_in_the_way(template: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", str(template), "dirty")
    dirty = tmp_path / "dirty"
    (dirty / "train.py").write_text((dirty / "train.py").read_text() + "\n# mine\n")
    before = snapshot(dirty)
    refused = make(dirty, f"NAME={NEW}")
    assert (refused.returncode, "commit them first, or FORCE=1" in refused.stderr) == (2, True)
    assert snapshot(dirty) == before
    assert make(dirty, f"NAME={NEW}", "FORCE=1").returncode == 0
    assert (dirty / "train.py").read_text().endswith("# mine\n")


def test_a_name_from_the_environment_is_not_taken(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some systems set NAME to the machine's."""
    monkeypatch.setenv("NAME", NEW)
    assert make(template).returncode == 2


def test_a_failed_write_leaves_nothing_changed(template: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", str(template), "full")
    full = tmp_path / "full"
    before = snapshot(full)
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, 'scripts'); import rename\n"
        "write, count = Path.write_bytes, []\n"
        "def failing(path, data):\n"
        "    count.append(path)\n"
        "    if len(count) == 40: raise OSError('no space left')\n"
        "    return write(path, data)\n"
        "Path.write_bytes = failing\n"
        f"rename.rename(Path('.').resolve(), {NEW!r}, {TITLE!r}, False)\n"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=full, capture_output=True, text=True, timeout=60)
    assert "no space left" in done.stderr
    assert snapshot(full) == before
