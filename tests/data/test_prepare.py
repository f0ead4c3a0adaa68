"""What decides whether prepared shards still fit, and what the call says."""

import json
import logging
import os
import re
import subprocess
import sys

import pytest

from lmforge.config.errors import UsageError
from lmforge.data import build, prepare
from lmforge.data.store import NotPrepared
from lmforge.data.tokenizer import Tokenizer
from texts import files_in, jsonl, names_of, prepared, some_text


def test_it_says_what_it_did(corpus, cache, caplog):
    caplog.set_level(logging.INFO)
    folder = prepared(corpus, cache)
    first, line = [record.getMessage() for record in caplog.records]
    assert first == "preparing data=text (once)"
    assert re.search(r"prepared data=text: 30 documents \(26 train, 3 val, 1 test\), \d+ tokens.* s,", line)
    assert line.endswith(str(folder))


def test_warm_is_the_same_folder_untouched(corpus, cache, caplog):
    folder = prepared(corpus, cache)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    caplog.set_level(logging.INFO)
    assert prepared(f"{corpus}/*.txt", cache) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert caplog.records == []


def test_who_may_not_make_shards_is_told_where_they_would_be(corpus, cache):
    with pytest.raises(NotPrepared) as missing:
        prepared(corpus, cache, make=False)
    assert not cache.exists()
    folder = prepared(corpus, cache)
    assert missing.value.folder == folder == prepared(corpus, cache, make=False)


def test_everything_that_decides_the_result_is_in_the_key(corpus, cache):
    first = prepared(corpus, cache)
    others = [
        prepared(corpus, cache, vocab_size=301),
        prepared(corpus, cache, tokenizer=str(first / "tokenizer.json")),
        prepared(corpus, cache, on_bad="lenient"),
        prepared(corpus, cache, text_key="body"),
    ]
    path = corpus / "00.txt"
    path.write_text(path.read_text().replace("word", "wore", 1))
    others.append(prepared(corpus, cache))
    assert len({first, *others}) == 6


def test_a_small_file_rewritten_in_the_same_instant_is_noticed(corpus, cache):
    """Its size and time are as before; a new process reads every byte."""
    path, first = corpus / "00.txt", prepared(corpus, cache)
    stat = path.stat()
    path.write_text(path.read_text().replace("word", "wore", 1))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    code = (
        "import sys, pathlib\nfrom texts import prepared\n"
        "print(prepared(sys.argv[1], pathlib.Path(sys.argv[2]), make=False))"
    )
    environment = os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(__file__))}
    command = [sys.executable, "-c", code, str(corpus), str(cache)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "NotPrepared" in found.stderr
    assert first.name not in found.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_caches_and_processes_change_no_byte(corpus, tmp_path, workers):
    first = prepared(corpus, tmp_path / "a")
    again = prepared(corpus, tmp_path / "b", workers=workers)
    assert again.name == first.name
    assert files_in(again) == files_in(first)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vocab_size": 20}, r"data\.vocab_size=20"),
        ({"tokenizer": "none.json"}, r"data\.tokenizer=none\.json"),
        ({"path": "none.txt"}, r"data\.path=none\.txt"),
        ({"path": "blank.txt"}, r"no document with text \(left out: 1 empty\)"),
        ({"path": "x.txt"}, r"x\.txt, is too short"),
        ({"path": "bad.jsonl"}, r"bad\.jsonl:2: broken JSON"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_wrong_input_leaves_nothing(corpus, cache, monkeypatch, given, message, workers):
    monkeypatch.chdir(corpus.parent)
    (corpus.parent / "blank.txt").write_text(" \n")
    (corpus.parent / "x.txt").write_text("x")
    (corpus.parent / "bad.jsonl").write_text('{"text": "fine"}\nbroken\n')
    with pytest.raises(UsageError, match=message):
        prepared(**({"path": "corpus", "workers": workers} | given), cache=cache)
    assert not list(cache.glob("tokens/*/"))


def test_a_tokenizer_without_an_end_is_wrong_input(corpus, cache, tmp_path):
    spec = json.loads(Tokenizer.train(["some text"], 258)._content)
    spec["added_tokens"] = []
    (tmp_path / "given.json").write_text(json.dumps(spec))
    with pytest.raises(UsageError, match=r"data\.tokenizer=.*no end-of-text token.*<\|endoftext\|>"):
        prepared(corpus, cache, tokenizer=str(tmp_path / "given.json"))


def test_files_that_change_while_another_process_is_waited_for(corpus, cache, monkeypatch):
    clean_up = prepare.store.remove_leftovers

    def meanwhile(root):
        (corpus / "00.txt").write_text("changed")
        clean_up(root)

    monkeypatch.setattr(prepare.store, "remove_leftovers", meanwhile)
    with pytest.raises(UsageError, match="changed while"):
        prepared(corpus, cache)
    assert not list(cache.glob("tokens/*/"))


def test_files_that_change_while_they_are_read(corpus, cache, monkeypatch):
    read = build.Spool.write

    def meanwhile(*arguments):
        (corpus / "00.txt").write_text("changed")
        return read(*arguments)

    monkeypatch.setattr(build.Spool, "write", meanwhile)
    with pytest.raises(UsageError, match="changed while"):
        prepared(corpus, cache)
    assert not list(cache.glob("tokens/*/"))


def test_the_order_is_that_of_the_files_and_rows(tmp_path, cache):
    jsonl(tmp_path / "x.jsonl", [some_text(i) for i in range(120)])
    train = names_of(prepared(tmp_path / "x.jsonl", cache))["train"]
    rows = [int(name.split(":")[1]) for name in train]
    assert rows == sorted(rows)


def test_torch_is_never_imported():
    code = (
        "import sys, lmforge.data.corpora, lmforge.data.command, lmforge.data.missing\n"
        "sys.exit(bool({'torch', 'tokenizers', 'pyarrow', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
