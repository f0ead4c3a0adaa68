"""Which domain a target belongs to: names of documents, places of labels, and the sums of each."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lmforge.config.errors import UsageError
from lmforge.data.packing import IGNORED, PackedRows
from lmforge.data.shards import TokenShards, write_shards
from lmforge.evaluation.domains import DomainSums, document_names, domain_of, label_documents, totals
from lmforge.tasks.metrics import TokenScores

LENGTHS = [5, 1, 0, 9, 2, 30, 3]


def shards(folder: Path, names: list[str] | None = None) -> TokenShards:
    documents = [np.full(length, number) for number, length in enumerate(LENGTHS)]
    write_shards(folder, {"val": documents}, vocab_size=20, names=None if names is None else {"val": names})
    return TokenShards.open(folder, "val")


@pytest.mark.parametrize(
    ("name", "source", "domain"),
    [
        ("json/decoder.py", "stdlib", "json"),
        ("uuid.py", "stdlib", "uuid"),
        ("news/2024/a.txt", "text", "news"),
        ("notes.md", "text", "notes.md"),
        ("chat.jsonl:17", "text", "chat.jsonl"),
        ("chats/a.jsonl:17", "text", "chats"),
        ("book.txt[900:]", "text", "book.txt"),
        ("uuid.py", None, "uuid.py"),
    ],
)
def test_domain_of_a_document(name, source, domain) -> None:
    assert domain_of(name, source) == domain


@pytest.mark.parametrize("stride", [8, 3, 1])
def test_every_label_finds_its_document(tmp_path, stride) -> None:
    """Each document repeats its own number as its tokens, so a label says where it comes from."""
    rows = PackedRows(shards(tmp_path / "s"), context=8, stride=stride)
    numbers = np.arange(len(rows))[::-1]
    labels = rows.batch(numbers)["labels"].numpy()
    found = label_documents(rows, numbers)
    counted = labels != IGNORED
    assert counted.sum() == sum(length - 1 for length in LENGTHS if length)
    assert found.shape == labels.shape
    assert (found[counted] == labels[counted]).all()
    inputs = np.roll(found, 1, axis=1)  # what reading the place of the input instead would give
    assert (inputs[counted] != labels[counted]).any()


def test_rows_without_targets_have_a_place_too(tmp_path) -> None:
    rows = PackedRows(shards(tmp_path / "s"), context=8)
    found = label_documents(rows, np.array([len(rows) - 1, -1]))
    assert ((found >= 0) & (found < len(LENGTHS))).all()


def scored(nats: list[float], correct: list[bool]) -> TokenScores:
    ones = torch.ones(len(nats), dtype=torch.bool)
    return TokenScores(
        torch.tensor(nats, dtype=torch.float64), ones, torch.tensor(correct), 2 * ones.long(), ones.double()
    )


def test_sums_of_domains_are_those_of_the_whole() -> None:
    sums = DomainSums(["easy", "empty", "hard"], ["easy", "hard", "hard"])
    sums.update(scored([0.1, 3.0, 0.2], [True, False, True]), torch.tensor([0, 2, 0]))
    sums.update(scored([2.0, 1.0], [False, False]), torch.tensor([2, 2]))
    domains = sums.compute()
    assert list(domains) == ["hard", "easy"]
    assert (domains["hard"]["loss"], domains["hard"]["accuracy"], domains["hard"]["documents"]) == (2.0, 0.0, 2)
    assert domains["easy"]["bits_per_byte"] == pytest.approx(0.3 / np.log(2) / 4)
    whole = totals(domains)
    assert whole["loss"] == (3.0 + 2.0 + 1.0 + (0.1 + 0.2)) / 5
    assert whole["accuracy"] == 0.4
    mean_of_domains = sum(row["loss"] for row in domains.values()) / 2
    assert abs(mean_of_domains - whole["loss"]) > 0.01


def test_names_come_from_the_shards_or_are_not_known(tmp_path) -> None:
    names = [f"{letter}.txt" for letter in "abcdefg"]
    assert document_names(shards(tmp_path / "named", names)) == names
    assert document_names(shards(tmp_path / "bare")) is None


@pytest.mark.parametrize("content", [{"val": ["a"]}, {"val": [1] * 7}, {"train": []}, ["val"], "{"])
def test_names_that_do_not_fit_are_refused(tmp_path, content) -> None:
    opened = shards(tmp_path / "s")
    text = content if isinstance(content, str) else json.dumps(content)
    (opened.folder / "documents.json").write_text(text)
    with pytest.raises(UsageError, match=r"documents\.json"):
        document_names(opened)
