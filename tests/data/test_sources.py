import pytest

from lmforge.config.errors import UsageError
from lmforge.data.documents import Document, Report
from lmforge.data.sources import own_family, stdlib_family, text_source, text_targets
from texts import stdlib_documents


def test_stdlib_documents_skip_and_count(tmp_path):
    (tmp_path / "good.py").write_bytes("x = 'é'\r\n".encode())
    (tmp_path / "bad.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "empty.py").write_bytes(b"\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text("no")
    report = Report(lenient=True)
    assert stdlib_documents(tmp_path, report) == [("good.py", "x = 'é'\n")]
    assert report.counts == {"not_utf8": 1, "empty": 1}


def test_families():
    assert [stdlib_family(name) for name in ("json/decoder.py", "json/tool.py", "argparse.py")] == [
        "json",
        "json",
        "argparse",
    ]
    assert own_family(Document("a", "text")) == own_family(Document("b", "text")) != own_family(Document("a", "Text"))


@pytest.mark.parametrize("n", [1, 5, 10, 100, 1000, 10**6])
def test_few_documents_judge(n):
    val, test = text_targets(n)
    assert 1 <= val <= max(1, n // 10)
    assert test <= n // 20


def test_how_rows_are_read_is_part_of_a_source_only_where_it_was_chosen(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    path = str(tmp_path / "a.txt")
    sources = [text_source(path), text_source(path, "body"), text_source(path, "text", "lenient")]
    assert sources[0].identity == ""
    assert len({source.identity for source in sources}) == 3
    assert [source.lenient for source in sources] == [False, False, True]
    assert [source.size for source in sources] == [4] * 3


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(UsageError, match=r"a\.txt"):
        text_source(str(tmp_path / "a.txt"))
