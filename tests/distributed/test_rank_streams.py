"""A streamed data set in whole runs: stopped or killed and resumed, it ends with the digits of one that was not."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from jobs import digits, last_checkpoint, stop_after, train_on

from fits import fit, killed
from lmforge.config.errors import UsageError
from lmforge.data.hub import StreamedData
from lmforge.data.stream import START
from lmforge.training.checkpoint import Checkpoint
from tiny import compose, metrics, new_run

pytest.importorskip("datasets")

WORDS = (
    "data=hub", "data.streaming=true", "data.val_documents=3", "data.shuffle_documents=5", "data.vocab_size=270",
    "batch.sequences=4", "batch.micro_sequences=1", "trainer.max_steps=12", "trainer.val_every_n_steps=6",
    "callbacks.checkpoint.every_n_steps=3", "callbacks.checkpoint.keep_last=9", "model.dropout=0.1",
)  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """21 documents, of which 18 are trained on: 12 updates read them three times over."""
    file = tmp_path_factory.mktemp("stream") / "train.jsonl"
    texts = [f"{k} " + "to be or not to be "[: 3 + k % 16] * (1 + k % 4) for k in range(21)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return (*WORDS, f"data.name={file}", f"paths.cache={file.parent / 'cache'}")


def forget_place() -> None:
    """A resumed run reads its documents from the start again."""
    StreamedData.go_on = _at_the_start  # type: ignore[method-assign]


def _at_the_start(data: StreamedData, step: int, position: Any) -> None:
    data.positions = {step: START}


def test_two_ranks_stopped_and_resumed(words) -> None:
    settings = compose(None, *words, "strategy=ddp")
    whole, parted, forgetful = (new_run(settings).path for _ in range(3))
    train_on(2, settings, whole)
    places = [last_checkpoint(whole).position(rank) for rank in range(2)]
    assert all(place["epoch"] >= 2 for place in places)
    assert places[0] != places[1]
    train_on(2, settings, parted, stop_after(5))
    assert last_checkpoint(parted).step == 5
    shutil.copytree(parted, forgetful, dirs_exist_ok=True)
    train_on(2, settings, parted)
    assert digits(parted) == digits(whole)
    train_on(2, settings, forgetful, forget_place)
    assert digits(forgetful) != digits(whole)
    with pytest.raises(UsageError, match=r"where each of 2 ranks was .* so 1 cannot go on"):
        fit(None, *words, "trainer.max_steps=14", folder=parted)


@pytest.mark.slow
def test_ranks_that_share_a_stream_go_on_apart(words) -> None:
    """Two readers with two tensor-parallel ranks each, then two readers alone: the losses of two ranks all the time."""
    wide = (*words, "model.n_kv_head=2", "model.dropout=0.0", "precision=64-true")
    apart, shared = compose(None, *wide, "strategy=ddp"), compose(None, *wide, "strategy=tensor", "trainer.devices=4")
    whole, parted = new_run(apart).path, new_run(shared).path
    train_on(2, apart, whole)
    train_on(4, shared, parted, stop_after(5))
    train_on(2, apart, parted)
    for ours, theirs in zip(metrics(parted, "train/loss"), metrics(whole, "train/loss"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


def test_killed_between_two_checkpoints(words, monkeypatch) -> None:
    whole = fit(None, *words).folder
    folder = killed(None, *words, step=8)
    assert last_checkpoint(folder).step == 6
    forgetful = Path(shutil.copytree(folder, folder.with_name("forgetful")))
    fit(None, *words, folder=folder)
    assert digits(folder) == digits(whole)
    assert len(metrics(folder, "val/loss")) == 12
    monkeypatch.setattr(StreamedData, "go_on", _at_the_start)
    fit(None, *words, folder=forgetful)
    assert digits(forgetful) != digits(whole)


@pytest.mark.parametrize(
    "found", ["[1]", '{"epoch": 0}', "{", '{"epoch":0,"block":0,"rows":{"x":1},"document":0,"token":0}']
)
def test_a_spoilt_place_is_a_corrupt_checkpoint(words, found: str) -> None:
    folder = fit(None, *words, "trainer.max_steps=3").folder
    checkpoint = last_checkpoint(folder).folder
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    place = Path(checkpoint / "data-00000.json")
    place.write_text(found)
    for entry in state["files"]:
        if entry["file"] == place.name:
            entry |= {"bytes": len(found), "sha256": hashlib.sha256(found.encode()).hexdigest()}
    (checkpoint / "state.json").write_text(json.dumps(state))
    assert Checkpoint(checkpoint).step == 3
    with pytest.raises(
        UsageError, match=r"corrupt checkpoint .*(data-00000.json|the position in the data)|not readable after row 0"
    ):
        fit(None, *words, folder=folder)
