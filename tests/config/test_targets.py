import sys
from pathlib import Path

import pytest

import lmforge
from lmforge.config import targets
from lmforge.config.build import build
from lmforge.config.errors import UsageError
from lmforge.config.targets import check_targets, load_target

STRANGERS = [
    "os.system",
    "logging.os.system",
    "builtins.exec",
    "lmforge.runs.folder.os.system",
    "lmforge.data.os.system",
    "lmforge.data.sources.Path",
    "lmforge.config.build.build",
    "lmforge.start.entry.run_front_door",
    "torch.hub.load",
    "torch.load",
    "lightning.pytorch.loggers.os",
    "subprocess.Popen",
    "lmforge.data",
    "lmforge.data..x",
    "lmforge.data.sources._hidden",
    "lmforge.data/../../x.f",
    "${oc.env:HOME}",
    "",
]


@pytest.mark.parametrize("path", STRANGERS)
def test_strangers_are_refused_by_name(path):
    (problem,) = check_targets({"model": {"_target_": path}})
    assert problem.startswith(f"model._target_={path}: ")
    with pytest.raises(UsageError):
        load_target(path)


@pytest.mark.parametrize(
    "node",
    [
        {"a": {"b": {"_target_": "os.system"}}},
        {"a": [{"_target_": "os.system"}]},
        {"a": [[{"x": {"_target_": "os.system"}}]]},
        {"_target_": ["os.system"]},
        {"_target_": "lmforge.models.gpt.GPT", "_args_": ["x"]},
        {"_partial_": True},
        {"_recursive_": False},
    ],
)
def test_hidden_places(node):
    assert len(check_targets(node)) == 1


def test_near_name_within_the_module():
    (problem,) = check_targets({"_target_": "lmforge.config.errors.UsageEror"})
    assert "not an allowed class" in problem


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """A package of a fork that defines one class and re-exports what it must not offer."""
    package = tmp_path / "myfork"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text(
        "from os import system as Shell\n"
        "class Net:\n"
        "    def __init__(self, width, text, inner=None, live=None):\n"
        "        self.given = (width, text, inner, live)\n"
        "class Inner:\n"
        "    def __init__(self, size): self.size = size\n"
    )
    (package / "swap.py").write_text("class Net:\n    pass\nfrom os import system as Net\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(targets, "PACKAGES", ("myfork.nets", "myfork.swap", *targets.PACKAGES))
    targets._name_problem.cache_clear()
    yield
    targets._name_problem.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "myfork"]:
        del sys.modules[name]


@pytest.mark.usefixtures("fork")
def test_fork_adds_its_package():
    assert load_target("myfork.nets.Net").__name__ == "Net"
    assert "did you mean Net?" in check_targets({"_target_": "myfork.nets.Nett"})[0]
    assert check_targets({"_target_": "myfork.nets.Shell"})


@pytest.mark.usefixtures("fork")
def test_names_are_checked_without_import():
    assert not check_targets({"_target_": "myfork.nets.Net"})
    assert "myfork" not in sys.modules


@pytest.mark.usefixtures("fork")
def test_the_object_itself_is_checked_too():
    assert not check_targets({"_target_": "myfork.swap.Net"})
    with pytest.raises(UsageError, match=r"stands for posix\.system"):
        load_target("myfork.swap.Net")
    with pytest.raises(UsageError, match=r"posix\.system"):
        build({"_target_": "myfork.swap.Net", "command": "true"})


@pytest.mark.usefixtures("fork")
def test_build_hands_over_live_objects_and_plain_values():
    live = object()
    inner = {"_target_": "myfork.nets.Inner", "size": 3}
    net = build({"_target_": "myfork.nets.Net", "width": [1, 2], "text": "${x}", "inner": inner}, live=live)
    width, text, made, handed = net.given
    assert type(width) is list
    assert (width, text, made.size) == ([1, 2], "${x}", 3)
    assert handed is live


def test_build_needs_a_target():
    with pytest.raises(UsageError, match="without _target_"):
        build({"width": 1})


def test_only_build_instantiates():
    """One call site, so that a change of Hydra's rules is one change here."""
    source = Path(lmforge.__file__).parent
    users = [file.name for file in source.rglob("*.py") if "instantiate" in file.read_text(encoding="utf-8")]
    assert users == ["build.py"]
