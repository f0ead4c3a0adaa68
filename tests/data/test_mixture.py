"""Mixtures: exact shares at any point, every source's own epochs, one tokenizer, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from builders import batch_plan, packed
from lmforge.config.errors import UsageError
from lmforge.config.mixture import FINEST, cycle_counts
from lmforge.data import mix_sources
from lmforge.data.mix import MixedData, in_turn
from lmforge.data.mixture import MixedOrder, MixedRows, quota_cycle
from lmforge.data.module import TokenWindows
from lmforge.data.packing import EMPTY
from lmforge.data.shards import read_manifest, write_shards
from lmforge.data.tokenizer import Tokenizer

CONTEXT = 8


def documents(first: int, count: int, length: int = 7) -> list[list[int]]:
    return [[first + (7 * i + k) % 100 for k in range(length)] for i in range(count)]


@pytest.fixture
def folders(tmp_path) -> dict[str, Path]:
    """Two sources whose ids tell them apart: 11 rows of ids below 200, 6 rows of ids from 500 on."""
    packed(tmp_path / "few", documents(0, 12), CONTEXT)
    packed(tmp_path / "more", documents(500, 6), CONTEXT)
    return {"few": tmp_path / "few", "more": tmp_path / "more"}


def mixed(sources: dict[str, tuple[Path | str, float]], cache: Path = Path("cache"), **more: Any) -> MixedData:
    entries = {name: {"path": str(path), "weight": weight} for name, (path, weight) in sources.items()}
    loading = {"vocab_size": 300, "tokenizer": None, "context": CONTEXT, **more}
    data = MixedData(sources=entries, cache=cache, **loading)
    data.connect(batch_plan(4, context=CONTEXT), seed=3, samples=100)
    return data


def test_the_first_ten_rows_of_seven_and_three_by_hand() -> None:
    """The rows of the first are due by 1.4, 2.9, 4.3, 5.7, 7.1, 8.6, 10 (n / 0.7), of the second by 3.3, 6.7, 10."""
    assert quota_cycle([7, 3]).tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 1]
    assert quota_cycle([1, 1, 1]).tolist() == [0, 1, 2]


@pytest.mark.parametrize("counts", [[1], [7, 3], [1, 1, 1, 97], [50, 20, 13, 10, 5, 2], [199, 1], [3, 3, 3, 1]])
def test_after_any_number_of_rows_no_source_is_a_whole_row_off_its_share(counts: list[int]) -> None:
    order = MixedOrder([5] * len(counts), counts, seed=0)
    samples = 3 * sum(counts) + 1
    taken = np.cumsum(order.place(np.arange(samples))[0][:, None] == np.arange(len(counts)), axis=0)
    share = np.array(counts) / sum(counts) * np.arange(1, samples + 1)[:, None]
    assert np.abs(taken - share).max() < 1
    assert all((order.taken(n) == taken[n - 1]).all() for n in range(1, samples + 1))


def test_each_source_walks_its_own_epochs_in_orders_of_their_own() -> None:
    sizes = [11, 5]
    order = MixedOrder(sizes, [1, 1], seed=3)
    numbers = np.arange(220)
    source, rows = order.place(numbers)[0], order(numbers)
    for number, (size, first) in enumerate(zip(sizes, [0, 11], strict=True)):
        mine = rows[source == number] - first
        epochs = mine[: len(mine) // size * size].reshape(-1, size)
        assert (np.sort(epochs) == np.arange(size)).all()
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == len(epochs) > 5
    assert (order(numbers[::-1])[::-1] == rows).all()  # the order of asking changes nothing
    assert (MixedOrder(sizes, [1, 1], seed=4)(numbers) != rows).any()


def test_a_mixture_of_one_source_is_that_source(folders) -> None:
    alone = TokenWindows(folders["few"], CONTEXT)
    alone.connect(batch_plan(4, context=CONTEXT), seed=3, samples=100)
    other = mixed({"few": (folders["few"], 0.2)})
    for ours, theirs in zip(other.train_dataloader(), alone.train_dataloader(), strict=True):
        for a, b in zip(ours["micro_batches"], theirs["micro_batches"], strict=True):
            assert all(torch.equal(a[name], b[name]) for name in b)
    changed = mixed({"few": (folders["few"], 0.5), "more": (folders["more"], 0.5)})
    first = [next(iter(data.train_dataloader()))["micro_batches"][1]["input_ids"] for data in (changed, alone)]
    assert not torch.equal(*first)


def test_batches_hold_the_rows_of_their_sources(folders) -> None:
    data = mixed({"few": (folders["few"], 3), "more": (folders["more"], 1)})
    ids = torch.cat([b["input_ids"] for w in data.train_dataloader() for b in w["micro_batches"]])
    assert ids.shape == (100, CONTEXT)
    assert (ids[:, 0] >= 500).sum() == 25
    assert data.by_source(25) == {
        "data/few/share": 0.75, "data/more/share": 0.25, "data/few/epochs": 75 / 11, "data/more/epochs": 25 / 6
    }  # fmt: skip
    rows = MixedRows(data.parts)
    batch = rows.batch(np.array([12, EMPTY, 3, 11]))
    assert (batch["labels"][1] == -100).all()
    own = [part.batch(np.array(mine)) for part, mine in zip(data.parts, [[3], [1, 0]], strict=True)]
    for name in own[0]:
        assert torch.equal(batch[name][[2]], own[0][name])
        assert torch.equal(batch[name][[0, 3]], own[1][name])


def test_weights_become_exact_shares() -> None:
    assert cycle_counts({"b": 0.3, "a": 0.7}) == {"a": 7, "b": 3}
    assert cycle_counts({"a": 1, "b": 2, "c": 4}) == {"a": 1, "b": 2, "c": 4}
    rounded = cycle_counts({"a": 0.123456789, "b": 0.2, "c": 0.7})
    assert sum(rounded.values()) == FINEST
    assert rounded == {"a": 1206, "b": 1954, "c": 6840}
    with pytest.raises(UsageError, match=r"data.sources.b.weight=1e-09: less than one row in 10000"):
        cycle_counts({"a": 1.0, "b": 1e-9})


def tokenized(folder: Path, texts: list[str]) -> Path:
    tokenizer = Tokenizer.train(texts, 270)
    arrays = [tokenizer.document(np.array(tokenizer.encode(text))) for text in texts]
    return write_shards(folder, {"train": arrays, "val": arrays[:1]}, tokenizer.size, tokenizer)


def test_shards_of_different_tokenizers_are_refused_by_both_hashes(tmp_path, folders) -> None:
    a = tokenized(tmp_path / "a", ["to be or not to be, " * 9])
    b = tokenized(tmp_path / "b", ["what a piece of work is a man! " * 9])
    hashes = [read_manifest(folder)["tokenizer"]["sha256"] for folder in (a, b)]
    with pytest.raises(UsageError, match=f"made with tokenizer {hashes[1]}, but .* with {hashes[0]}"):
        mixed({"a": (a, 1), "b": (b, 1)})
    with pytest.raises(UsageError, match=f"{hashes[1]}.*data.tokenizer=.* with {hashes[0]}"):
        mixed({"b": (b, 1)}, tokenizer=str(a / "tokenizer.json"))
    with pytest.raises(UsageError, match="unknown"):
        mixed({"a": (a, 1), "few": (folders["few"], 1)})
    assert mixed({"a": (a, 1), "same": (a, 2)}).counts == {"a": 1, "same": 2}


def text_folder(folder: Path, word: str) -> Path:
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"{word} {number} " * 60 + f"the end of {word} {number * number}.\n")
    return folder


def test_text_gets_the_tokenizer_of_the_shards_or_one_of_all(tmp_path) -> None:
    shards = tokenized(tmp_path / "shards", ["to be or not to be, " * 9])
    prose, code = text_folder(tmp_path / "prose", "sea"), text_folder(tmp_path / "code", "import")
    both = mixed({"shards": (shards, 1), "prose": (prose, 1)})
    assert both.manifest["tokenizer"] == read_manifest(shards)["tokenizer"]
    learnt = mixed({"prose": (prose, 1), "code": (code, 3)}, tmp_path / "cache")
    assert learnt.tokenizer is not None
    assert {len(learnt.tokenizer.encode(word)) for word in (" sea", " import")} == {1}
    again = mixed({"code": (code, 0.75), "prose": (prose, 0.25)}, tmp_path / "cache")
    assert again.manifest == learnt.manifest
    assert len(list((tmp_path / "cache" / "tokens").glob("tokenizer-*/tokenizer.json"))) == 1
    with pytest.raises(UsageError, match=r"data.sources.prose.path=.*nothing.*no such file"):
        mixed({"prose": (tmp_path / "nothing", 1)})


def test_a_bad_row_is_named_by_its_own_file_and_a_word_by_its_source(tmp_path) -> None:
    bad = tmp_path / "data.jsonl"
    bad.write_text('{"body": "no"}\n')
    with pytest.raises(UsageError) as refused:
        mixed({"prose": (bad, 1)}, tmp_path / "cache")
    (problem,) = refused.value.problems
    assert problem.startswith(f"{bad}:1: ")
    assert "; data.sources.prose.text_key names" in problem
    with pytest.raises(UsageError, match=r"^data\.vocab_size=9: "):
        mixed({"prose": (text_folder(tmp_path / "prose", "sea"), 1)}, tmp_path / "cache", tokenizer=None, vocab_size=9)


def test_one_tokenizer_is_learnt_once_by_two_at_a_time(tmp_path, monkeypatch) -> None:
    prose = text_folder(tmp_path / "prose", "sea")
    learnt = mixed({"prose": (prose, 1)}, tmp_path / "cache")
    looks, whole = [], mix_sources.store.is_whole

    def is_whole(folder: Path) -> bool:
        """The other is done between the first look at the tokenizer and the lock."""
        looks.extend([folder] if folder.name.startswith("tokenizer-") else [])
        return len(looks) != 1 and whole(folder)

    monkeypatch.setattr(mix_sources.store, "is_whole", is_whole)
    monkeypatch.setattr(mix_sources, "write_shards", None)
    assert mixed({"prose": (prose, 1)}, tmp_path / "cache").manifest == learnt.manifest
    assert len(looks) == 2


def test_a_source_without_train_rows_is_refused(tmp_path, folders) -> None:
    empty = write_shards(tmp_path / "empty", {"train": []}, vocab_size=1000)
    with pytest.raises(UsageError, match=r"empty: the train split holds no target token"):
        mixed({"few": (folders["few"], 1), "empty": (empty, 1)})


def test_the_fingerprint_names_sources_and_shares(folders) -> None:
    few, more = folders["few"], folders["more"]
    base = mixed({"a": (few, 1), "b": (more, 3)})
    assert mixed({"b": (more, 0.75), "a": (few, 0.25)}).fingerprint == base.fingerprint
    for other in ({"a": (few, 1), "b": (more, 2)}, {"a": (more, 1), "b": (few, 3)}, {"a": (few, 1)}):
        assert mixed(other).fingerprint != base.fingerprint
    with pytest.raises(UsageError, match="too small"):
        base.check_vocabulary(999)


def test_scoring_takes_the_sources_in_turn_and_keeps_them_apart(tmp_path) -> None:
    sizes = {"a": 3, "b": 9, "c": 0}
    sources: dict[str, tuple[Path | str, float]] = {}
    for name, size in sizes.items():
        splits = {"train": np.array(documents(1, 3)), "val": np.array(documents(1, size)).reshape(size, 7)}
        sources[name] = (write_shards(tmp_path / name, splits, vocab_size=200), 1)
    windows = list(mixed(sources).scoring_loader("val"))
    assert [window["source"] for window in windows][:4] == ["a", "b", "a", "b"]
    found = {name: sum(w["targets"] for w in windows if w["source"] == name) for name in sizes}
    assert found == {name: 6 * size for name, size in sizes.items()}
    assert in_turn([1, 3, 2]) == [0, 1, 4, 2, 5, 3]
    with pytest.raises(UsageError, match="split=test: a\\+b\\+c has no tokens in it; it has train, val"):
        mixed(sources).scoring_loader("test")
