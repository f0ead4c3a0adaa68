"""Packed rows: every target once, no label and no position across documents."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from builders import packed
from lmforge.config.errors import UsageError
from lmforge.data.packing import EMPTY, IGNORED, PackedRows


def reference(documents: Sequence[Sequence[int]], context: int) -> Iterator[dict[str, list[int]]]:
    """Rows by plain loops: walk the tokens one by one and remember which document each belongs to."""
    stream = [(token, number) for number, document in enumerate(documents) for token in document]
    for start in range(0, max(len(stream) - 1, 0), context):
        row: dict[str, list[int]] = {"input_ids": [], "labels": [], "doc_ids": [], "positions": []}
        for i in range(start, min(start + context, len(stream))):
            token, number = stream[i]
            goes_on = i + 1 < len(stream) and stream[i + 1][1] == number
            same_as_before = i > start and stream[i - 1][1] == number
            row["input_ids"].append(token)
            row["labels"].append(stream[i + 1][0] if goes_on else IGNORED)
            row["doc_ids"].append(number)
            row["positions"].append(row["positions"][-1] + 1 if same_as_before else 0)
        yield row


def ranks(numbers: np.ndarray) -> list[int]:
    """1, 2, 3 ... for the first, second, third different number."""
    return np.unique(numbers, return_inverse=True)[1].tolist()


def random_documents(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    lengths = rng.choice([1, 2, 3, 5, 8, 16, 40], size=rng.integers(1, 12))
    return [rng.integers(0, 1000, length).tolist() for length in lengths]


def differences(rows: PackedRows, documents: Sequence[Sequence[int]]) -> list[str]:
    """Names of what is not as in the reference, one for every row and array that differs."""
    found = []
    batch = {name: tensor.numpy() for name, tensor in rows.batch(np.arange(len(rows))).items()}
    expected = list(reference(documents, rows.context))
    assert len(rows) == len(expected)
    for i, row in enumerate(expected):
        size = len(row["input_ids"])
        for name in ("input_ids", "labels", "positions"):
            found += [f"{name} {i}"] if batch[name][i, :size].tolist() != row[name] else []
        found += [f"doc_ids {i}"] if ranks(batch["doc_ids"][i, :size]) != ranks(np.array(row["doc_ids"])) else []
        found += [f"tail {i}"] if (batch["labels"][i, size:] != IGNORED).any() else []
    return found


@pytest.mark.parametrize("seed", range(12))
def test_rows_equal_a_plain_walk_over_the_tokens(tmp_path, seed) -> None:
    documents = random_documents(seed)
    for context in (1, 4, 8):
        rows = packed(tmp_path / str(context), documents, context, max_shard_tokens=[1 << 20, 30][seed % 2])
        assert differences(rows, documents) == []


def test_the_comparison_sees_a_document_border_that_is_off_by_one(tmp_path) -> None:
    documents = [[1, 2, 3], [4, 5, 6, 7]]
    rows = packed(tmp_path / "s", documents, 8)
    rows.shards.offsets = np.array([0, 4, 7])
    assert differences(rows, documents) == ["labels 0", "positions 0", "doc_ids 0"]


@pytest.mark.parametrize("batch", [1, 3, 4, 16])
def test_999_targets_of_1000_tokens_each_once(tmp_path, batch) -> None:
    document = np.random.default_rng(0).permutation(1000)
    rows = packed(tmp_path / "s", [document], context=64)
    numbers = np.arange(len(rows))
    labels = [rows.batch(numbers[i : i + batch])["labels"].numpy() for i in range(0, len(rows), batch)]
    seen = np.concatenate([part[part != IGNORED] for part in labels])
    assert seen.tolist() == document[1:].tolist()


def test_two_documents_of_5_and_7_tokens_have_4_and_6_targets(tmp_path) -> None:
    a, b = list(range(10, 15)), list(range(20, 27))
    row = {name: values[0].tolist() for name, values in packed(tmp_path / "s", [a, b], 12).batch(np.array([0])).items()}
    assert row["labels"] == [*a[1:], IGNORED, *b[1:], IGNORED]
    assert row["positions"] == [*range(5), *range(7)]
    assert len(set(row["doc_ids"][:5])) == len(set(row["doc_ids"][5:])) == 1
    assert row["doc_ids"][4] != row["doc_ids"][5]


def test_a_border_between_rows_is_no_place_to_lose_or_gain_a_target(tmp_path) -> None:
    """Documents that begin and end exactly where rows do, and one that is cut in the middle."""
    documents = [[*range(8)], [*range(100, 116)], [*range(200, 206)]]
    batch = packed(tmp_path / "s", documents, 8).batch(np.arange(4))
    assert batch["labels"][0].tolist() == [*range(1, 8), IGNORED]
    assert batch["labels"][1].tolist() == [*range(101, 109)]
    assert batch["labels"][2].tolist() == [*range(109, 116), IGNORED]
    assert (batch["positions"][:3].numpy() == np.arange(8)).all()
    assert batch["labels"][3].tolist() == [*range(201, 206), *[IGNORED] * 3]


def test_empty_documents_change_nothing(tmp_path) -> None:
    documents = [[1, 2, 3], [], [], [4, 5], []]
    rows = packed(tmp_path / "s", documents, 4)
    assert differences(rows, documents) == []


def test_an_empty_row_has_the_shape_of_a_row_and_no_target(tmp_path) -> None:
    rows = packed(tmp_path / "s", [[1, 2, 3, 4, 5]], 4)
    batch = rows.batch(np.array([0, EMPTY]))
    assert batch["labels"].tolist() == [[2, 3, 4, 5], [IGNORED] * 4]
    assert batch["input_ids"].shape == (2, 4)
    assert 0 <= int(batch["input_ids"].min()) <= int(batch["input_ids"].max()) < 1000


@pytest.mark.parametrize(("documents", "count"), [([], 0), ([[1]], 0), ([[1, 2]], 1), ([[1] * 9], 2), ([[1] * 10], 3)])
def test_number_of_rows(tmp_path: Path, documents, count) -> None:
    assert len(packed(tmp_path / "s", documents, 4)) == count


def test_several_shard_files_give_the_rows_of_one(tmp_path) -> None:
    documents = random_documents(5)
    one, many = packed(tmp_path / "1", documents, 8), packed(tmp_path / "2", documents, 8, max_shard_tokens=5)
    assert len(list((tmp_path / "2").glob("*.tokens"))) > 3
    for name, values in one.batch(np.arange(len(one))).items():
        assert values.equal(many.batch(np.arange(len(many)))[name])


def test_a_limit_keeps_the_first_rows(tmp_path) -> None:
    rows = packed(tmp_path / "s", [list(range(100))], 8)
    assert len(PackedRows(rows.shards, 8, limit=3)) == 3
    assert len(PackedRows(rows.shards, 8, limit=10_000)) == len(rows) == 13


@pytest.mark.parametrize("stride", [1, 3, 8])
def test_overlapping_rows_score_every_target_once_with_more_context(tmp_path, stride) -> None:
    documents = random_documents(3)
    rows = packed(tmp_path, documents, 8)
    overlapping = PackedRows(rows.shards, 8, stride=stride)
    batch = overlapping.batch(np.arange(len(overlapping)))
    labelled = (batch["labels"] != IGNORED).numpy()
    place = np.arange(len(overlapping))[:, None] * stride + np.arange(8)
    scored = np.sort(place[labelled])
    ends = np.cumsum([len(document) for document in documents]) - 1
    assert scored.tolist() == [i for i in range(ends[-1]) if i not in ends]
    seen = np.broadcast_to(np.arange(8), labelled.shape)[1:][labelled[1:]]
    assert (seen >= 8 - stride).all()


@pytest.mark.parametrize("stride", [0, -1, 9])
def test_a_stride_that_leaves_gaps_or_never_moves_is_refused(tmp_path, stride) -> None:
    rows = packed(tmp_path, [[0, 5, 1]], 8)
    with pytest.raises(UsageError, match=f"stride={stride}"):
        PackedRows(rows.shards, 8, stride=stride)
