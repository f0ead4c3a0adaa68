import gzip
import json
import logging
import lzma
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from itertools import chain, combinations

import numpy as np
import pytest

from lmforge.config.errors import UsageError
from lmforge.data import prepare
from lmforge.data.duplicates import near_duplicates
from lmforge.data.prepare import prepare_stdlib, prepare_text, xz_size
from lmforge.data.shards import TokenShards, read_manifest
from lmforge.data.sources import stdlib_documents, stdlib_family
from lmforge.data.tokenizer import Tokenizer

WORDS = [f"word{i}" for i in range(500)]


def _text(seed, n=60):
    return " ".join(random.Random(seed).choices(WORDS, k=n)) + "\n"


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02d}.txt").write_text(_text(i))
    return folder


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def _names(folder):
    return json.loads((folder / "documents.json").read_text())


def _texts(folder):
    """The text of every document by split, decoded from the shards, marks checked."""
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    found = {}
    for split in read_manifest(folder)["splits"]:
        shards = TokenShards.open(folder, split)
        documents = [shards.document(i) for i in range(shards.n_documents)]
        assert all((d[0], d[-1]) == (tokenizer.bos, tokenizer.eos) for d in documents)
        found[split] = [tokenizer.decode(d) for d in documents]
    return found


def test_a_folder_becomes_shards(corpus, cache, caplog):
    caplog.set_level(logging.INFO)
    folder = prepare_text(str(corpus), 300, None, cache)
    names, texts, manifest = _names(folder), _texts(folder), read_manifest(folder)
    assert {split: len(part) for split, part in names.items()} == {"train": 26, "val": 3, "test": 1}
    for split, part in names.items():
        assert texts[split] == [(corpus / name).read_text() for name in part]
        assert manifest["splits"][split]["bytes"] == sum(len(text.encode()) for text in texts[split])
        assert manifest["splits"][split]["tokens"] == TokenShards.open(folder, split).n_tokens
    assert sorted(chain(*names.values())) == sorted(path.name for path in corpus.iterdir())
    first, line = [record.getMessage() for record in caplog.records]
    assert first == "preparing data=text (once; some seconds)"
    assert re.search(r"prepared data=text: 30 documents \(26 train, 3 val, 1 test\), \d+ tokens.* s,", line)


def test_compression_reference_is_per_file(corpus, cache):
    folder = prepare_text(str(corpus), 300, None, cache)
    files = [text.encode() for text in _texts(folder)["val"]]
    manifest, total = read_manifest(folder), sum(map(len, files))
    assert len(files) > 1
    assert manifest["gzip_bits_per_byte"] == 8 * sum(len(gzip.compress(data, 9)) for data in files) / total
    assert manifest["xz_bits_per_byte"] == 8 * sum(len(lzma.compress(data, preset=9)) for data in files) / total
    assert manifest["xz_bits_per_byte"] != 8 * len(lzma.compress(b"".join(files), preset=9)) / total


@pytest.mark.parametrize("n", [0, 1, 5000, 70_000])
def test_a_small_dictionary_gives_the_size_of_xz(n):
    data = _text(0, 1 + n // 7).encode()[:n]
    assert xz_size(data) == len(lzma.compress(data, preset=9))


def test_much_validation_text_has_no_reference(monkeypatch):
    monkeypatch.setattr(prepare, "_COMPRESS_LIMIT", 3)
    assert prepare._compression([b"1234"]) == {"gzip_bits_per_byte": None, "xz_bits_per_byte": None}


def test_warm_is_the_same_folder_untouched(corpus, cache, caplog):
    folder = prepare_text(str(corpus), 300, None, cache)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    caplog.set_level(logging.INFO)
    assert prepare_text(f"{corpus}/*.txt", 300, None, cache) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert caplog.records == []


def test_everything_that_decides_the_result_is_in_the_key(corpus, cache, tmp_path):
    first = prepare_text(str(corpus), 300, None, cache)
    others = [
        prepare_text(str(corpus), 301, None, cache),
        prepare_text(str(corpus), 300, str(first / "tokenizer.json"), cache),
    ]
    path = corpus / "00.txt"
    stat = path.stat()
    path.write_text(path.read_text().replace("word", "wore", 1))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    others.append(prepare_text(str(corpus), 300, None, cache))
    assert len({first, *others}) == 4


def test_two_caches_hold_the_same_bytes(corpus, tmp_path):
    folders = [prepare_text(str(corpus), 300, None, tmp_path / name) for name in ("a", "b")]
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert first == second


@pytest.mark.parametrize("damage", ["cut", "flip", "no manifest", "tokenizer"])
def test_a_damaged_cache_is_made_again(corpus, cache, damage, caplog):
    folder = prepare_text(str(corpus), 300, None, cache)
    sound = {path.name: path.read_bytes() for path in folder.iterdir()}
    tokens = sound["train-00000.tokens"]
    name, content = {
        "cut": ("train-00000.tokens", tokens[:-2]),
        "flip": ("train-00000.tokens", bytes([tokens[0] ^ 1]) + tokens[1:]),
        "no manifest": ("manifest.json", b""),
        "tokenizer": ("tokenizer.json", sound["tokenizer.json"] + b" "),
    }[damage]
    (folder / name).write_bytes(content)
    assert prepare_text(str(corpus), 300, None, cache) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == sound
    assert "prepared again" in caplog.text


def _together(start, corpus, cache, folders):
    start.wait()
    folders.put(prepare_text(corpus, 300, None, cache))


def test_two_at_once_work_once(corpus, cache, monkeypatch):
    log = cache.parent / "builds"
    build = prepare._build

    def counted(*arguments):
        with log.open("a") as file:
            file.write("build\n")
        time.sleep(0.5)
        build(*arguments)

    monkeypatch.setattr(prepare, "_build", counted)
    context = multiprocessing.get_context("fork")
    start, folders = context.Barrier(3), context.Queue()
    workers = [context.Process(target=_together, args=(start, str(corpus), cache, folders)) for _ in range(3)]
    for worker in workers:
        worker.start()
    found = {folders.get(timeout=30) for _ in workers}
    for worker in workers:
        worker.join(timeout=30)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert len(found) == 1
    assert log.read_text() == "build\n"


KILLED = """
import sys, time
from pathlib import Path
from lmforge.data import prepare, shards
write = shards._write_json
def stuck(path, value):
    write(path, value)
    print(path.name, flush=True)
    time.sleep(60)
shards._write_json = stuck
prepare.prepare_text(sys.argv[1], 300, None, Path(sys.argv[2]))
"""


def test_a_killed_preparation_leaves_nothing_to_trust(corpus, cache):
    command = [sys.executable, "-c", KILLED, str(corpus), str(cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "documents.json\n"
        process.send_signal(signal.SIGKILL)
    assert [path.suffix for path in (cache / "tokens").iterdir() if path.is_dir()] == [".partial"]
    (corpus / "31.txt").write_text(_text(31))  # another key: its preparation cleans up after the dead one too
    folder = prepare_text(str(corpus), 300, None, cache)
    assert [path for path in (cache / "tokens").iterdir() if path.is_dir()] == [folder]
    assert sum(len(part) for part in _names(folder).values()) == 31


def test_a_preparation_at_work_is_not_cleaned_away(cache):
    root = cache / "tokens"
    with prepare._locked(root, "text-other"):
        (root / "text-other.partial").mkdir()
        prepare._remove_leftovers(root)
        assert (root / "text-other.partial").exists()
    prepare._remove_leftovers(root)
    assert not (root / "text-other.partial").exists()


def _jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_copies_keep_their_first(tmp_path, cache):
    a, b, c = (_text(i) for i in "abc")
    folder = prepare_text(_jsonl(tmp_path / "x.jsonl", [a, a, a, b, c]), 300, None, cache)
    manifest = read_manifest(folder)
    assert sorted(chain(*_names(folder).values())) == ["x.jsonl:1", "x.jsonl:4", "x.jsonl:5"]
    assert manifest["dropped"]["exact_duplicates"] == 2
    assert manifest["dropped"]["exact_duplicate_groups"] == 1


def test_near_copies_are_on_one_side(tmp_path, cache):
    texts = [_text(i) for i in range(40)]
    texts += [text.replace("\n", f" more{i}\n") for i, text in enumerate(texts)]
    folder = prepare_text(_jsonl(tmp_path / "x.jsonl", texts), 300, None, cache)
    side = {int(name.split(":")[1]) - 1: split for split, names in _names(folder).items() for name in names}
    assert len(set(side.values())) == 3
    assert all(side[i] == side[i + 40] for i in range(40))
    assert read_manifest(folder)["near_duplicates"] == {"documents": 80, "groups": 40, "jaccard": 0.4}


def test_how_a_file_was_saved_changes_no_token(tmp_path, cache):
    texts = [_text(i) for i in range(20)]
    lines = [json.dumps({"text": text}) for text in texts]
    saved = {"plain": ("", "\n"), "bom": ("\ufeff", "\n"), "windows": ("\ufeff", "\r\n")}
    manifests = []
    for name, (mark, end) in saved.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes((mark + end.join(lines)).encode())
        manifests.append(read_manifest(prepare_text(str(path), 300, None, cache)))
    assert len({manifest["source_sha256"] for manifest in manifests}) == 3
    assert len({manifest["content_sha256"] for manifest in manifests}) == 1
    shards = [[part["shards"] for part in manifest["splits"].values()] for manifest in manifests]
    assert shards[0] == shards[1] == shards[2]


@pytest.mark.parametrize("count", [1, 2], ids=["one document", "near-copies of one"])
def test_a_single_document_is_cut(tmp_path, cache, count):
    text = "".join(_text(i) for i in range(20))
    path = _jsonl(tmp_path / "x.jsonl", [text, text + "more\n"][:count])
    folder = prepare_text(path, 300, None, cache)
    texts, manifest = _texts(folder), read_manifest(folder)
    assert texts["train"][0] + texts["val"][0] == text
    assert texts["train"][0].endswith("\n")
    assert len(texts["val"][0]) == pytest.approx(len(text) / 10, rel=0.5)
    assert (len(texts["train"]), len(texts["val"]), len(texts["test"])) == (1, 1, 0)
    assert "x.jsonl:1, cut at character" in manifest["split_rule"]
    assert manifest["dropped"]["near_copies_of_the_only_document"] == count - 1


@pytest.mark.parametrize("n", [2, 3, 7])
def test_few_documents(tmp_path, cache, n):
    folder = prepare_text(_jsonl(tmp_path / "x.jsonl", [_text(i) for i in range(n)]), 300, None, cache)
    assert {split: len(names) for split, names in _names(folder).items()} == {"train": n - 1, "val": 1, "test": 0}


def test_a_tokenizer_from_outside(corpus, cache, tmp_path, caplog):
    spec = json.loads(Tokenizer.train(["some text"], 258)._content)
    spec["normalizer"] = {"type": "NFC"}
    spec["added_tokens"] = [dict(spec["added_tokens"][1], id=258, content="<|endoftext|>")]
    del spec["model"]["vocab"]["w"]
    path = tmp_path / "given.json"
    path.write_text(json.dumps(spec))
    folder = prepare_text(str(corpus), 0, str(path), cache)
    manifest = read_manifest(folder)
    assert (folder / "tokenizer.json").read_bytes() == path.read_bytes()
    assert manifest["vocab_size"] == 259
    assert manifest["tokenizer"]["end_of_text"] == "eos text eos"
    assert TokenShards.open(folder, "train").document(0)[[0, -1]].tolist() == [258, 258]
    lost = sum(path.read_text().count("w") for path in corpus.iterdir())
    assert manifest["dropped"]["bytes_without_token"] == lost
    assert f"no token for {lost} bytes" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vocab_size": 20}, r"data\.vocab_size=20"),
        ({"tokenizer": "none.json"}, r"data\.tokenizer=none\.json"),
        ({"pattern": "none.txt"}, r"data\.path=none\.txt"),
        ({"pattern": "blank.txt"}, r"no document with text"),
        ({"pattern": "x.txt"}, r"x\.txt, is too short"),
    ],
)
def test_wrong_input(corpus, cache, monkeypatch, given, message):
    monkeypatch.chdir(corpus.parent)
    (corpus.parent / "blank.txt").write_text(" \n")
    (corpus.parent / "x.txt").write_text("x")
    with pytest.raises(UsageError, match=message):
        prepare_text(**({"pattern": "corpus", "vocab_size": 300, "tokenizer": None, "cache": cache} | given))
    assert not list(cache.glob("tokens/*/"))


def test_a_tokenizer_without_an_end_is_wrong_input(corpus, cache, tmp_path):
    spec = json.loads(Tokenizer.train(["some text"], 258)._content)
    spec["added_tokens"] = []
    (tmp_path / "given.json").write_text(json.dumps(spec))
    with pytest.raises(UsageError, match=r"data\.tokenizer=.*no end-of-text token.*<\|endoftext\|>"):
        prepare_text(str(corpus), 0, str(tmp_path / "given.json"), cache)


def test_a_cache_that_cannot_be_written(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"paths\.cache"):
        prepare_text(str(corpus), 300, None, tmp_path / "file")


def test_files_that_change_while_they_are_read(corpus, cache, monkeypatch):
    split = prepare._split

    def meanwhile(*arguments):
        (corpus / "00.txt").write_text("changed")
        return split(*arguments)

    monkeypatch.setattr(prepare, "_split", meanwhile)
    with pytest.raises(UsageError, match="changed while"):
        prepare_text(str(corpus), 300, None, cache)


def test_the_sample_is_spread_and_bounded(monkeypatch):
    monkeypatch.setattr(prepare, "SAMPLE", 50_000)
    monkeypatch.setattr(prepare, "_BLOCK", 100)
    texts = [chr(65 + i) * 10_000 for i in range(20)]
    sample = prepare._sample(texts)
    assert sum(map(len, sample)) == pytest.approx(50_000, rel=0.01)
    assert {block[0] for block in sample} == {text[0] for text in texts}
    assert prepare._sample(["short"]) == ["short"]


MEMORY = """
import resource, sys
from pathlib import Path
from lmforge.data.prepare import prepare_text
prepare_text(sys.argv[1], 300, None, Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_one_huge_record_needs_little_memory(tmp_path, cache):
    rng = np.random.default_rng(0)
    words = np.array([f"w{i}" for i in range(50_000)])
    huge = " ".join(words[rng.integers(0, 50_000, 3_400_000)])
    peak = {}
    for name, text in (("small", "tiny"), ("large", huge)):
        path = _jsonl(tmp_path / f"{name}.jsonl", ["a short one", text, "another short one"])
        command = [sys.executable, "-c", MEMORY, path, str(cache)]
        peak[name] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert len(huge) > 19_000_000
    assert peak["large"] - peak["small"] < 300 * 1024
    folder = prepare_text(str(tmp_path / "large.jsonl"), 300, None, cache)
    assert huge in _texts(folder)["train"]


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory):
    return prepare_stdlib(4096, tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
def test_stdlib_split_is_clean(stdlib):
    names = _names(stdlib)
    assert len(names["val"]) >= 60
    assert len(names["test"]) >= 10
    assert len(names["train"]) > 3 * len(names["val"])
    families = [{stdlib_family(name) for name in part} for part in names.values()]
    assert not any(a & b for a, b in combinations(families, 2))
    side = {name: split for split, part in names.items() for name in part}
    documents = [document for document in stdlib_documents() if document.name in side]
    labels = near_duplicates([document.text for document in documents], 0.4)
    groups = {}
    for document, label in zip(documents, labels, strict=True):
        groups.setdefault(label, set()).add(side[document.name])
    assert all(len(sides) == 1 for sides in groups.values())


@pytest.mark.slow
def test_stdlib_costs(tmp_path, stdlib):
    before = time.process_time()
    prepare_stdlib(4096, tmp_path)
    assert time.process_time() - before < 25
    before = time.process_time()
    prepare_stdlib(4096, tmp_path)
    assert time.process_time() - before < 0.3


@pytest.mark.slow
def test_stdlib_numbers(stdlib):
    manifest = read_manifest(stdlib)
    assert 1.7 < manifest["xz_bits_per_byte"] < manifest["gzip_bits_per_byte"] < 2.4
    assert manifest["vocab_size"] == 4096
    part = manifest["splits"]["val"]
    lengths = Tokenizer.load(stdlib / "tokenizer.json").byte_lengths()
    assert lengths[TokenShards.open(stdlib, "val").tokens(0, part["tokens"])].sum() == part["bytes"]


def test_torch_is_never_imported():
    code = "import sys, lmforge.data.prepare as p; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
