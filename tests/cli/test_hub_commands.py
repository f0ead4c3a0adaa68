"""data=hub and mixtures as commands: nothing is left behind, nothing is said at the end, wrong names end at once."""

import json
from pathlib import Path

import pytest

from commands import run_command, start_command

pytest.importorskip("datasets")

SMALL = [
    "python", "train.py", "data=hub", "data.name=set", "data.vocab_size=270", "precision=32-true", "optimizer=adamw",
    "batch.tokens=128", "model.context=32", "model.n_layer=1", "model.n_head=2", "model.n_kv_head=1",
    "model.d_model=32", "model.d_ff=64", "trainer.max_steps=3", "trainer.threads=1",
    "callbacks.samples=null", "paths.cache=cache",
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path) -> Path:
    place = tmp_path / "set"
    place.mkdir()
    for part in range(2):
        lines = [json.dumps({"text": f"{part} {k} to be or not to be " * 5}) + "\n" for k in range(60)]
        (place / f"train-{part}.jsonl").write_text("".join(lines))
    return place


@pytest.mark.parametrize("words", [("data.num_workers=2",), ("data.streaming=true", "data.val_documents=9")])
def test_neither_threads_nor_children_outlive_a_run(tmp_path, words) -> None:
    """The loader's workers are forked from a process in which `datasets` and its reader were at work."""
    running = start_command([*SMALL, *words], tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    outcome = running.finish()
    assert outcome.code == 0, outcome.output
    assert "Exception ignored" not in outcome.output
    assert "val/loss" in outcome.output
    assert not running.left_behind()


def test_wrong_names_are_wrong_input(tmp_path) -> None:
    for words, said in (
        (["data.name=nobody/nothing"], "data.name=nobody/nothing data.split=train: Couldn't reach"),
        (["data.split=test"], "Bad split: test. Available splits: ['train']"),
    ):
        outcome = run_command([*SMALL, *words], tmp_path, 60, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
        assert outcome.code == 2, outcome.output
        assert said in outcome.output


def test_a_mixture_of_a_data_set_and_text(tmp_path) -> None:
    (tmp_path / "notes").mkdir()
    for number in range(12):
        (tmp_path / "notes" / f"{number}.md").write_text(f"note {number}: " + "all that glitters is not gold " * 20)
    mix = ["data=mix", "data.sources.plays.name=set", "data.sources.plays.weight=3"]
    mix += ["data.sources.notes.path=notes", "data.sources.notes.weight=1"]
    words = [word for word in SMALL if not word.startswith(("data=", "data.name"))] + mix
    outcome = run_command(words, tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    assert outcome.code == 0, outcome.output
    assert "mixture     notes 0.25, plays 0.75 of the tokens (weights divided by 4)" in outcome.output
    assert "of which notes" in outcome.output
    (run,) = (tmp_path / "runs" / "default").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["data/plays/share"] == 0.75
    assert summary["val/notes/bits_per_byte"] > 0
    scored = run_command(["python", "evaluate.py", "run=latest", "paths.cache=cache"], tmp_path)
    assert scored.code == 0, scored.output
    (file,) = run.glob("evaluation-val-*.json")
    report = json.loads(file.read_text())
    assert report["plays/bits_per_byte"] > 0
    assert report["bits_per_byte"] > 0
