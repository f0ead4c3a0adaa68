import pytest

from lmforge.config.errors import UsageError
from lmforge.data.corpora import prepares, shards_of
from lmforge.data.store import NotPrepared
from texts import NODE


def test_a_node_names_its_kind(corpus, cache):
    node = {**NODE, "_target_": "lmforge.data.module.TextData", "path": str(corpus)}
    assert prepares(node)
    folder = shards_of(node, cache=cache)
    assert folder.name.startswith("text-")
    with pytest.raises(NotPrepared, match=r"stdlib-\w+: not prepared yet"):
        shards_of({"_target_": "lmforge.data.module.StdlibData", "vocab_size": 300}, cache=cache, make=False)


def test_nodes_of_earlier_runs_lack_the_newer_keys(corpus, cache):
    node = {"_target_": "lmforge.data.module.TextData", "path": str(corpus), "vocab_size": 300, "tokenizer": None}
    assert shards_of(node, cache=cache) == shards_of(node | NODE, cache=cache)


def test_what_lies_ready_is_not_prepared(cache):
    node = {"_target_": "lmforge.data.module.TokenData", "path": "x"}
    assert not prepares(node)
    with pytest.raises(UsageError, match="TokenData holds nothing to prepare; choose data=text, data=stdlib, data=hub"):
        shards_of(node, cache=cache)
