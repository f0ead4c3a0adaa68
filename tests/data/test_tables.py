"""Tables: csv, tsv and parquet."""

import csv
import sys

import pyarrow
import pytest
from pyarrow import parquet

from lmforge.config.errors import UsageError
from lmforge.data import readers
from lmforge.data.documents import Report
from texts import read_text


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv(tmp_path, mark, end):
    rows = ["text,n", '"quoted, with ""marks""",1', f'"two{end}lines",2', "", "plain é,3", ",4"]
    (tmp_path / "a.csv").write_bytes((mark + end.join(rows) + end).encode())
    report = Report()
    assert read_text(tmp_path, report) == [
        ("a.csv:1", 'quoted, with "marks"'),
        ("a.csv:2", "two\nlines"),
        ("a.csv:4", "plain é"),
    ]
    assert report.counts == {"blank": 1, "empty": 1}


def test_tsv_and_another_column(tmp_path):
    (tmp_path / "a.tsv").write_text("id\tbody\n1\ta, b\n2\tnan\n")
    assert read_text(tmp_path, key="body") == [("a.tsv:1", "a, b"), ("a.tsv:2", "nan")]


@pytest.mark.parametrize(
    ("row", "reason", "why"),
    [
        (b"1", "no_text_field", "the row has 1 fields"),
        (b"1,caf\xe9", "not_utf8", "not UTF-8 (byte 0xe9)"),
        (b'1,"a"b', "broken_csv", "broken row"),
        (b"1,half a text, and the rest", "broken_csv", "the row has 3 fields, the header 2"),
    ],
)
def test_a_bad_row_is_named_or_counted(tmp_path, row, reason, why):
    path = tmp_path / "a.csv"
    path.write_bytes(b"n,text\n0,first\n" + row + b"\n2,last\n")
    with pytest.raises(UsageError) as caught:
        read_text(path)
    assert f"{path}:2: " in str(caught.value)
    assert why in str(caught.value)
    report = Report(lenient=True)
    assert [document.text for document in read_text(path, report)] == ["first", "last"]
    assert report.counts == {reason: 1}


def test_commas_at_the_end_of_rows_are_no_text(tmp_path):
    (tmp_path / "a.csv").write_text("n,text\n0,first,\n1,last,,\n")
    assert [text for _, text in read_text(tmp_path)] == ["first", "last"]


def test_a_quote_that_is_never_closed_does_not_swallow_the_file_in_silence(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text('text\nfirst\n"open\n' + "more\n" * 1000)
    report = Report(lenient=True)
    assert [document.text for document in read_text(path, report)] == ["first"]
    assert report.counts == {"broken_csv": 1}
    monkeypatch.setattr(readers, "_CELL", 100)
    with pytest.raises(UsageError, match=r"a\.csv:2: broken row \(field larger than field limit"):
        read_text(path)
    assert csv.field_size_limit() > 100


def test_a_header_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"text,n\rold line ends,1\r")
    with pytest.raises(UsageError, match=r"a\.csv: broken header"):
        read_text(tmp_path)


def test_a_missing_column_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match=r"a\.csv: no column 'text'; columns: a, b; data\.text_key"):
        read_text(tmp_path)
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(UsageError, match=r"no column 'text'; columns: none, the file is empty;"):
        read_text(tmp_path / "empty.csv")
    (tmp_path / "empty.csv").unlink()
    (tmp_path / "b.csv").write_text("text\nfine\n")
    report = Report(lenient=True)
    assert [document.text for document in read_text(tmp_path, report)] == ["fine"]
    assert report.counts == {"no_text_column": 1}


def _parquet(path, values, kind=None, **options):
    parquet.write_table(pyarrow.table({"n": range(len(values)), "text": pyarrow.array(values, kind)}), path, **options)


@pytest.mark.parametrize(
    "kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int8(), "string")]
)
def test_parquet(tmp_path, kind):
    _parquet(tmp_path / "a.parquet", ["a\r\nb", None, " ", "\ufeffc"], kind, row_group_size=3)
    report = Report(lenient=True)
    assert read_text(tmp_path, report) == [("a.parquet:1", "a\nb"), ("a.parquet:4", "c")]
    assert report.counts == {"empty": 1, "text_is_null": 1}
    assert report.position() == (tmp_path / "a.parquet").stat().st_size
    with pytest.raises(UsageError, match=r"a\.parquet:2: 'text' has to be a string, found null"):
        read_text(tmp_path)


@pytest.mark.parametrize(
    ("values", "reason"),
    [([1, 2], "text_is_number"), ([1.5, float("nan")], "text_is_number"), ([["a"], ["b"]], "text_is_list")],
)
def test_a_column_that_is_no_text(tmp_path, values, reason):
    _parquet(tmp_path / "a.parquet", values)
    report = Report(lenient=True)
    assert read_text(tmp_path, report) == []
    assert report.counts == {reason: 2}


def test_parquet_with_bytes_that_are_no_text(tmp_path):
    broken = pyarrow.array([b"fine", b"caf\xe9", b"too"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "a.parquet")
    report = Report(lenient=True)
    assert [document.text for document in read_text(tmp_path, report)] == ["fine", "too"]
    assert report.counts == {"not_utf8": 1}


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    _parquet(path, ["a"] * 100)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UsageError, match=r"a\.parquet: not a sound parquet file"):
        read_text(path)
    report = Report(lenient=True)
    assert read_text(path, report) == []
    assert report.counts == {"broken_parquet": 1}


def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pyarrow, .*: pip install -e '\.\[data\]'"):
        read_text(tmp_path)
