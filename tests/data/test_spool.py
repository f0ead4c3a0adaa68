import numpy as np
import pytest

from lmforge.config.errors import UsageError
from lmforge.data import spool as module
from lmforge.data.documents import Document
from lmforge.data.spool import Spool

DOCUMENTS = [Document(f"n{i}", f"text é {i}" * (i + 1)) for i in range(20)]


@pytest.fixture
def spool(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PART", 200)
    return Spool(tmp_path)


def _write(spool, documents=DOCUMENTS):
    return list(spool.write(iter(documents), lambda document: document.name.encode(), lambda: {"said": 1}))


def test_what_goes_in_comes_out_in_order(spool):
    parts = _write(spool)
    assert len(parts) > 5
    assert parts == list(range(spool.parts))
    texts = [text for part in parts for text in spool.texts(part)]
    assert texts == [document.text for document in DOCUMENTS]
    assert [spool.text(i) for i in range(20)] == texts
    assert [spool.name(i) for i in range(20)] == [document.name for document in DOCUMENTS]
    assert spool.done == {"parts": len(parts), "said": 1}
    assert spool.starts.tolist()[0] == 0
    assert spool.starts.tolist()[-1] == 20


def test_facts(spool):
    _write(spool, [*DOCUMENTS, DOCUMENTS[3]])
    facts = spool.facts
    assert facts["bytes"].tolist()[:20] == [len(document.text.encode()) for document in DOCUMENTS]
    assert facts["characters"].tolist()[:20] == [len(document.text) for document in DOCUMENTS]
    assert facts["key"].tolist()[:20] == [document.name.encode() for document in DOCUMENTS]
    assert len(np.unique(facts["digest"])) == 20
    assert facts["digest"][20] == facts["digest"][3]


def test_many_small_documents_end_a_part_too(spool, monkeypatch):
    monkeypatch.setattr(module, "PART_DOCUMENTS", 3)
    _write(spool, [Document("n", "x")] * 7)
    assert np.diff(spool.starts).tolist() == [3, 3, 1]


def test_wanted_texts_only(spool):
    _write(spool)
    part = next(p for p in range(spool.parts) if len(spool.load(p, "facts")) > 2)
    assert list(spool.texts(part, [2, 0])) == [list(spool.texts(part))[i] for i in (2, 0)]


def test_whole_parts_are_not_written_again(spool):
    _write(spool)
    before = {path.name: path.stat().st_mtime_ns for path in spool.folder.iterdir()}
    (spool.folder / module.DONE).unlink()
    spool.path(1, "facts.npy").unlink()  # as if killed before the end of this part
    cut = spool.path(2, "text")
    cut.write_bytes(cut.read_bytes()[:-1])
    assert _write(Spool(spool.folder)) == list(range(spool.parts))
    after = {path.name: path.stat().st_mtime_ns for path in spool.folder.iterdir()}
    changed = {name.split(".")[0] for name in before if after[name] != before[name]}
    assert changed == {"00001", "00002", "read"}
    assert [Spool(spool.folder).text(i) for i in range(20)] == [document.text for document in DOCUMENTS]


@pytest.mark.parametrize("change", ["text", "name", "size of parts"])
def test_other_documents_than_before_are_noticed(spool, monkeypatch, change):
    _write(spool)
    (spool.folder / module.DONE).unlink()
    others = list(DOCUMENTS)
    if change == "size of parts":
        monkeypatch.setattr(module, "PART", 300)
    else:
        others[0] = Document("n0", "longer text") if change == "text" else others[0]._replace(name="other")
    with pytest.raises(UsageError, match="not those the killed call began with"):
        _write(Spool(spool.folder), others)
