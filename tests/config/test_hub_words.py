"""The words of data=hub, checked before anything is read."""

import sys

import pytest

from lmforge.config.errors import UsageError

STREAM = ("data=hub", "data.name=set.jsonl", "data.streaming=true")


@pytest.fixture(autouse=True)
def place(tmp_path):
    (tmp_path / "set.jsonl").write_text("")


def test_a_name_of_the_hub_stays_and_a_local_one_becomes_absolute(compose, tmp_path):
    assert compose.plan("data=hub", "data.name=owner/some-set").plain["data"]["name"] == "owner/some-set"
    assert compose.plan(*STREAM).plain["data"]["name"] == str(tmp_path / "set.jsonl")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("data=hub",), r"data.name must be given"),
        (("data=hub", "data.name=./nothing"), r"data.name=./nothing: no such file or folder"),
        (("data=hub", "data.name=sett.jsonl"), r"data.name=sett.jsonl: no such file or folder"),
        (("data=hub", "data.name=a/b/c"), r"data.name=a/b/c: no such file or folder"),
        (("data=hub", "data.name=set.jsonl", "data.revision=v1"), r"data.revision=v1: .*set.jsonl lies here"),
        (
            ("data=hub", "data.name=a/b", "data.val_split=validation"),
            r"data.val_split=validation: for data.streaming=true",
        ),
        ((*STREAM, "data.num_workers=2"), r"data.num_workers=2: a stream is read by the training process itself"),
        ((*STREAM, "data.limit_train_rows=9"), r"data.limit_train_rows=9: a stream .*data.limit_train_rows=null"),
        ((*STREAM, "trainer.max_epochs=1"), r"type trainer.max_steps=NUMBER, and trainer.max_epochs=null"),
        ((*STREAM, "data.shuffle_documents=0"), r"data.shuffle_documents=0: not allowed"),
        ((*STREAM, "data.trust_remote_code=true"), r"unknown key data.trust_remote_code"),
        ((*STREAM, "data.path=x"), r"data.path is a key of data=text, data=tokens only"),
    ],
)
def test_what_is_wrong_is_said_by_key(compose, words, problem):
    with pytest.raises(UsageError, match=problem):
        compose.plan(*words)


def test_a_missing_library_is_named_with_its_extra(compose, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"data=hub: needs the package datasets, .*: pip install -e '.\[data\]'"):
        compose.plan(*STREAM)


def test_a_stream_is_resumed_with_its_own_words(compose):
    run = compose.run(*STREAM)
    assert compose.plan(f"resume={run.path}", "trainer.max_steps=9").plain["data"]["streaming"] is True
    for word in ("data.shuffle_documents=7", "data.val_documents=7", "data.streaming=false"):
        with pytest.raises(UsageError, match=r"this cannot change on resume"):
            compose.plan(f"resume={run.path}", word)
