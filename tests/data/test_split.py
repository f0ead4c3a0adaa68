import random
from itertools import chain, combinations

import numpy as np
import pytest

from lmforge.data import split as module
from lmforge.data.split import SPLITS, cut_document, family_key, split_digest


def _corpus(families=150, seed=0):
    rng = random.Random(seed)
    names = [f"f{family}/{i}.py" for family in range(families) for i in range(rng.choice((1, 1, 1, 3, 12)))]
    names += [f"big/{i}.py" for i in range(60)]
    return names, [name.split("/")[0] for name in names]


def split_documents(families, groups, salt, sizes=None, val=60, test=40):
    """Positions of each split's documents."""
    keys = np.array([family_key(salt, family) for family in families], dtype="S16")
    sizes = np.ones(len(keys), int) if sizes is None else np.array(sizes)
    found = module.split_documents(keys, np.array(groups), sizes, val, test)
    return {split: np.flatnonzero(found == number).tolist() for number, split in enumerate(SPLITS)}


def _named(names, split):
    return {part: sorted(names[i] for i in members) for part, members in split.items()}


def test_families_stay_whole_and_all_are_placed_once():
    names, families = _corpus()
    split = split_documents(families, range(len(names)), "salt")
    assert sorted(chain(*split.values())) == list(range(len(names)))
    where = [{families[i] for i in members} for members in split.values()]
    assert not any(a & b for a, b in combinations(where, 2))
    assert 60 <= len(split["val"]) < 60 + 40
    assert 40 <= len(split["test"]) < 40 + 40
    assert "big" in where[0]


def test_near_copies_join_families():
    names, families = _corpus()
    alone = split_documents(families, range(len(names)), "salt")
    groups = list(range(len(names)))
    train, val = alone["train"][0], alone["val"][0]
    groups[val] = groups[train]
    joined = split_documents(families, groups, "salt")
    where = {i: part for part, members in joined.items() for i in members}
    assert where[train] == where[val]
    assert all(where[i] == where[train] for i in where if families[i] in (families[train], families[val]))


def test_order_of_the_input_is_nothing_and_the_salt_is():
    names, families = _corpus()
    first = _named(names, split_documents(families, range(len(names)), "salt"))
    order = list(range(len(names)))
    random.Random(1).shuffle(order)
    names, families = [names[i] for i in order], [families[i] for i in order]
    assert _named(names, split_documents(families, range(len(names)), "salt")) == first
    other = _named(names, split_documents(families, range(len(names)), "pepper"))
    assert other != first
    assert split_digest(other) != split_digest(first)


def test_a_large_share_of_the_bytes_trains():
    names = [f"{i}" for i in range(100)]
    sizes = [1] * 100
    chosen = split_documents(names, range(len(names)), "salt", sizes, val=10, test=5)
    sizes[chosen["val"][0]] = 1000
    assert chosen["val"][0] in split_documents(names, range(len(names)), "salt", sizes, val=10, test=5)["train"]


@pytest.mark.parametrize("n", range(2, 12))
def test_few_documents_still_give_train_and_val(n):
    names = [f"{i}" for i in range(n)]
    split = split_documents(names, range(len(names)), "salt", val=max(1, n // 10), test=n // 20)
    assert split["train"]
    assert split["val"]


def test_one_unit_is_left_whole():
    assert split_documents(["x", "x"], [0, 1], "salt") == {"train": [0, 1], "val": [], "test": []}


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("p\n" * 42 + "\n" + "q\n" * 9, "p\n" * 42 + "\n"),
        ("line\n" * 20, "line\n" * 18),
        ("word " * 20, "word " * 18),
        ("x" * 100, "x" * 90),
        ("xy", "x"),
    ],
)
def test_cut(text, head):
    assert cut_document(text) == (head, text[len(head) :])
