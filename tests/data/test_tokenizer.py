import json
import os
import pickle
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from lmforge.config.errors import UsageError
from lmforge.data import tokenizer as module
from lmforge.data.tokenizer import SPLIT_PATTERN, Tokenizer
from texts import stdlib_documents

ODD = [
    "a  b   c    d",
    " leading",
    "trailing \n\n\n",
    "\ttab\t\tin\r\nwindows\r\n",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 joined",
    "漢字仮名。テスト",
    "nul\x00byte",
    "e\u0301 and \u00e9",
    "",
    "I'LL you're x'ſ 'self'",
    "def f(x):\n    if x:\n        return {'a': 1}\n\n\n# end",
    "1234567890 ½ Ⅳ ٣٤٥",
    "\u2003\u00a0\x85\x0b\x0c\x1c\x1fspace",
    " " * 1000 + "x",
    "\n" * 1000,
    "=" * 1000 + "\n\n    y",
    "naïve ß ſ ﬁ \ufeff",
    "http://a.b/c?d=e&f",
    "मानक हिन्दी ไทย עברית",
    "<|begin|>not special<|end|></s>",
]


@pytest.fixture(scope="module")
def texts():
    return [document.text for document in stdlib_documents()[:60]]


@pytest.fixture(scope="module")
def ours(texts):
    return Tokenizer.train(texts, 1000)


@pytest.fixture(scope="module")
def foreign(ours):
    """A file as other projects write them: NFC, one end-of-text token, chat marks after the base vocabulary."""
    spec = json.loads(ours._content)
    spec["normalizer"] = {"type": "NFC"}
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    spec["added_tokens"] = [_added(1000 + i, name) for i, name in enumerate(names)]
    spec["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    return json.dumps(spec)


def _added(i, content, special=True):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": content, "special": special} | flags


def _random_texts(n, seed=0):
    rng = random.Random(seed)
    parts = [*ODD, " ", "  ", "\n", "\t", "a", "é", "9", "_", "'", "\r", "\u3000", "<|end|>"]
    return ["".join(rng.choices(parts, k=rng.randint(1, 12))) for _ in range(n)]


@pytest.mark.parametrize("text", ODD)
def test_round_trip(ours, text):
    assert ours.decode(ours.encode(text)) == text


def test_fast_and_plain_encoding_agree(ours, texts):
    sample = [*ODD, *_random_texts(300), *texts]
    assert ours.fast
    assert [ids.tolist() for ids in ours.encode_many(sample)] == [ours.encode(text) for text in sample]


def test_another_pattern_would_not_agree(ours):
    spec = json.loads(ours._content)
    spec["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = SPLIT_PATTERN.replace(r"[^\r\n\p{L}\p{N}]?", "")
    other = Tokenizer(json.dumps(spec))
    other._split_pattern = SPLIT_PATTERN
    assert not other.fast, "the probe has to notice that tiktoken splits words in another way"
    assert [ids.tolist() for ids in other.encode_many(ODD)] == [other.encode(text) for text in ODD]


@pytest.mark.slow
def test_the_whole_standard_library_gives_equal_ids():
    documents = [document.text for document in stdlib_documents()]
    ours = Tokenizer.train(documents[::3], 4096)
    assert ours.fast
    slow = ours._encode_slowly(documents)
    for text, fast, plain in zip(documents, ours.encode_many(documents), slow, strict=True):
        assert np.array_equal(fast, plain)
        assert ours.decode(fast) == text


def test_long_texts_are_cut_without_a_trace(ours, monkeypatch):
    sample = [*_random_texts(200, seed=1), "word " * 500, "漢" * 500]
    whole = [ours.encode(text) for text in sample]
    monkeypatch.setattr(module, "_PART", 7)
    assert sum(len(list(ours._parts(text))) for text in sample) > 3 * len(sample)
    assert [ids.tolist() for ids in ours.encode_many(sample)] == whole


def test_cutting_elsewhere_would_leave_a_trace(ours, monkeypatch):
    monkeypatch.setattr(module, "_PART", 7)
    monkeypatch.setattr(module, "_CUT", module.re.compile(r"[a-z]"))
    sample = _random_texts(200, seed=1)
    assert [ids.tolist() for ids in ours.encode_many(sample)] != [ours.encode(text) for text in sample]


def test_a_million_blanks_are_no_problem(ours):
    for text in (" " * 1_200_000 + "x", "\n" * 1_200_000, "a" + " \t" * 600_000):
        (ids,) = ours.encode_many([text])
        assert ours.byte_lengths()[ids].sum() == len(text)


def test_blanks_beyond_the_engine_of_a_foreign_pattern(ours):
    spec = json.loads(ours._content)
    spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    gpt2 = Tokenizer(json.dumps(spec))
    assert gpt2.fast
    assert [ids.tolist() for ids in gpt2.encode_many(ODD)] == [gpt2.encode(text) for text in ODD]
    (ids,) = gpt2.encode_many(["a" + " " * 1_200_000 + "x"])
    assert gpt2.byte_lengths()[ids].sum() == 1_200_002


def test_training_is_the_same_in_another_process(texts, ours, tmp_path):
    code = (
        "import sys; from texts import stdlib_documents; from lmforge.data.tokenizer import Tokenizer\n"
        "print(Tokenizer.train([d.text for d in stdlib_documents()[:60]], 1000).fingerprint)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {ours.fingerprint}
    assert Tokenizer.train(texts[1:], 1000).fingerprint != ours.fingerprint


def test_our_marks_and_sizes(ours):
    assert (ours.bos, ours.eos, ours.size, ours.normalizer, ours.missing_bytes) == (0, 1, 1000, None, frozenset())
    assert ours.document(np.array([7, 8])).tolist() == [0, 7, 8, 1]
    assert ours.decode([0, *ours.encode("hi"), 1]) == "hi"


@pytest.mark.parametrize("size", [0, 257])
def test_a_vocabulary_too_small_for_all_bytes(size):
    with pytest.raises(UsageError, match=rf"data\.vocab_size={size}.*258"):
        Tokenizer.train(["text"], size)


def test_added_tokens_count_and_end_serves_as_start(foreign):
    tokenizer = Tokenizer(foreign)
    assert (tokenizer.size, tokenizer.bos, tokenizer.eos, tokenizer.normalizer) == (1003, None, 1000, "NFC")
    assert tokenizer.document(np.array([5])).tolist() == [1000, 5, 1000]
    assert not tokenizer.fast


def test_normaliser_changes_combining_characters_only(foreign):
    tokenizer = Tokenizer(foreign)
    for text in ODD:
        assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)
        (many,) = tokenizer.encode_many([text])
        assert many.tolist() == tokenizer.encode(text)


def test_all_ways_to_a_file_give_the_ids_of_the_file(foreign, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(foreign)
    direct = tokenizers.Tokenizer.from_file(str(path))
    direct.no_truncation()
    expected = [direct.encode(text, add_special_tokens=False).ids for text in ODD]
    loaded = Tokenizer.load(path)
    loaded.save(tmp_path / "copy.json")
    for tokenizer in (loaded, Tokenizer.load(tmp_path / "copy.json"), pickle.loads(pickle.dumps(loaded))):
        assert [tokenizer.encode(text) for text in ODD] == expected
        assert tokenizer.fingerprint == loaded.fingerprint
    assert (tmp_path / "copy.json").read_bytes() == path.read_bytes()


def test_without_its_pre_tokenizer_the_file_would_give_other_ids(foreign):
    spec = json.loads(foreign)
    spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    other, right = Tokenizer(json.dumps(spec)), Tokenizer(foreign)
    assert [other.encode(text) for text in ODD] != [right.encode(text) for text in ODD]


def test_text_never_becomes_a_special_token(ours, foreign):
    for tokenizer, marks in (
        (ours, "<|begin|>a<|end|>"),
        (Tokenizer(foreign), "<|endoftext|><|im_start|> a<|im_end|>"),
    ):
        special = {tokenizer.bos, tokenizer.eos, 1000, 1001, 1002}
        (many,) = tokenizer.encode_many([marks])
        assert not special & {*tokenizer.encode(marks), *many.tolist()}
        assert tokenizer.decode(tokenizer.encode(marks)) == marks


def test_added_tokens_that_are_not_special_are_text(ours):
    spec = json.loads(ours._content)
    spec["added_tokens"].append(_added(1000, "<tool>", special=False))
    tokenizer = Tokenizer(json.dumps(spec))
    assert 1000 in tokenizer.encode("a <tool> b")
    assert tokenizer.decode(tokenizer.encode("a <tool> b")) == "a <tool> b"
    assert tokenizer.byte_lengths()[1000] == 6
    assert not tokenizer.fast


def test_byte_lengths_add_up(ours, texts):
    lengths = ours.byte_lengths()
    assert lengths.dtype == np.int64
    assert lengths.shape == (1000,)
    assert lengths[[ours.bos, ours.eos]].tolist() == [0, 0]
    for text in [*ODD, *texts[:10]]:
        assert lengths[ours.encode(text)].sum() == len(text.encode())


def test_missing_bytes_are_known(ours):
    spec = json.loads(ours._content)
    del spec["model"]["vocab"]["Ā"]
    assert Tokenizer(json.dumps(spec)).missing_bytes == {0}
    assert not Tokenizer(json.dumps(spec)).fast


def test_other_kinds_of_file_are_wrong_input(ours, tmp_path):
    spec = json.loads(ours._content)
    spec["pre_tokenizer"] = {"type": "Whitespace"}
    path = tmp_path / "words.json"
    for content, reason in ((json.dumps(spec), "found model BPE, pre-tokenizer Whitespace"), ("{", "not a tokenizer")):
        path.write_text(content)
        with pytest.raises(UsageError, match=rf"words\.json: .*{reason}"):
            Tokenizer.load(path)
    with pytest.raises(UsageError, match=r"none\.json"):
        Tokenizer.load(tmp_path / "none.json")


def test_encoding_leaves_the_environment_alone(ours, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    next(ours._encode_slowly(["a", "b"]))
    assert "TOKENIZERS_PARALLELISM" not in os.environ
