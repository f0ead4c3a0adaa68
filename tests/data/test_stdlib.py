"""The default corpus: its shards are what the default recipe was tuned on."""

import time
from itertools import combinations

import pytest

from lmforge.data.corpora import stdlib_shards
from lmforge.data.shards import TokenShards, read_manifest
from lmforge.data.sources import stdlib_family
from lmforge.data.tokenizer import Tokenizer
from texts import names_of

pytestmark = pytest.mark.slow
NODE = {"vocab_size": 4096}


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory):
    return stdlib_shards(NODE, cache=tmp_path_factory.mktemp("cache"))


def test_split_is_clean(stdlib):
    names = names_of(stdlib)
    assert len(names["val"]) >= 60
    assert len(names["test"]) >= 10
    assert len(names["train"]) > 3 * len(names["val"])
    families = [{stdlib_family(name) for name in part} for part in names.values()]
    assert not any(a & b for a, b in combinations(families, 2))
    dropped = read_manifest(stdlib)["dropped"]
    assert dropped["near_copies"] > 50
    assert sum(name.startswith("encodings/") for part in names.values() for name in part) < 40


def test_costs(tmp_path):
    before = time.process_time()
    stdlib_shards(NODE, cache=tmp_path)
    assert time.process_time() - before < 25
    before = time.process_time()
    stdlib_shards(NODE, cache=tmp_path)
    assert time.process_time() - before < 0.3


def test_numbers(stdlib):
    manifest = read_manifest(stdlib)
    assert 1.7 < manifest["xz_bits_per_byte"] < manifest["gzip_bits_per_byte"] < 2.4
    assert manifest["vocab_size"] == 4096
    part = manifest["splits"]["val"]
    lengths = Tokenizer.load(stdlib / "tokenizer.json").byte_lengths()
    assert lengths[TokenShards.open(stdlib, "val").tokens(0, part["tokens"])].sum() == part["bytes"]
