import json
from collections import Counter

import pytest

from lmforge.config.errors import UsageError
from lmforge.data.sources import (
    files_digest,
    stdlib_documents,
    stdlib_family,
    stdlib_files,
    text_documents,
    text_files,
)

RECORDS = [{"text": "one"}, {"text": "two\nlines"}, {"text": "three é"}]


def _jsonl(records, end="\n"):
    return end.join(json.dumps(record, ensure_ascii=False) for record in records) + end


def _texts(path):
    return [document.text for document in text_documents(str(path))]


def test_stdlib_holds_modules_and_no_tests():
    names = [file.name for file in stdlib_files()]
    assert len(names) > 400
    assert names == sorted(names)
    assert {"json/decoder.py", "argparse.py", "asyncio/tasks.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "_bundled"}


def test_stdlib_documents_skip_and_count(tmp_path):
    (tmp_path / "good.py").write_bytes("x = 'é'\r\n".encode())
    (tmp_path / "bad.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "empty.py").write_bytes(b"\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text("no")
    skipped = Counter()
    assert stdlib_documents(skipped, tmp_path) == [("good.py", "x = 'é'\n")]
    assert skipped == {"undecodable": 1, "empty": 1}


def test_families():
    assert [stdlib_family(name) for name in ("json/decoder.py", "json/tool.py", "argparse.py")] == [
        "json",
        "json",
        "argparse",
    ]


def test_blank_lines_are_no_records(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"}\n   \n{"text": "c"}')
    skipped = Counter()
    assert list(text_documents(str(path), skipped)) == [("a.jsonl:1", "a"), ("a.jsonl:3", "b"), ("a.jsonl:5", "c")]
    assert skipped == {"blank": 2}


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_way_a_file_was_saved_changes_nothing(tmp_path, mark, end):
    (tmp_path / "a.jsonl").write_bytes((mark + _jsonl(RECORDS, end)).encode())
    (tmp_path / "b.txt").write_bytes((mark + f"top{end}bottom{end}").encode())
    assert _texts(tmp_path) == ["one", "two\nlines", "three é", "top\nbottom\n"]


def test_file_folder_and_glob_find_the_same(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    for name in ("b.md", "a.txt", "deep/er/c.TXT", ".hidden/d.txt", "picture.png"):
        (tmp_path / name).write_text(name)
    assert [file.name for file in text_files(str(tmp_path))] == ["a.txt", "b.md", "deep/er/c.TXT"]
    assert [file.name for file in text_files(f"{tmp_path}/**/*.*")] == ["a.txt", "b.md", "deep/er/c.TXT"]
    assert [file.name for file in text_files(f"{tmp_path}/deep/er/c.TXT")] == ["c.TXT"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"body": "x"}', "no 'text' key"),
        (b'{"text": null}', "found null"),
        (b'{"text": 123}', "found int"),
        (b'{"text": ["a"]}', "found list"),
        (b"5", "object is expected"),
        (b'{"text": "cut', "broken JSON"),
        (b'{"text": "\\ud83d"}', "surrogate"),
        (b"[" * 100_000, "broken JSON"),
        (b'{"text": 1' + b"0" * 5000 + b"}", "limit"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, reason):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    with pytest.raises(UsageError) as caught:
        _texts(path)
    assert f"{path}:3: " in str(caught.value)
    assert reason in str(caught.value)


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes("é\nfine\n".encode() + b"caf\xe9\n")
    with pytest.raises(UsageError, match=r"bad\.txt:3: not UTF-8 \(byte 0xe9\)"):
        _texts(path)


@pytest.mark.parametrize("pattern", ["none.txt", "*.txt", "", "folder", "data.csv"])
def test_nothing_to_read_is_wrong_input(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "data.csv").write_text("a,b")
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
