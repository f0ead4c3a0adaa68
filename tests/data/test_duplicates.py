import random

import numpy as np
import pytest

from lmforge.data import duplicates
from lmforge.data.duplicates import Groups, first_copies, near_duplicates

VOCABULARY = [f"word{i}" for i in range(2000)]


def _text(rng, n=300):
    return rng.choices(VOCABULARY, k=n)


def _edited(words, rng, edits):
    words = list(words)
    for at in rng.sample(range(len(words)), edits):
        words[at] = rng.choice(VOCABULARY)
    return words


def _true_jaccard(a, b):
    a, b = ({tuple(words[i : i + 5]) for i in range(len(words) - 4)} for words in (a, b))
    return len(a & b) / len(a | b)


def test_the_first_copy_stays():
    assert first_copies(["A", "A", "A", "B", "C"]) == ([0, 3, 4], 1)
    assert first_copies(["A", "B", "C"]) == ([0, 1, 2], 0)


def test_planted_near_copies_are_found_and_others_are_not():
    rng = random.Random(0)
    originals = [_text(rng) for _ in range(60)]
    copies = [_edited(words, rng, 8) for words in originals[:30]]
    labels = near_duplicates([" ".join(words) for words in originals + copies], 0.5)
    assert min(_true_jaccard(a, b) for a, b in zip(originals, copies, strict=False)) > 0.6
    assert labels[:60] == list(range(60))
    assert labels[60:] == list(range(30))


def test_threshold_decides():
    rng = random.Random(1)
    words = _text(rng)
    other = _edited(words, rng, 25)
    similarity = _true_jaccard(words, other)
    texts = [" ".join(words), " ".join(other)]
    assert 0.3 < similarity < 0.7
    assert near_duplicates(texts, similarity - 0.01) == [0, 0]
    assert near_duplicates(texts, similarity + 0.01) == [0, 1]


def test_a_chain_is_one_group_whatever_the_order():
    rng = random.Random(2)
    chain = [_text(rng)]
    for _ in range(5):
        chain.append(_edited(chain[-1], rng, 8))
    assert _true_jaccard(chain[0], chain[-1]) < 0.5
    texts = [" ".join(words) for words in chain]
    assert near_duplicates(texts, 0.5) == [0] * 6
    assert near_duplicates(texts[::-1], 0.5) == [0] * 6


def test_small_and_odd_texts():
    texts = ["", "...", "...", "a b", "a  b", "a c", "漢字仮名交じり文の例です", "漢字仮名交じり文の例です。"]
    assert near_duplicates(texts, 0.5) == [0, 1, 1, 3, 3, 5, 6, 6]
    assert near_duplicates([], 0.5) == []
    assert near_duplicates(["one"], 0.5) == [0]


def test_parts_of_a_long_text_change_nothing(monkeypatch):
    text = " ".join(_text(random.Random(3), 3000))
    whole = duplicates._Words().shingles(text)
    monkeypatch.setattr(duplicates, "_PART", 100)
    assert np.array_equal(duplicates._Words().shingles(text), whole)


def test_signature_estimates_jaccard():
    rng = random.Random(4)
    words = _text(rng, 2000)
    other = _edited(words, rng, 120)
    a, b = (duplicates._Words().shingles(" ".join(w)) for w in (words, other))
    estimate = np.mean(duplicates._signature(a) == duplicates._signature(b))
    assert duplicates.jaccard(a, b) == pytest.approx(_true_jaccard(words, other))
    assert estimate == pytest.approx(duplicates.jaccard(a, b), abs=0.15)


def test_groups():
    groups = Groups(5)
    groups.unite(4, 2)
    groups.unite(0, 3)
    groups.unite(3, 4)
    assert groups.labels() == [0, 1, 0, 0, 0]
