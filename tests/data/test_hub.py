"""data=hub on local data sets: as shards, and as a stream of which each rank reads its share."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builders import batch_plan
from lmforge.config.errors import UsageError
from lmforge.data.hub import StreamedData, hub_data
from lmforge.data.module import TokenWindows
from lmforge.data.shards import read_manifest

pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")

CONTEXT = 16
DEFAULTS = {
    "config": None, "split": "train", "revision": None, "text_key": "text", "on_bad": "strict", "streaming": False,
    "val_split": None, "val_documents": 4, "shuffle_documents": 8, "vocab_size": 270, "tokenizer": None,
    "context": CONTEXT,
}  # fmt: skip


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")


def text(number: int) -> str:
    return f"document {number} of many: " + " ".join(str(number * k) for k in range(number % 7 + 3))


@pytest.fixture
def folder(tmp_path) -> Path:
    """60 documents in three files."""
    place = tmp_path / "set"
    place.mkdir()
    for file in range(3):
        lines = [json.dumps({"text": text(20 * file + k), "other": k}) + "\n" for k in range(20)]
        (place / f"train-{file}.jsonl").write_text("".join(lines))
    return place


def opened(name: Path | str, cache: Path, world: int = 1, rank: int = 0, **more: Any) -> TokenWindows:
    data = hub_data(name=str(name), cache=cache, **{**DEFAULTS, **more})
    data.connect(batch_plan(4, world=world, context=CONTEXT), seed=5, samples=4 * 30)
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world)  # type: ignore[assignment]
    return data


def split_texts(data: TokenWindows, split: str) -> list[str]:
    shards = data.rows(split).shards
    assert data.tokenizer is not None
    return sorted(data.tokenizer.decode(shards.document(k)) for k in range(shards.n_documents))  # type: ignore[attr-defined]


def test_a_folder_a_file_and_parquet_become_shards(folder, tmp_path) -> None:
    data = opened(folder, tmp_path / "cache")
    everything = split_texts(data, "train") + split_texts(data, "val") + split_texts(data, "test")
    assert sorted(everything) == sorted(text(k) for k in range(60))
    assert opened(folder, tmp_path / "cache").folder == data.folder
    moved = opened(shutil.copytree(folder, tmp_path / "elsewhere" / "set"), tmp_path / "another-cache")
    assert moved.folder.name == data.folder.name
    assert moved.manifest == data.manifest
    table = pyarrow.table({"body": [text(k) for k in range(30)]})
    pyarrow.parquet.write_table(table, tmp_path / "one.parquet", row_group_size=7)
    one = opened(tmp_path / "one.parquet", tmp_path / "cache", text_key="body")
    assert sum(part["documents"] for part in one.manifest["splits"].values()) == 30
    with (folder / "train-0.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more", "other": 0}) + "\n")
    assert opened(folder, tmp_path / "cache").folder != data.folder


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"split": "vla"}, r"data.name=.* data.split=vla: Bad split: vla. Available splits: \['train'\]"),
        ({"config": "large"}, r"data.config=large data.split=train: BuilderConfig 'large' not found"),
        ({"text_key": "body"}, r"data.text_key=body: no such column in .*; it has text, other"),
        ({"text_key": "other"}, r":1: 'other' has to be a string, found number"),
        ({"name": "nobody/nothing"}, r"data.name=nobody/nothing data.split=train: Couldn't reach 'nobody/nothing'"),
        ({"name": "/set.py"}, r"data.name=.*: '.py' files are not read"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_what_cannot_be_read_is_said_at_once(folder, tmp_path, change, problem, streaming) -> None:
    (tmp_path / "set.py").write_text("raise SystemExit('code of a data set was run')")
    change = {**change, "streaming": streaming}
    name = change.pop("name", str(folder))
    with pytest.raises(UsageError, match=problem):
        opened(str(tmp_path / "set.py") if name == "/set.py" else name, tmp_path / "cache", **change)


def text_of(data: StreamedData, rank: int, world: int, count: int = 9000) -> str:
    stream = data._stream(rank, world, {"epoch": 0, "block": 0, "rows": None, "document": 0, "token": 0})
    ids = stream.take(count).ids[:-1]
    stream.close()
    assert data.tokenizer is not None
    return data.tokenizer.decode(ids)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_document_is_read_by_one_rank_and_none_that_is_scored(folder, tmp_path, world) -> None:
    found = []
    for rank in range(world):
        data = opened(folder, tmp_path / "cache", world, rank, streaming=True)
        assert isinstance(data, StreamedData)
        assert split_texts(data, "val") == sorted(text(k) for k in range(4))  # of every rank the same
        read = text_of(data, rank, world)  # several epochs
        found += [text(k) for k in range(60) if text(k) in read]
    assert sorted(found) == sorted(text(k) for k in range(4, 60))


def test_copies_of_scored_documents_are_not_trained_on(folder, tmp_path) -> None:
    with (folder / "train-2.jsonl").open("a") as file:
        file.write(json.dumps({"text": text(2), "other": 0}) + "\n")
    data = opened(folder, tmp_path / "cache", streaming=True)
    assert isinstance(data, StreamedData)
    assert text(2) not in text_of(data, 0, 1)


def test_another_split_can_be_scored_and_a_tokenizer_given(folder, tmp_path) -> None:
    unseen = [json.dumps({"text": f"never seen {k}", "other": k}) + "\n" for k in range(9)]
    (folder / "validation.jsonl").write_text("".join(unseen))
    (folder / "train-0.jsonl").write_text(json.dumps({"text": "alone", "other": 0}) + "\n")
    data = opened(folder, tmp_path / "cache", streaming=True, val_split="validation", val_documents=3)
    assert split_texts(data, "val") == [f"never seen {k}" for k in range(3)]
    assert data.epochs(0) == 0.0
    file = str(data.folder / "tokenizer.json")
    other = opened(folder, tmp_path / "cache", streaming=True, tokenizer=file, val_documents=2)
    assert other.manifest["tokenizer"] == data.manifest["tokenizer"]
    assert other.fingerprint != data.fingerprint
    with pytest.raises(UsageError, match=r"data.val_documents=41: .* has 41 documents to score and none is left"):
        opened(folder, tmp_path / "cache", streaming=True, val_documents=41)
    with pytest.raises(UsageError, match=r"model.vocab_size=269 is too small .*: 270 > 269"):
        data.check_vocabulary(269)


def test_windows_of_a_stream_have_the_shape_of_others(folder, tmp_path) -> None:
    data = opened(folder, tmp_path / "cache", streaming=True)
    loader = data.train_dataloader()
    windows = list(loader)
    assert len(windows) == len(loader) == 30
    assert all(window["samples"] == 4 for window in windows)
    assert all(batch["input_ids"].shape == (1, CONTEXT) for window in windows for batch in window["micro_batches"])
    assert sum(w["targets"] for w in windows) > 0.9 * 30 * 4 * CONTEXT
    assert read_manifest(data.folder)["splits"]["train"]["tokens"] == 0
    data.start = (7, 28)
    data.go_on(7, data.position(30))
    assert len(list(data.train_dataloader())) == 23
    data.positions = {}
    with pytest.raises(UsageError, match=r"checkpoint of step 7 does not hold where rank 0 was"):
        data.train_dataloader()
    with pytest.raises(UsageError, match=r"split=train: .* has no tokens in it; it has val"):
        data.scoring_loader("train")


def test_a_broken_row_on_the_way_is_wrong_input(folder, tmp_path) -> None:
    (folder / "train-2.jsonl").write_text(json.dumps({"another": 3}) + "\n")
    with pytest.raises(UsageError, match=r"data.name=.*: not readable after row 40: .*"):
        opened(folder, tmp_path / "cache")
    (folder / "train-2.jsonl").write_text(json.dumps({"text": None, "other": 3}) + "\n")
    with pytest.raises(UsageError, match=r"set:41: 'text' has to be a string, found null"):
        opened(folder, tmp_path / "cache")
    lenient = opened(folder, tmp_path / "cache", on_bad="lenient")
    assert lenient.manifest["dropped"]["text_is_null"] == 1
    assert len(split_texts(opened(folder, tmp_path / "cache", on_bad="lenient", streaming=True), "val")) == 4


def test_the_hub_is_asked_once(tmp_path, monkeypatch, caplog) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    asked: list[Any] = []

    def answer(error: Exception) -> None:
        def info(self: HfApi, name: str, **options: Any) -> None:
            asked.append(options["timeout"])
            raise error

        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(HfApi, "dataset_info", info)

    answer(HFValidationError("no such name"))
    with pytest.raises(UsageError, match=r"no such file or folder here, and from the Hub: no such name"):
        opened("nobody/nothing", tmp_path / "cache")
    answer(OSError("no route"))
    with pytest.raises(UsageError, match=r"Couldn't reach 'nobody/nothing'.*nor is there such a file or folder here"):
        opened("nobody/nothing", tmp_path / "cache", streaming=True)
    assert len(asked) == 2
    assert max(asked) <= 5.0
    assert "the Hub does not answer (OSError); only what was downloaded before is used" in caplog.text
