"""An export from a stranger, or one that is only partly there, is refused by everything that reads exports."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fits import export, fit, score
from lmforge.config.errors import UsageError
from lmforge.export import load
from lmforge.training.checkpoint import digest, write_json

Config = dict[str, Any]


@pytest.fixture(scope="module")
def sound(runs, tmp_path_factory) -> Path:
    return export(runs["32-true"], f"out={tmp_path_factory.mktemp('sound') / 'export'}")


@pytest.fixture
def folder(sound, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(sound, tmp_path / "export"))


def rewrite(folder: Path, change: Callable[[Config], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    write_json(folder / "config.json", config)


def vouch(folder: Path) -> None:
    """Make the config say the bytes and sha256 that the files have now."""
    entries = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digest(folder / name)}
        for name in ("model.safetensors", "tokenizer.json")
    }
    rewrite(folder, lambda config: config.update(files=entries))


def with_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], metadata: Any = None) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata=metadata)
    vouch(folder)


CONFIGS: dict[str, tuple[Callable[[Config], Any], str]] = {
    "a command": (
        lambda c: c["model"].update(_target_="os.system", command="touch marker"),
        "a network of lmforge.models",
    ),
    "another class": (
        lambda c: c["model"].update(_target_="lmforge.data.module.TokenData"),
        "a network of lmforge.models",
    ),
    "no class": (lambda c: c["model"].pop("_target_"), "a network of lmforge.models"),
    "no such class": (lambda c: c["model"].update(_target_="lmforge.models.gpt.GTP"), "did you mean GPT"),
    "hydra's words": (lambda c: c["model"].update(_partial_=True), "only _target_ may stand"),
    "a class inside": (lambda c: c["model"].update(dropout={"_target_": "os.system"}), "not an allowed class"),
    "a key of ours": (lambda c: c.update(command="touch marker"), "command: unknown key"),
    "a misspelt key": (lambda c: c.update(dtpye=c.pop("dtype")), "dtpye: unknown key; did you mean dtype"),
    "an argument": (lambda c: c["model"].update(n_layers=2), "model.n_layers=2: unknown key"),
    "no argument": (lambda c: c["model"].pop("n_kv_head"), "lacks arguments"),
    "no activation": (lambda c: c["model"].pop("qk_norm"), None),
    "a dtype": (lambda c: c.update(dtype="float23"), "dtype=float23: not allowed; did you mean float32"),
    "another dtype": (lambda c: c.update(dtype="float16"), "says float16, but"),
    "more parameters": (lambda c: c.update(parameters=c["parameters"] + 1), "parameters"),
    "fewer parameters": (lambda c: c.update(parameters=c["parameters"] - 1), "parameters"),
    "a giant": (lambda c: c["model"].update(n_layer=10**9), "a network of this shape needs"),
    "another shape": (lambda c: c["model"].update(n_kv_head=2, n_head=2, d_ff=32), "shapes that differ"),
    "no vocabulary": (lambda c: c["model"].update(vocab_size=None), "vocab_size must be given"),
    "no file": (lambda c: c["files"].pop("model.safetensors"), "says nothing of model.safetensors"),
    "a wrong hash": (lambda c: c["files"]["tokenizer.json"].update(sha256="0" * 64), "not what was written"),
    "no origin": (lambda c: c.pop("origin"), "lacks origin"),
    "no step": (lambda c: c["origin"].update(step="../../etc"), "origin.step=.*must be a whole number"),
    "another version": (lambda c: c.update(version=2), "no export of this program"),
    "another program": (lambda c: c.update(format="hf"), "no export of this program"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_crafted_configs(folder, name) -> None:
    change, message = CONFIGS[name]
    rewrite(folder, change)
    if message is None:  # arguments with a default may be left out
        load(folder)
        return
    with pytest.raises(UsageError, match=message):
        load(folder)
    assert not list(folder.parent.rglob("marker"))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"format": ' + "1" * 2_000_000 + "}", "\xff"])
def test_what_is_no_config(folder, text) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"config\.json"):
        load(folder)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


PARTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "half of the weights": (lambda f: halve(f / "model.safetensors"), "incomplete: model.safetensors has"),
    "empty weights": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        "incomplete: model.safetensors has 0 bytes",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "incomplete: model.safetensors is missing"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "incomplete: tokenizer.json is missing"),
    "a changed byte": (lambda f: flip(f / "model.safetensors"), "the content of model.safetensors is not what"),
}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", PARTS)
def test_an_export_that_is_partly_there_is_used_by_nobody(runs, folder, name) -> None:
    spoil, message = PARTS[name]
    spoil(folder)
    data = ("data=tokens", f"data.path={runs.shards}")
    for use in (
        lambda: load(folder),
        lambda: score(folder, *data),
        lambda: fit(runs.shards, "model.tied=true", f"weights={folder}"),
    ):
        with pytest.raises(UsageError, match=message):
            use()


FILES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], Any, str]] = {
    "a tensor is missing": (lambda t: t.pop("norm.weight"), None, "parameters"),
    "one too many": (lambda t: t.update(extra=torch.zeros(1)), None, "parameters"),
    "another name": (lambda t: t.update(other=t.pop("norm.weight")), None, r"missing norm\.weight, unexpected other"),
    "half of it in float16": (
        lambda t: t.update(extra=torch.zeros(3, dtype=torch.float16)),
        None,
        "says float32, but extra is",
    ),
    "places outside": (
        lambda t: None,
        {"places": json.dumps({"norm.weight": {"offset": [-1], "shape": [32]}})},
        "is not inside",
    ),
    "places that are none": (lambda t: None, {"places": "[1]"}, "corrupt weights file"),
    "places of a giant": (
        lambda t: None,
        {"places": json.dumps({"norm.weight": {"offset": [0], "shape": [10**12]}})},
        "parameters",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_crafted_weights(folder, name) -> None:
    change, metadata, message = FILES[name]
    with_tensors(folder, change, metadata)
    with pytest.raises(UsageError, match=message):
        load(folder)


class Marker:
    def __reduce__(self) -> Any:
        return open, ("marker", "w")


def test_nothing_is_ever_unpickled(folder) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Marker()) * 3000)
    vouch(folder)
    with pytest.raises(UsageError, match=r"corrupt weights file .*model\.safetensors"):
        load(folder)
    assert not Path("marker").exists()


def test_the_sound_one_is_taken(sound) -> None:
    load(sound)
