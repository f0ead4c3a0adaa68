import random

import numpy as np
import pytest

from lmforge.data import duplicates
from lmforge.data.duplicates import Bands, Groups, Words, band_keys, first_copies

VOCABULARY = [f"word{i}" for i in range(2000)]


def _text(rng, n=300):
    return rng.choices(VOCABULARY, k=n)


def _edited(words, rng, edits):
    words = list(words)
    for at in rng.sample(range(len(words)), edits):
        words[at] = rng.choice(VOCABULARY)
    return words


def near_duplicates(texts, threshold):
    shingles = [Words().shingles(text) for text in texts]
    keys = np.array([band_keys(one) for one in shingles])
    return duplicates.near_duplicates(
        len(texts), Bands(lambda band: keys[:, band], shingles.__getitem__), threshold
    ).tolist()


def _true_jaccard(a, b):
    a, b = ({tuple(words[i : i + 5]) for i in range(len(words) - 4)} for words in (a, b))
    return len(a & b) / len(a | b)


def test_the_first_copy_stays():
    for digests, first, groups in (["BBACBD"], [0, 2, 3, 5], 1), (["ABC"], [0, 1, 2], 0), ([""], [], 0):
        positions, found = first_copies(np.array(list(*digests), dtype="S16"))
        assert (positions.tolist(), found) == (first, groups)


def test_digests_that_end_in_zeros_are_told_apart():
    digests = np.array([b"a\0b", b"a", b"a\0", b"\0a"], dtype="S16")
    assert first_copies(digests)[0].tolist() == [0, 1, 3]  # zeros at the end are the padding of a shorter digest


def test_all_of_equal_value_are_one_group():
    groups = Groups(6)
    groups.unite_equal(np.array([3, 1, 3, 2, 1, 3]))
    assert groups.labels().tolist() == [0, 1, 0, 3, 1, 0]


def test_comparing_holds_few_shingles(monkeypatch):
    monkeypatch.setattr(duplicates, "_HELD", 100)
    made = []
    recent = duplicates._Recent(lambda i: made.append(i) or np.zeros(8))
    for position in (0, 0, 1, 2, 2, 0):
        recent(position)
    assert made == [0, 1, 2, 0]
    assert len(recent._held) == 1


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
    whole = Words().shingles(text)
    monkeypatch.setattr(duplicates, "_PART", 100)
    assert np.array_equal(Words().shingles(text), whole)


def test_forgotten_words_change_nothing(monkeypatch):
    text = " ".join(_text(random.Random(3), 300))
    whole = Words().shingles(text)
    monkeypatch.setattr(duplicates, "_REMEMBERED", 10)
    words = Words()
    assert np.array_equal(words.shingles(text), whole)
    assert len(words) <= 10


def test_signature_estimates_jaccard():
    rng = random.Random(4)
    words = _text(rng, 2000)
    other = _edited(words, rng, 120)
    a, b = (Words().shingles(" ".join(w)) for w in (words, other))
    estimate = np.mean(duplicates._smallest(a) == duplicates._smallest(b))
    assert duplicates.jaccard(a, b) == pytest.approx(_true_jaccard(words, other))
    assert estimate == pytest.approx(duplicates.jaccard(a, b), abs=0.15)


def test_groups():
    groups = Groups(5)
    groups.unite(4, 2)
    groups.unite(0, 3)
    groups.unite(3, 4)
    assert groups.labels().tolist() == [0, 1, 0, 0, 0]
