import json
import pickle
import shutil

import numpy as np
import pytest

from lmforge.config.errors import UsageError
from lmforge.data.shards import TokenShards, read_manifest, token_dtype, write_shards
from lmforge.data.tokenizer import Tokenizer

LENGTHS = [5, 3, 8, 0, 1, 20, 2, 7]


def _documents(vocab=1000, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).astype(np.uint32) for n in LENGTHS]


@pytest.fixture(params=[1 << 20, 10], ids=["one file", "several files"])
def shards(request, tmp_path):
    folder = write_shards(tmp_path / "tokens", {"train": _documents()}, 1000, max_shard_tokens=request.param)
    return TokenShards.open(folder, "train")


def test_what_was_written_is_read(shards):
    documents = _documents()
    everything = np.concatenate(documents)
    assert (shards.n_tokens, shards.n_documents, shards.size) == (46, 8, 1000)
    assert shards.offsets.tolist() == np.cumsum([0, *LENGTHS]).tolist()
    assert all(np.array_equal(shards.document(i), document) for i, document in enumerate(documents))
    for start in range(47):
        for stop in range(start, 47):
            assert np.array_equal(shards.tokens(start, stop), everything[start:stop])


def test_gather_takes_any_shape_across_files(shards):
    everything = np.concatenate(_documents())
    index = np.random.default_rng(1).integers(0, 46, (4, 3, 5))
    assert np.array_equal(shards.gather(index), everything[index])
    assert shards.gather(index).dtype == np.int64
    assert shards.gather(np.empty((0, 2), dtype=np.int64)).shape == (0, 2)
    for wrong in ([-1], [46]):
        with pytest.raises(IndexError):
            shards.gather(np.array(wrong))
    with pytest.raises(IndexError):
        shards.tokens(40, 47)


def test_documents_stay_in_one_file(tmp_path):
    folder = write_shards(tmp_path / "tokens", {"val": _documents()}, 1000, max_shard_tokens=10)
    assert [part["tokens"] for part in read_manifest(folder)["splits"]["val"]["shards"]] == [8, 9, 20, 9]


def test_one_file_is_read_without_a_copy(tmp_path):
    shards = TokenShards.open(write_shards(tmp_path / "tokens", {"train": _documents()}, 1000), "train")
    assert np.shares_memory(shards.tokens(0, 10), shards.tokens(5, 15))


@pytest.mark.parametrize("vocab", [65535, 65536, 65537, 119547])
def test_ids_never_wrap(tmp_path, vocab):
    ids = np.array([0, 65535, vocab - 1] if vocab > 65535 else [0, vocab - 1])
    shards = TokenShards.open(write_shards(tmp_path / "tokens", {"train": [ids]}, vocab), "train")
    assert shards.gather(np.arange(len(ids))).tolist() == ids.tolist()
    assert shards.manifest["dtype"] == token_dtype(vocab).name == ("uint16" if vocab <= 65536 else "uint32")


@pytest.mark.parametrize("ids", [[1000], [-1], [65536 + 5]])
def test_ids_outside_the_vocabulary_are_not_written(tmp_path, ids):
    with pytest.raises(ValueError, match="vocabulary of 1000"):
        write_shards(tmp_path / "tokens", {"train": [np.array(ids)]}, 1000)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_the_former_folder(tmp_path):
    def broken():
        yield np.array([4])
        raise KeyboardInterrupt

    folder = write_shards(tmp_path / "tokens", {"train": [np.array([3])]}, 1000)
    with pytest.raises(KeyboardInterrupt):
        write_shards(folder, {"train": broken()}, 1000)
    assert TokenShards.open(folder, "train").tokens(0, 1).tolist() == [3]
    assert list(tmp_path.iterdir()) == [folder]
    write_shards(folder, {"train": [np.array([9])]}, 1000)
    assert TokenShards.open(folder, "train").tokens(0, 1).tolist() == [9]


def test_pickle_carries_no_tokens(shards):
    data = pickle.dumps(shards)
    assert len(data) < 500
    assert np.array_equal(pickle.loads(data).tokens(0, 46), shards.tokens(0, 46))


def test_empty_split(tmp_path):
    shards = TokenShards.open(write_shards(tmp_path / "tokens", {"test": []}, 1000), "test")
    assert (shards.n_tokens, shards.n_documents, len(shards.tokens(0, 0))) == (0, 0, 0)


def _edit(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def _truncate(path, size):
    with path.open("r+b") as file:
        file.truncate(size)


DAMAGE = {
    "half a file": (lambda f: _truncate(f / "train-00000.tokens", 46), r"train-00000\.tokens: 92 bytes.*found 46"),
    "no file": (lambda f: (f / "train-00000.tokens").unlink(), r"train-00000\.tokens: .*no such file"),
    "no offsets": (lambda f: (f / "train.offsets.npy").unlink(), r"train\.offsets\.npy"),
    "cut offsets": (
        lambda f: np.save(f / "train.offsets.npy", np.arange(4)),
        r"int64 \[9\] expected, found int64 \[4\]",
    ),
    "other offsets": (lambda f: np.save(f / "train.offsets.npy", np.arange(9)), r"rise from 0 to 46, found 0 to 8"),
    "pickled offsets": (lambda f: np.save(f / "train.offsets.npy", np.array([{}])), r"cannot be read"),
    "dtype": (lambda f: _edit(f, lambda m: m.update(dtype="uint32")), r"dtype uint16 expected.*found uint32"),
    "vocabulary": (lambda f: _edit(f, lambda m: m.update(vocab_size=70000)), r"dtype uint32 expected.*found uint16"),
    "version": (lambda f: _edit(f, lambda m: m.update(version=99)), r"expected format .*1\), found .*99"),
    "counts": (lambda f: _edit(f, lambda m: m["splits"]["train"].update(tokens=9)), r"9 train tokens expected, .*46"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), r"no manifest\.json"),
    "cut manifest": (lambda f: _truncate(f / "manifest.json", 50), r"manifest\.json: cannot be read"),
    "key gone": (lambda f: _edit(f, lambda m: m.pop("vocab_size")), r"manifest\.json: damaged.*vocab_size"),
    "tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), r"tokenizer\.json: not the tokenizer"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json: .*names a tokenizer"),
    "escape": (
        lambda f: _edit(f, lambda m: m["splits"]["train"]["shards"][0].update(file="../../secret")),
        r"'\.\./\.\./secret' leaves the folder",
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    tokenizer = Tokenizer.train(["some text"], 258)
    folder = tmp_path_factory.mktemp("sound") / "tokens"
    return write_shards(folder, {"train": _documents(258)}, tokenizer.size, tokenizer)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(sound, tmp_path, kind):
    folder = tmp_path / "tokens"
    shutil.copytree(sound, folder)
    TokenShards.open(folder, "train").verify()
    damage, message = DAMAGE[kind]
    damage(folder)
    with pytest.raises(UsageError, match=message):
        TokenShards.open(folder, "train")


def test_verify_reads_every_byte(sound, tmp_path):
    folder = tmp_path / "tokens"
    shutil.copytree(sound, folder)
    data = bytearray((folder / "train-00000.tokens").read_bytes())
    data[40] ^= 1
    (folder / "train-00000.tokens").write_bytes(data)
    with pytest.raises(UsageError, match=r"train-00000\.tokens: damaged"):
        TokenShards.open(folder, "train").verify()


def test_unknown_split_and_no_folder(sound, tmp_path):
    with pytest.raises(UsageError, match="no split 'vall'; there are train"):
        TokenShards.open(sound, "vall")
    with pytest.raises(UsageError, match="no folder of token shards"):
        TokenShards.open(tmp_path / "none", "train")


def test_manifest_describes_the_tokenizer(sound):
    found = read_manifest(sound)["tokenizer"]
    assert found["sha256"] == Tokenizer.load(sound / "tokenizer.json").fingerprint
    assert (found["bos"], found["eos"], found["normalizer"], found["end_of_text"]) == (0, 1, None, "bos text eos")
