"""Packed files."""

import gzip
import sys

import pytest
import zstandard

from lmforge.config.errors import UsageError
from lmforge.data.documents import Report
from texts import read_text

LINES = "".join(f'{{"text": "line {i}"}}\n' for i in range(5000)).encode()
PACK = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}


@pytest.mark.parametrize("packing", PACK)
def test_packed_is_read_as_plain(tmp_path, packing):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    middle = LINES.index(b"\n", len(LINES) // 2) - 3
    (tmp_path / f"a.jsonl{packing}").write_bytes(PACK[packing](LINES[:middle]) + PACK[packing](LINES[middle:]))
    plain, packed = (read_text(tmp_path / f"a.jsonl{suffix}") for suffix in ("", packing))
    assert [document.text for document in packed] == [document.text for document in plain]
    assert packed[-1].name == f"a.jsonl{packing}:5000"


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("lost", [1, 10, 1000])
def test_a_file_cut_short_is_no_end(tmp_path, packing, lost):
    path = tmp_path / f"a.jsonl{packing}"
    path.write_bytes(PACK[packing](LINES)[:-lost])
    with pytest.raises(UsageError, match=rf"a\.jsonl{packing}: the {packing} file ends in the middle"):
        read_text(path)
    report = Report(lenient=True)
    documents = read_text(path, report)
    assert documents == read_text_of_plain(tmp_path)[: len(documents)]
    (reason,) = report.bad_rows
    assert reason == {".gz": "truncated_gzip", ".zst": "truncated_zstd"}[packing]


def read_text_of_plain(folder):
    (folder / "plain").mkdir(exist_ok=True)
    (folder / "plain" / "a.jsonl").write_bytes(LINES)
    (name,) = (path.name for path in folder.glob("a.jsonl.*"))
    return [document._replace(name=f"{name}:{i}") for i, document in enumerate(read_text(folder / "plain"), 1)]


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("damage", ["not packed", "flipped"])
def test_a_damaged_file_is_named(tmp_path, packing, damage):
    path = tmp_path / f"a.txt{packing}"
    data = bytearray(PACK[packing](LINES))
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(LINES if damage == "not packed" else data)
    with pytest.raises(UsageError, match=rf"a\.txt{packing}: "):
        read_text(path)
    report = Report(lenient=True)
    assert read_text(path, report) == []
    assert sum(report.counts.values()) == 1


def test_the_position_follows_the_bytes_on_disk(tmp_path):
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(LINES))
    size = (tmp_path / "a.jsonl.gz").stat().st_size
    report = Report()
    from lmforge.data.sources import text_source

    seen = [report.position() for _ in text_source(str(tmp_path)).read(report)]
    assert seen == sorted(seen)
    assert 0 < seen[0] <= size < seen[-1] <= 2 * size
    assert report.position() == 2 * size


def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch):
    (tmp_path / "a.txt.zst").write_bytes(PACK[".zst"](b"a"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match=r"zstandard, .*: pip install -e '\.\[data\]'"):
        read_text(tmp_path)
