import json
import os
import time

import pytest

from lmforge.config.errors import UsageError
from lmforge.data import files as module
from lmforge.data.files import INDEX, file_format, files_digest, stdlib_files, text_files


def test_stdlib_holds_modules_and_no_tests():
    names = [file.name for file in stdlib_files()]
    assert len(names) > 400
    assert names == sorted(names)
    assert {"json/decoder.py", "argparse.py", "asyncio/tasks.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "_bundled"}


def test_file_folder_and_glob_find_the_same(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    for name in ("b.md", "a.txt", "deep/er/c.TXT", "deep/d.jsonl.GZ", ".hidden/d.txt", "picture.png", "x.tar.gz"):
        (tmp_path / name).write_text(name)
    everything = ["a.txt", "b.md", "deep/d.jsonl.GZ", "deep/er/c.TXT"]
    assert [file.name for file in text_files(str(tmp_path))] == everything
    assert [file.name for file in text_files(f"{tmp_path}/**/*.*")] == everything
    assert [file.name for file in text_files(f"{tmp_path}/deep/er/c.TXT")] == ["c.TXT"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.txt", (".txt", "")),
        ("a.b.jsonl.gz", (".jsonl", ".gz")),
        ("a.CSV.zst", (".csv", ".zst")),
        ("a.parquet", (".parquet", "")),
        ("a.parquet.gz", ("", "")),
        ("a.gz", ("", "")),
        ("txt", ("", "")),
    ],
)
def test_a_name_tells_format_and_packing(tmp_path, name, expected):
    assert file_format(tmp_path / name) == expected


@pytest.mark.parametrize("pattern", ["none.txt", "*.txt", "", "folder", "data.xlsx"])
def test_nothing_to_read_is_wrong_input(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "data.xlsx").write_text("a,b")
    with pytest.raises(UsageError, match=r"data\.path"):
        text_files(pattern)


def test_digest_sees_every_byte_and_name(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("same")
    first = files_digest(text_files(str(tmp_path)))
    assert files_digest(text_files(str(path))) == first
    path.write_text("Same")
    assert files_digest(text_files(str(path))) != first
    path.write_text("same")
    path.rename(tmp_path / "b.txt")
    assert files_digest(text_files(str(tmp_path))) != first


@pytest.fixture
def read(monkeypatch):
    """Names of the files whose bytes were read."""
    names, content = [], module._content
    monkeypatch.setattr(module, "_content", lambda path: names.append(path.name) or content(path))
    return names


def _write(path, text, age=60.0):
    path.write_text(text)
    changed = time.time_ns() - int(age * 1e9)
    os.utime(path, ns=(changed, changed))


def test_unchanged_files_of_a_large_corpus_are_read_once(tmp_path, monkeypatch, read):
    monkeypatch.setattr(module, "_INDEX_FROM", 3)
    for name in ("a.txt", "b.txt"):
        _write(tmp_path / name, f"in {name}")
    files, cache = text_files(str(tmp_path)), tmp_path / "cache"
    first = files_digest(files, cache)
    assert files_digest(files, cache) == first == files_digest(files)
    assert read == ["a.txt", "b.txt"] * 2  # once for the index, once without one
    _write(tmp_path / "b.txt", "other text", age=50)
    assert files_digest(files, cache) != first
    assert read[4:] == ["b.txt"]


def test_a_file_changed_just_now_is_read_again(tmp_path, monkeypatch, read):
    monkeypatch.setattr(module, "_INDEX_FROM", 3)
    _write(tmp_path / "a.txt", "some text", age=0)
    files, cache = text_files(str(tmp_path)), tmp_path / "cache"
    files_digest(files, cache)
    files_digest(files, cache)
    assert read == ["a.txt", "a.txt"]


def test_a_small_corpus_is_read_each_time(tmp_path, read):
    _write(tmp_path / "a.txt", "some text")
    files, cache = text_files(str(tmp_path)), tmp_path / "cache"
    assert files_digest(files, cache) == files_digest(files, cache)
    assert read == ["a.txt", "a.txt"]
    assert not cache.exists()


def test_an_index_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_INDEX_FROM", 3)
    _write(tmp_path / "a.txt", "some text")
    files = text_files(str(tmp_path / "a.txt"))
    assert files_digest(files, tmp_path / "a.txt") == files_digest(files)


@pytest.mark.parametrize("content", ["", "[]", "{", json.dumps({"x": 1})])
def test_a_broken_index_is_as_good_as_none(tmp_path, monkeypatch, content):
    monkeypatch.setattr(module, "_INDEX_FROM", 3)
    _write(tmp_path / "a.txt", "some text")
    (tmp_path / INDEX).write_text(content)
    files = text_files(str(tmp_path / "a.txt"))
    assert files_digest(files, tmp_path) == files_digest(files)
