"""docs/config-reference.md says what the config files and the key table say today."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from lmforge.config.plain import flatten

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("config_reference", ROOT / "scripts" / "config_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "config_reference", module)
    spec.loader.exec_module(module)
    return module


def test_page_is_fresh(script: ModuleType) -> None:
    written = (ROOT / "docs" / "config-reference.md").read_text()
    assert written == script.reference(), "stale; `make config-reference` writes it anew"


def test_every_key_and_choice_is_listed(script: ModuleType) -> None:
    text = script.reference()
    for file in (ROOT / "configs").glob("*/*.yaml"):
        group = file.parent.name
        assert (f"`{group}={file.stem}`: " in text) != file.stem.startswith("_")
        content = yaml.safe_load(file.read_text())
        content.pop("defaults", None)
        keys = [key for key, _ in flatten(content) if not key.endswith("_target_")]
        assert group in script.PRESETS or all(f"| `{group}.{key}` | " in text for key in keys)


def test_a_changed_comment_type_or_default_is_noticed(script, tmp_path, monkeypatch) -> None:
    group = tmp_path / "trainer"
    group.mkdir()
    (group / "default.yaml").write_text("# What it is.\n\n# How long | in <steps>.\nmax_steps: 3\n")
    (group / "long.yaml").write_text("# Longer.\n# How long.\nmax_steps: 300\n")
    monkeypatch.setattr(script, "CONFIGS", tmp_path)
    assert list(script.section("trainer")) == [
        "\n## trainer\n",
        "- `trainer=default`: What it is.",
        "- `trainer=long`: Longer.",
        "",
        "| key | meaning | allowed | default | on resume |\n|---|---|---|---|---|",
        "| `trainer.max_steps` | How long \\| in &lt;steps>. | a whole number of at least 1, or null "
        "| default: `3`<br>long: `300` | taken |",
    ]
