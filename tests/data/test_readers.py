"""Text files and JSON lines, clean and dirty."""

import json
import sys

import pytest

from lmforge.config.errors import UsageError
from lmforge.data import readers
from lmforge.data.documents import Report
from texts import read_text

RECORDS = [{"text": "one"}, {"text": "two\nlines"}, {"text": "three é"}]
BAD_ROWS = [
    (b'{"text": "\xff"}', "not_utf8", "not UTF-8"),
    (b'{"body": "x"}', "no_text_field", "no 'text' key; keys here: body"),
    (b'{"text": null}', "text_is_null", "found null"),
    (b'{"text": 123}', "text_is_number", "found number"),
    (b'{"text": NaN}', "text_is_number", "found number"),
    (b'{"text": true}', "text_is_boolean", "found boolean"),
    (b'{"text": ["a"]}', "text_is_list", "found list"),
    (b'{"text": {"a": 1}}', "text_is_object", "found object"),
    (b"5", "not_an_object", "object is expected"),
    (b"null", "not_an_object", "object is expected"),
    (b'{"text": "cut', "broken_json", "broken JSON"),
    (b"[" * 100_000, "broken_json", "broken JSON"),
    (b'{"text": 1' + b"0" * 5000 + b"}", "broken_json", "limit"),
]


def _jsonl(records, end="\n"):
    return end.join(json.dumps(record, ensure_ascii=False) for record in records) + end


def _texts(path, report=None):
    return [document.text for document in read_text(path, report)]


def test_blank_lines_are_no_records(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"}\n   \n{"text": "c"}')
    report = Report()
    assert read_text(path, report) == [("a.jsonl:1", "a"), ("a.jsonl:3", "b"), ("a.jsonl:5", "c")]
    assert report.counts == {"blank": 2}


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_way_a_file_was_saved_changes_nothing(tmp_path, mark, end):
    (tmp_path / "a.jsonl").write_bytes((mark + _jsonl(RECORDS, end)).encode())
    (tmp_path / "b.txt").write_bytes((mark + f"top{end}bottom{end}").encode())
    assert _texts(tmp_path) == ["one", "two\nlines", "three é", "top\nbottom\n"]


@pytest.mark.parametrize(("line", "reason", "why"), BAD_ROWS)
def test_a_bad_line_is_named_or_counted(tmp_path, line, reason, why):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine too"}\n')
    with pytest.raises(UsageError) as caught:
        _texts(path)
    assert f"{path}:3: " in str(caught.value)
    assert why in str(caught.value)
    report = Report(lenient=True)
    assert _texts(path, report) == ["fine", "fine too"]
    assert report.counts == {"blank": 1, reason: 1}
    assert report.bad_rows[reason]["first"].startswith("bad.jsonl:3: ")
    assert why in report.bad_rows[reason]["first"]


def test_every_bad_row_is_counted_once(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(
        b"\n".join([b'{"text": "fine"}', *(line for line, _, _ in BAD_ROWS), b'{"text": "the end is miss'])
    )
    report = Report(lenient=True)
    assert _texts(path, report) == ["fine"]
    assert sum(report.counts.values()) == len(BAD_ROWS) + 1
    assert report.counts["broken_json"] == 4
    assert report.counts["text_is_number"] == 2
    assert report.bad_rows["text_is_number"]["first"].startswith("bad.jsonl:5:")


def test_what_is_odd_but_text_is_kept(tmp_path):
    (tmp_path / "odd.jsonl").write_text(
        '{"text": "first", "text": "last of two keys"}\n'
        '{"text": "nan beside", "score": NaN, "more": [Infinity]}\n'
        '{"text": "control \\u0000 and \\u0008"}\n'
        '{"text": "pair \\ud83d\\ude00"}\n'
        '{"text": "half \\ud83d of a pair"}\n'
        '{"text": "raw \u2028 and \x85"}\n'
        '{"text": "a lone \\r stays, \\r\\n does not"}\n'
        '{"text": " \\n "}\n'
    )
    report = Report()
    assert _texts(tmp_path, report) == [
        "last of two keys",
        "nan beside",
        "control \0 and \b",
        "pair \U0001f600",
        "half \ufffd of a pair",
        "raw \u2028 and \x85",
        "a lone \r stays, \n does not",
    ]
    assert report.counts == {"empty": 1}


def test_another_key_can_hold_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "no", "body": "yes"}\n')
    assert read_text(tmp_path, key="body") == [("a.jsonl:1", "yes")]
    with pytest.raises(UsageError, match=r"no 'x' key; keys here: text, body; data\.text_key names"):
        read_text(tmp_path, key="x")


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes("é\nfine\n".encode() + b"caf\xe9\n")
    with pytest.raises(UsageError, match=r"bad\.txt:3: not UTF-8 \(byte 0xe9\)"):
        _texts(path)
    report = Report(lenient=True)
    assert _texts(path, report) == []
    assert report.counts == {"not_utf8": 1}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a" * 40, [("big.txt", "a" * 40)]),
        ("a\n\nb\n" * 9, [("big.txt:1", "a\n\nb\n" * 7 + "a\n\n"), ("big.txt:24", "b\n" + "a\n\nb\n")]),
        ("a" * 30 + "\n" + "b" * 20, [("big.txt:1", "a" * 30 + "\n"), ("big.txt:2", "b" * 20)]),
        ("é" * 30, [("big.txt:1", "é" * 20), ("big.txt:1", "é" * 10)]),
        ("a" + "é" * 30, [("big.txt:1", "a" + "é" * 19), ("big.txt:1", "é" * 11)]),
    ],
)
def test_a_large_text_file_is_cut_between_paragraphs(tmp_path, monkeypatch, text, pieces):
    monkeypatch.setattr(readers, "WHOLE", 40)
    for way in (text, "\ufeff" + text, text.replace("\n", "\r\n")):
        (tmp_path / "big.txt").write_text(way, newline="")
        assert read_text(tmp_path) == pieces


def test_documents_come_one_by_one(tmp_path):
    """A reader that held them all would have read the bad line before it gave the first document."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nbroken\n')
    from lmforge.data.sources import text_source

    documents = iter(text_source(str(tmp_path)).read(Report()))
    assert next(documents).text == "a"
    with pytest.raises(UsageError):
        next(documents)


def test_optional_libraries_are_not_imported_for_plain_files(tmp_path):
    import subprocess

    (tmp_path / "a.txt").write_text("a")
    code = (
        "import sys\nfrom lmforge.data.documents import Report\nfrom lmforge.data.sources import text_source\n"
        "list(text_source(sys.argv[1]).read(Report()))\nsys.exit(bool({'pyarrow', 'zstandard'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
