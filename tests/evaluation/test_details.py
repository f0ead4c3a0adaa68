"""evaluate.py's calibration and domains: the numbers of a plain forward pass, for any ranks and any batch."""

import itertools
import math
import re
import warnings
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fits import fit, score
from lmforge.data.shards import TokenShards, write_shards
from lmforge.data.tokenizer import Tokenizer
from lmforge.evaluation import details, domains
from lmforge.models.gpt import GPT
from lmforge.runs.folder import RunFolder, list_checkpoints
from lmforge.training.checkpoint import Checkpoint
from ranks import run_ranks
from tiny import compose_on, evaluate

TEXTS = [f"def f{n}(x):\n    return x + {n}\n\n\ndef g{n}(y):\n    return f{n}(y)\n" * (1 + n % 4) for n in range(12)]
NAMES = ["a/x.py", "b.txt", "a/y.py", "c.jsonl:1", "c.jsonl:2"]
CONTEXT = 32


@dataclass
class Trained:
    folder: Path
    shards: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run whose five validation documents of uneven length belong to three domains; rows overlap by a half."""
    root = tmp_path_factory.mktemp("details")
    tokenizer = Tokenizer.train(TEXTS, 300)
    documents = [tokenizer.document(ids) for ids in tokenizer.encode_many(TEXTS)]
    split = {"train": documents[5:], "val": documents[:5]}
    names = {"train": [str(number) for number in range(7)], "val": NAMES}
    folder = write_shards(root / "shards", split, tokenizer.size, tokenizer, names=names)
    words = ("optimizer.lr=1e-2", "callbacks.samples=null", "data.overlap=0.5", "model.tied=true")
    return Trained(fit(folder, *words, f"paths.root={root}").folder, folder)


def by_hand(run: Trained) -> dict[str, list[tuple[float, float, bool]]]:
    """Domain -> (nats, confidence, right?) of each target, from parts of documents one by one, in float64."""
    reader = Checkpoint(list_checkpoints(run.folder / "checkpoints")[-1]).reader("weights")
    options = {key: value for key, value in RunFolder(run.folder).load_plain()["model"].items() if key != "_target_"}
    network = GPT(**options | {"vocab_size": 320}).double().eval()
    network.load_state_dict({name: reader.read(name) for name in reader.names()})
    val = TokenShards.open(run.shards, "val")
    found: dict[str, list[tuple[float, float, bool]]] = {"a": [], "b.txt": [], "c.jsonl": []}
    seen = 0
    for start in range(0, val.n_tokens - 1, CONTEXT // 2):
        end = min(start + CONTEXT + 1, val.n_tokens)
        borders = sorted({start, end, *(int(o) for o in val.offsets if start < o < end)})
        for begin, stop in itertools.pairwise(borders):
            document = int(np.searchsorted(val.offsets, begin, side="right")) - 1
            ids = torch.tensor(val.tokens(begin, stop).astype(np.int64))
            with torch.no_grad():
                p = network(ids[None, :-1])[0].softmax(-1) if len(ids) > 1 else []
            for place, row in enumerate(p):
                if begin + place + 1 > seen:
                    target = int(ids[place + 1])
                    entry = (-math.log(row[target]), float(row.max()), int(row.argmax()) == target)
                    found[["a", "b.txt", "a", "c.jsonl", "c.jsonl"][document]].append(entry)
        seen = max(seen, end - 1)
    return found


def plain(run: Trained, *words: str) -> dict[str, Any]:
    return compose_on("evaluate", run.folder, "trainer.threads=1", "precision=64-true", *words)


@pytest.fixture(scope="module")
def result(trained) -> dict[str, Any]:
    return evaluate(plain(trained, "batch_sequences=2"), trained.folder)


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The fields of two results that differ by more than the last digits of float64."""
    keys = ("loss", "perplexity", "accuracy", "bits_per_byte", "targets", "ece", "calibration", "domains")
    return [key for key in keys if not close(one[key], other[key])]


def close(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    return one == other if isinstance(one, int) else math.isclose(one, other, rel_tol=1e-9)


def test_domains_are_those_of_a_plain_forward_pass(trained, result) -> None:
    expected = by_hand(trained)
    assert set(result["domains"]) == set(expected)
    sizes = {"a": [0, 2], "b.txt": [1], "c.jsonl": [3, 4]}
    for name, entries in expected.items():
        row, size = result["domains"][name], sum(len(TEXTS[number].encode()) for number in sizes[name])
        assert (row["targets"], row["documents"], row["bytes"]) == (len(entries), len(sizes[name]), size)
        assert row["correct"] == sum(right for _, _, right in entries)
        assert row["bits_per_byte"] == pytest.approx(sum(nats for nats, _, _ in entries) / math.log(2) / size, abs=1e-6)
    hardest = [row["bits_per_byte"] for row in result["domains"].values()]
    assert hardest == sorted(hardest, reverse=True)


def test_calibration_is_that_of_a_plain_forward_pass(trained, result) -> None:
    entries = [entry for part in by_hand(trained).values() for entry in part]
    bins = [[e for e in entries if number / 15 < e[1] <= (number + 1) / 15] for number in range(15)]
    gaps = [abs(sum(right for _, _, right in part) - sum(sure for _, sure, _ in part)) for part in bins]
    assert result["ece"] == pytest.approx(sum(gaps) / len(entries), abs=1e-6)
    assert [row["targets"] for row in result["calibration"]["bins"]] == [len(part) for part in bins if part]
    assert result["calibration"]["accuracy"] == result["accuracy"]


def test_the_domains_sum_to_the_headline_to_the_last_digit(result) -> None:
    rows = result["domains"].values()
    nats, targets, size = (sum(row[key] for row in rows) for key in ("nats", "targets", "bytes"))
    assert (nats / targets, targets) == (result["loss"], result["targets"])
    assert nats / math.log(2) / size == result["bits_per_byte"]
    assert sum(entry["targets"] for entry in result["calibration"]["bins"]) == targets


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_the_batch_changes_nothing(trained, result, rows) -> None:
    assert not differences(result, evaluate(plain(trained, f"batch_sequences={rows}"), trained.folder))


@pytest.mark.parametrize(
    ("word", "world"), [("strategy=ddp", 2), ("strategy=ddp", 3), ("strategy=context", 2), ("strategy=pipeline", 2)]
)
def test_ranks_change_nothing(trained, result, word, world) -> None:
    words = ("batch_sequences=1", word, f"trainer.devices={world}")
    for other in run_ranks(changed, world, strict, plain(trained, *words), trained.folder):
        assert not differences(result, other)


def strict() -> None:
    """Nobody is told that a metric had nothing to count on this rank."""
    warnings.filterwarnings("error", message=".*was called before the ``update`` method")


def shifted() -> None:
    """Labels are looked up one row too early."""
    look = details.label_documents
    details.label_documents = lambda rows, numbers: look(rows, np.maximum(numbers - 1, 0))


def unshared() -> None:
    """Ranks keep their sums of domains for themselves."""
    domains.DomainSums.sync = lambda self, *args, **kwargs: None  # type: ignore[method-assign]
    domains.DomainSums.unsync = lambda self, *args, **kwargs: None  # type: ignore[method-assign]


def changed(change: Any, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    change()
    return evaluate(config, folder)


@pytest.mark.parametrize(("change", "noticed"), [(shifted, "domains"), (unshared, "loss")])
def test_a_wrong_place_or_a_rank_left_out_is_noticed(trained, result, change, noticed) -> None:
    words = ("batch_sequences=1", "trainer.devices=2")
    outcomes = run_ranks(changed, 2, change, plain(trained, *words), trained.folder)
    assert all(noticed in differences(result, other) for other in outcomes)


def test_both_can_be_left_out_and_the_headline_stays(trained, result) -> None:
    without = evaluate(plain(trained, "calibration_bins=0", "domains=false"), trained.folder)
    assert not {"ece", "calibration", "domains"} & set(without)
    assert without["loss"] == pytest.approx(result["loss"], rel=1e-12)
    assert not list(trained.folder.glob("evaluation-*.svg"))


def test_without_names_there_are_no_domains_and_without_a_tokenizer_no_bytes(tmp_path) -> None:
    """One file of 1000 tokens: 999 targets, each once, for any batch that does not divide them."""
    tokens = {"train": [np.arange(400) % 40], "val": [np.arange(1000) * 7 % 40]}
    shards = write_shards(tmp_path / "s", tokens, vocab_size=40)
    run = fit(shards, "model.context=64", "batch.sequences=2", "trainer.max_steps=1", "callbacks.samples=null")
    found = [score(run.folder, "precision=64-true", f"batch_sequences={rows}") for rows in (1, 3, 4)]
    assert [result["targets"] for result in found] == [999, 999, 999]
    assert [sum(row["targets"] for row in result["calibration"]["bins"]) for result in found] == [999, 999, 999]
    assert [result["loss"] for result in found] == pytest.approx([found[0]["loss"]] * 3, rel=1e-12)
    assert [result["ece"] for result in found] == pytest.approx([found[0]["ece"]] * 3, rel=1e-9)
    assert not {"domains", "bits_per_byte"} & set(found[0])


def test_the_windows_of_a_mixture_say_their_domain(trained, monkeypatch) -> None:
    """Sources of a mixture come with their windows; the number of sources is the manifest's."""

    class Noted(details.Details):
        def __init__(self, cfg: Any, data: Any):
            data.manifest = data.manifest | {"sources": {"first": {}, "second": {}, "third": {}}}
            super().__init__(cfg, data)

        def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, index: int, other: int = 0) -> None:
            batch["source"] = ("second", "first")[index % 2]
            super().on_validation_batch_start(trainer, module, batch, index, other)

    monkeypatch.setattr(details, "Details", Noted)
    result = score(trained.folder, "batch_sequences=1")
    assert set(result["domains"]) == {"first", "second"}
    assert sum(row["targets"] for row in result["domains"].values()) == result["targets"]


def test_what_is_shown(trained, result, capsys) -> None:
    evaluate(plain(trained), trained.folder)
    shown = capsys.readouterr().out
    for part in ("bits per byte", "3 domains", "b.txt", "expected error (ECE)", "as JSON in"):
        assert part in shown
    file = Path(re.findall(r"^drawn in +(\S+)$", shown, flags=re.MULTILINE)[0])
    texts = ["".join(node.itertext()) for node in ElementTree.parse(file).iter() if node.tag.endswith("text")]
    assert {"a", "b.txt", "c.jsonl", f"reliability: expected calibration error {result['ece']:.4f}"} <= set(texts)


def test_a_bin_says_how_sure_and_how_right(result) -> None:
    for entry in result["calibration"]["bins"]:
        assert entry["above"] < entry["confidence"] <= entry["to"] + 1e-12
        assert 0.0 <= entry["accuracy"] <= 1.0
