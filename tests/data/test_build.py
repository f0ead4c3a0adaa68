"""What becomes of documents: copies, splits, the tokenizer's sample, the report."""

import json
import logging
from itertools import chain

import numpy as np
import pytest

from lmforge.data import build as module
from lmforge.data import spool as spool_module
from lmforge.data.build import sample
from lmforge.data.documents import Document
from lmforge.data.shards import TokenShards, read_manifest
from lmforge.data.spool import Spool
from lmforge.data.tokenizer import Tokenizer
from texts import files_in, jsonl, names_of, prepared, some_text, texts_of


def test_a_folder_becomes_shards(corpus, cache, caplog):
    caplog.set_level(logging.INFO)
    folder = prepared(corpus, cache)
    names, texts, manifest = names_of(folder), texts_of(folder), read_manifest(folder)
    assert {split: len(part) for split, part in names.items()} == {"train": 26, "val": 3, "test": 1}
    for split, part in names.items():
        assert texts[split] == [(corpus / name).read_text() for name in part]
        assert manifest["splits"][split]["bytes"] == sum(len(text.encode()) for text in texts[split])
        assert manifest["splits"][split]["tokens"] == TokenShards.open(folder, split).n_tokens
    assert sorted(chain(*names.values())) == sorted(path.name for path in corpus.iterdir())


def test_copies_keep_their_first_and_a_second_pass_finds_none(tmp_path, cache):
    a, b, c = (some_text(i) for i in "abc")
    folder = prepared(jsonl(tmp_path / "x.jsonl", [a, a, a, b, c]), cache)
    manifest = read_manifest(folder)
    assert sorted(chain(*names_of(folder).values())) == ["x.jsonl:1", "x.jsonl:4", "x.jsonl:5"]
    assert manifest["dropped"]["exact_duplicates"] == 2
    assert manifest["dropped"]["exact_duplicate_groups"] == 1
    left = list(chain(*texts_of(folder).values()))
    assert sorted(left) == sorted([a, b, c])
    again = read_manifest(prepared(jsonl(tmp_path / "y.jsonl", left), cache))
    assert again["dropped"]["exact_duplicates"] == again["dropped"]["exact_duplicate_groups"] == 0


def test_near_copies_are_on_one_side(tmp_path, cache):
    texts = [some_text(i) for i in range(40)]
    texts += [text.replace("\n", f" more{i}\n") for i, text in enumerate(texts)]
    folder = prepared(jsonl(tmp_path / "x.jsonl", texts), cache)
    side = {int(name.split(":")[1]) - 1: split for split, names in names_of(folder).items() for name in names}
    assert len(set(side.values())) == 3
    assert all(side[i] == side[i + 40] for i in range(40))
    assert read_manifest(folder)["near_duplicates"] == {"documents": 80, "groups": 40, "jaccard": 0.4}


def test_how_a_file_was_saved_changes_no_token(tmp_path, cache):
    lines = [json.dumps({"text": some_text(i)}) for i in range(20)]
    saved = {"plain": ("", "\n"), "bom": ("\ufeff", "\n"), "windows": ("\ufeff", "\r\n")}
    manifests = []
    for name, (mark, end) in saved.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes((mark + end.join(lines)).encode())
        manifests.append(read_manifest(prepared(path, cache)))
    assert len({manifest["source_sha256"] for manifest in manifests}) == 3
    assert len({manifest["content_sha256"] for manifest in manifests}) == 1
    shards = [[part["shards"] for part in manifest["splits"].values()] for manifest in manifests]
    assert shards[0] == shards[1] == shards[2]
    jsonl(tmp_path / "other.jsonl", [some_text(i) for i in range(1, 21)])
    other = read_manifest(prepared(tmp_path / "other.jsonl", cache))
    assert other["content_sha256"] != manifests[0]["content_sha256"]


@pytest.mark.parametrize("count", [1, 2], ids=["one document", "near-copies of one"])
def test_a_single_document_is_cut(tmp_path, cache, count):
    text = "".join(some_text(i) for i in range(20))
    folder = prepared(jsonl(tmp_path / "x.jsonl", [text, text + "more\n"][:count]), cache)
    texts, manifest = texts_of(folder), read_manifest(folder)
    assert texts["train"][0] + texts["val"][0] == text
    assert texts["train"][0].endswith("\n")
    assert len(texts["val"][0]) == pytest.approx(len(text) / 10, rel=0.5)
    assert (len(texts["train"]), len(texts["val"]), len(texts["test"])) == (1, 1, 0)
    assert "x.jsonl:1, cut at character" in manifest["split_rule"]
    assert manifest["dropped"]["near_copies_of_the_only_document"] == count - 1


def test_articles_of_one_text_file_are_one_document_that_is_cut(tmp_path, cache):
    """The shape of WikiText's raw files: headings between equals signs, and marks such as @-@ that stay as they are."""
    articles = [f" = Title {i} = \n \n {some_text(i, 30)} @-@ <unk> @,@ \n \n" for i in range(20)]
    (tmp_path / "wiki.txt").write_text("".join(articles))
    texts = texts_of(prepared(tmp_path / "wiki.txt", cache))
    assert "".join([*texts["train"], *texts["val"]]) == "".join(articles)


@pytest.mark.parametrize("n", [2, 3, 7])
def test_few_documents(tmp_path, cache, n):
    folder = prepared(jsonl(tmp_path / "x.jsonl", [some_text(i) for i in range(n)]), cache)
    assert {split: len(names) for split, names in names_of(folder).items()} == {"train": n - 1, "val": 1, "test": 0}


def test_a_tokenizer_from_outside(corpus, cache, tmp_path, caplog):
    spec = json.loads(Tokenizer.train(["some text"], 258)._content)
    spec["normalizer"] = {"type": "NFC"}
    spec["added_tokens"] = [dict(spec["added_tokens"][1], id=258, content="<|endoftext|>")]
    del spec["model"]["vocab"]["w"]
    path = tmp_path / "given.json"
    path.write_text(json.dumps(spec))
    folder = prepared(corpus, cache, vocab_size=0, tokenizer=str(path))
    manifest = read_manifest(folder)
    assert (folder / "tokenizer.json").read_bytes() == path.read_bytes()
    assert manifest["vocab_size"] == 259
    assert manifest["tokenizer"]["end_of_text"] == "eos text eos"
    assert TokenShards.open(folder, "train").document(0)[[0, -1]].tolist() == [258, 258]
    lost = sum(path.read_text().count("w") for path in corpus.iterdir())
    assert manifest["dropped"]["bytes_without_token"] == lost
    assert f"no token for {lost} bytes" in caplog.text


@pytest.mark.parametrize(("highest", "dtype"), [(65535, "uint16"), (65536, "uint32")])
def test_the_type_of_the_ids_follows_the_vocabulary(corpus, cache, tmp_path, highest, dtype):
    spec = json.loads(Tokenizer.train(["some text"], 258)._content)
    spec["added_tokens"][1] = dict(spec["added_tokens"][1], id=highest)
    (tmp_path / "given.json").write_text(json.dumps(spec))
    folder = prepared(corpus, cache, tokenizer=str(tmp_path / "given.json"))
    assert (read_manifest(folder)["dtype"], read_manifest(folder)["vocab_size"]) == (dtype, highest + 1)
    assert TokenShards.open(folder, "train").document(0)[-1] == highest


def test_much_validation_text_has_no_reference(corpus, cache, monkeypatch):
    monkeypatch.setattr(module, "_COMPRESS_LIMIT", 3)
    manifest = read_manifest(prepared(corpus, cache))
    assert manifest["gzip_bits_per_byte"] is manifest["xz_bits_per_byte"] is None


def test_what_was_left_out_is_told(tmp_path, cache, caplog):
    caplog.set_level(logging.INFO)
    rows = [*(json.dumps({"text": some_text(i)}) for i in range(5)), '{"text": null}', "{}", "", '{"text": null}', "5"]
    (tmp_path / "x.jsonl").write_text("\n".join([*rows, rows[0]]))
    folder = prepared(tmp_path / "x.jsonl", cache, on_bad="lenient")
    manifest, report = read_manifest(folder), json.loads((folder / "dropped.json").read_text())
    assert report["bad_rows"] == manifest["bad_rows"]
    assert {reason: entry["count"] for reason, entry in report["bad_rows"].items()} == {
        "text_is_null": 2,
        "no_text_field": 1,
        "not_an_object": 1,
    }
    assert report["bad_rows"]["text_is_null"]["first"].startswith("x.jsonl:6: 'text' has to be a string")
    assert report["dropped"]["blank"] == report["dropped"]["exact_duplicates"] == 1
    (line,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert line.startswith("left out: ")
    for part in ("2 text_is_null", "1 no_text_field", "1 not_an_object", "1 blank", "1 exact_duplicates"):
        assert part in line
    assert not {"None", "nan", "null"} & {text.strip() for text in chain(*texts_of(folder).values())}


@pytest.mark.parametrize("part", [300, 3000])
def test_parts_change_no_byte(tmp_path, monkeypatch, part):
    path = jsonl(tmp_path / "x.jsonl", [some_text(i, 5 + i % 50) for i in [*range(60), *range(5)]])
    whole = files_in(prepared(path, tmp_path / "a"))
    monkeypatch.setattr(spool_module, "PART", part)
    assert files_in(prepared(path, tmp_path / "b")) == whole


def test_the_sample_is_spread_and_bounded(tmp_path, monkeypatch):
    def sampled(texts):
        spool = Spool(tmp_path / str(len(texts)))
        spool.folder.mkdir()
        list(spool.write((Document("n", text) for text in texts), lambda document: b""))
        return list(sample(spool, np.arange(len(texts))))

    monkeypatch.setattr(module, "SAMPLE", 50_000)
    monkeypatch.setattr(module, "_BLOCK", 100)
    texts = [chr(65 + i) * 10_000 for i in range(20)]
    found = sampled(texts)
    assert sum(map(len, found)) == pytest.approx(50_000, rel=0.01)
    assert {block[0] for block in found} == {text[0] for text in texts}
    assert sampled(["short"]) == ["short"]
    assert sampled(["a" * 150, "b"]) == ["a" * 100, "a" * 50, "b"]
