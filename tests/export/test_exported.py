"""`lmforge export`: what is written is what was trained, whole, and read back as it was."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fits import export, fit, score
from lmforge.config.errors import UsageError
from lmforge.data.packing import IGNORED, PackedRows
from lmforge.data.shards import TokenShards
from lmforge.data.tokenizer import Tokenizer
from lmforge.export import load
from lmforge.models.gpt import GPT
from lmforge.runs.folder import list_checkpoints
from lmforge.training.checkpoint import Checkpoint, PieceReader, digest, write_json
from ranks import run_ranks
from tiny import compose, new_run, train

WORDS = ("optimizer.lr=1e-2", "callbacks.samples=null", "trainer.max_steps=3")


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    reader = Checkpoint(list_checkpoints(run / "checkpoints")[-1]).reader("weights")
    return {name: reader.read(name) for name in reader.names()}


def loss(folder: Path, shards: Path) -> float:
    return float(score(folder, "data=tokens", f"data.path={shards}")["loss"])


def test_a_folder_with_brackets_is_named_as_it_is(runs, tmp_path, capsys) -> None:
    folder = export(runs["32-true"], f"out={tmp_path}/[v1]/[/v2]")
    text = capsys.readouterr().out
    assert f"export      {folder} (written)" in text
    assert f"lmforge generate run='{folder}'" in text
    score(folder, "data=tokens", f"data.path={runs.shards}")
    assert "[v1]/[/v2]" in capsys.readouterr().out.replace("\n", "").replace(" ", "")


def test_a_job_of_a_sweep_is_named_as_run_takes_it(runs, tmp_path) -> None:
    job = tmp_path / "lrs" / "20260101-000000-abcdef" / "3"
    shutil.copytree(runs["32-true"], job)
    (job.parent / "sweep.yaml").touch()
    assert config_of(export(job))["origin"]["run"] == "lrs/20260101-000000-abcdef/3"


KEPT = {"32-true": "float32", "64-true": "float64", "bf16-mixed": "float32", "bf16-true": "bfloat16"}


@pytest.mark.parametrize(("precision", "dtype"), KEPT.items())
def test_every_precision_is_kept_as_it_was_stored(runs, tmp_path, precision, dtype) -> None:
    """The config's dtype is that of every floating tensor; values are equal to the last bit; the loss is the same."""
    folder = export(runs[precision], f"out={tmp_path / 'out'}")
    stored = load_file(folder / "model.safetensors")
    assert config_of(folder)["dtype"] == dtype
    assert {str(tensor.dtype) for tensor in stored.values()} == {f"torch.{dtype}"}
    trained = weights_of(runs[precision])
    assert stored.keys() == trained.keys()
    assert all(stored[name].equal(trained[name]) for name in stored)
    network, _ = load(folder)
    assert all(tensor.equal(stored[name]) for name, tensor in network.state_dict().items())
    assert loss(folder, runs.shards) == pytest.approx(score(runs[precision])["loss"], abs=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float16", 2e-3), ("float64", 1e-6)])
def test_another_dtype_is_converted_and_said(runs, tmp_path, dtype, tolerance) -> None:
    folder = export(runs["32-true"], f"out={tmp_path / 'out'}", f"dtype={dtype}")
    stored = load_file(folder / "model.safetensors")
    assert config_of(folder)["dtype"] == dtype
    assert {str(tensor.dtype) for tensor in stored.values()} == {f"torch.{dtype}"}
    before, after = score(runs["32-true"])["loss"], loss(folder, runs.shards)
    assert after == pytest.approx(before, abs=tolerance)
    assert (after == before) == (dtype == "float64")


def test_a_run_in_bf16_is_evaluated_in_float32_like_a_plain_forward(runs, tmp_path) -> None:
    folder = export(runs["bf16-true"], f"out={tmp_path / 'out'}")
    result = score(folder, "data=tokens", f"data.path={runs.shards}")
    assert result["precision"].startswith("weights float32, compute float32")
    network, _ = load(folder, dtype=torch.float32)
    assert result["loss"] == pytest.approx(plain_loss(network, runs.shards), abs=1e-5)
    low, _ = load(folder)
    assert abs(result["loss"] - plain_loss(low, runs.shards)) > 1e-5


def plain_loss(network: torch.nn.Module, shards: Path) -> float:
    """Mean over the validation targets by plain PyTorch, all rows at once."""
    rows = PackedRows(TokenShards.open(shards, "val"), context=32)
    batch = rows.batch(np.arange(len(rows)))
    with torch.no_grad():
        logits = network(batch["input_ids"], batch["doc_ids"], batch["positions"])
    return float(F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=IGNORED))


def test_a_tied_table_is_there_once_counted_once_and_tied_again(runs, tmp_path, capsys) -> None:
    folder = export(runs["32-true"], f"out={tmp_path / 'out'}")
    shown = capsys.readouterr().out
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert [name for name in names if "embed" in name or "head" in name] == ["embed.weight"]
    config, (network, _) = config_of(folder), load(folder)
    assert config["model"]["tied"] is True
    count = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert config["parameters"] == count == sum(parameter.numel() for parameter in network.parameters())
    assert f"({count})" in shown
    ids = torch.tensor([[0, 5, 9, 4]])
    reference = GPT(**{key: value for key, value in config["model"].items() if key != "_target_"}).eval()
    reference.load_state_dict(weights_of(runs["32-true"]))
    with torch.no_grad():
        assert network(ids).equal(reference(ids))
        network.embed.weight[7] += 1.0  # one storage: input and output see it
        assert not network(ids)[..., 7].equal(reference(ids)[..., 7])


@pytest.mark.parametrize(("strategy", "world"), [("ddp", 2), ("fsdp", 3)])
def test_checkpoints_of_several_ranks_become_one_file(runs, tmp_path, strategy, world) -> None:
    batch = (f"batch.sequences={2 * world}", f"trainer.devices={world}")
    plain = compose(runs.shards, *WORDS, f"strategy={strategy}", "precision=bf16-mixed", *batch)
    run = new_run(plain).path
    run_ranks(train, world, plain, run)
    assert len(list(run.glob("checkpoints/*/weights-*"))) == (world if strategy == "fsdp" else 1)
    folder = export(run, f"out={tmp_path / 'out'}")
    stored, trained = load_file(folder / "model.safetensors"), weights_of(run)
    assert all(stored[name].equal(trained[name]) for name in trained)
    assert loss(folder, runs.shards) == pytest.approx(score(run)["loss"], abs=1e-6)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_names_of_wrapped_networks_come_out_plain(runs, tmp_path, prefix) -> None:
    run = tmp_path / "runs" / "x" / "wrapped"
    shutil.copytree(runs["32-true"], run)
    (folder,) = run.glob("checkpoints/step-*")
    file = folder / "weights-00000.safetensors"
    save_file({f"{prefix}{name}": tensor for name, tensor in weights_of(run).items()}, file)
    state = json.loads((folder / "state.json").read_text())
    for entry in state["files"]:
        if entry["file"] == file.name:
            entry |= {"bytes": file.stat().st_size, "sha256": digest(file)}
    write_json(folder / "state.json", state)
    out = export(run, f"out={tmp_path / 'out'}")
    assert set(load_file(out / "model.safetensors")) == set(weights_of(runs["32-true"]))
    assert loss(out, runs.shards) == score(runs["32-true"])["loss"]


def test_a_compiled_run_is_exported_like_any_other(runs, tmp_path) -> None:
    run = fit(runs.shards, *WORDS, "compile=eager", "trainer.activation_checkpointing=1").folder
    assert loss(export(run, f"out={tmp_path / 'out'}"), runs.shards) == pytest.approx(score(run)["loss"], abs=1e-6)


def test_the_same_export_again_does_nothing_and_another_is_refused(runs, tmp_path, capsys) -> None:
    out = f"out={tmp_path / 'out'}"
    folder = export(runs["32-true"], out)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert export(runs["32-true"], out, "dtype=float32") == folder
    assert "is there already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    for words in (("dtype=bfloat16",), ("ckpt=last", "dtype=float16")):
        with pytest.raises(UsageError, match="nothing is overwritten"):
            export(runs["32-true"], out, *words)
    with pytest.raises(UsageError, match="nothing is overwritten"):
        export(runs["64-true"], out)
    for there in (tmp_path / "file", tmp_path / "empty"):
        there.touch() if there.name == "file" else there.mkdir()
        with pytest.raises(UsageError, match="is there already"):
            export(runs["32-true"], f"out={there}")


def test_two_exports_are_equal_to_the_last_byte(runs, tmp_path) -> None:
    one, other = (export(runs["32-true"], f"out={tmp_path / name}") for name in ("one", "other"))
    assert sorted(path.name for path in one.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert all(path.read_bytes() == (other / path.name).read_bytes() for path in one.iterdir())
    assert all(path.stat().st_mode & 0o044 for path in one.iterdir())


def test_the_folder_is_in_the_run_when_none_is_named(runs) -> None:
    folder = export(runs["32-true"], "dtype=bfloat16")
    assert folder == runs["32-true"] / "exports" / "safetensors-bfloat16-step-00000003"
    origin, run = config_of(folder)["origin"], runs["32-true"]
    assert (origin["run"], origin["step"]) == (f"default/{run.name}", 3)
    assert origin["checkpoint"] == Checkpoint(list_checkpoints(run / "checkpoints")[-1]).hash
    assert origin["git_revision"] == json.loads((run / "provenance.json").read_text())["git_revision"]
    assert str(run.parent) not in (folder / "config.json").read_text()


def test_a_write_that_fails_leaves_nothing(runs, tmp_path, monkeypatch) -> None:
    def full(self: Tokenizer, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Tokenizer, "save", full)
    with pytest.raises(UsageError, match=r"out=.*cannot be written: No space left"):
        export(runs["32-true"], f"out={tmp_path / 'sub' / 'out'}")
    assert os.listdir(tmp_path / "sub") == []


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(runs, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 60, 40))
    with pytest.raises(UsageError, match=r"the weights need .* GB, 4e-08 GB are free"):
        export(runs["32-true"], f"out={tmp_path / 'sub' / 'out'}")
    assert not (tmp_path / "sub").exists()


def test_values_that_the_dtype_cannot_hold_are_refused(runs, tmp_path, monkeypatch) -> None:
    whole = PieceReader.read
    monkeypatch.setattr(
        PieceReader, "read", lambda self, name: whole(self, name) * (1e6 if name == "norm.weight" else 1)
    )
    with pytest.raises(UsageError, match=r"norm\.weight: holds values that are not finite in float16"):
        export(runs["32-true"], f"out={tmp_path / 'out'}", "dtype=float16")
    export(runs["32-true"], f"out={tmp_path / 'out'}", "dtype=bfloat16")


def test_other_weights_than_the_models_are_refused(runs, tmp_path) -> None:
    run = tmp_path / "runs" / "x" / "other"
    shutil.copytree(runs["32-true"], run)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("n_layer: 2", "n_layer: 3"))
    with pytest.raises(UsageError, match=r"missing blocks\.2\."):
        export(run, f"out={tmp_path / 'out'}")
    (run / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        export(run, f"out={tmp_path / 'out'}")
    assert not list(tmp_path.glob("*out*"))


def test_a_new_run_starts_from_an_export(runs, tmp_path) -> None:
    folder = export(runs["32-true"], f"out={tmp_path / 'out'}")
    words = ("trainer.max_steps=1", "optimizer.lr=1e-9", "model.tied=true", "callbacks.samples=null")
    again = fit(runs.shards, *words, f"weights={folder}")
    fresh = fit(runs.shards, *words)
    before = score(runs["32-true"])["loss"]
    assert again.summary["val/loss"] == pytest.approx(before, abs=1e-5)
    assert abs(fresh.summary["val/loss"] - before) > 0.1
