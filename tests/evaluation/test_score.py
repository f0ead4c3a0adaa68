"""evaluate.py on a small trained run: the numbers of a plain forward pass, whatever the batch."""

import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fits import Fit, fit, score
from lmforge.config.errors import NonFinite, UsageError
from lmforge.data.shards import TokenShards, write_shards
from lmforge.data.tokenizer import Tokenizer
from lmforge.models.gpt import GPT
from lmforge.runs.folder import RunFolder, list_checkpoints
from lmforge.training.checkpoint import Checkpoint, write_json
from lmforge.training.resume import tokenizer_of
from lmforge.training.samples import Samples
from tiny import metrics

TEXTS = [f"def f{n}(x):\n    return x + {n}\n\n\ndef g{n}(y):\n    return f{n}(y)\n" * 3 for n in range(12)]


def texts(folder: Path, learn_from: Sequence[str] = TEXTS, texts: Sequence[str] = TEXTS) -> Path:
    """Shards of a few texts with a tokenizer; 9 documents to learn from, 3 to score."""
    tokenizer = Tokenizer.train(learn_from, 300)
    documents = [tokenizer.document(ids) for ids in tokenizer.encode_many(texts)]
    return write_shards(folder, {"train": documents[:9], "val": documents[9:]}, tokenizer.size, tokenizer)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    root = tmp_path_factory.mktemp("trained")
    words = (f"paths.root={root}", "optimizer.lr=1e-2", "callbacks.samples.max_new_tokens=8")
    return fit(texts(root / "shards"), *words)


def by_hand(folder: Path, shards: Path) -> dict[str, float]:
    """Loss, accuracy and bits per byte by plain PyTorch in float32, row by row from the documents themselves."""
    reader = Checkpoint(list_checkpoints(folder / "checkpoints")[-1]).reader("weights")
    options = {key: value for key, value in RunFolder(folder).load_plain()["model"].items() if key != "_target_"}
    network = GPT(**options | {"vocab_size": 320}).eval()
    network.load_state_dict({name: reader.read(name) for name in reader.names()})
    val, tokenizer = TokenShards.open(shards, "val"), Tokenizer.load(shards / "tokenizer.json")
    loss, right, targets, size = 0.0, 0, 0, 0
    for start in range(0, val.n_tokens - 1, 32):
        borders = sorted({start, min(start + 33, val.n_tokens), *(o for o in val.offsets if start < o < start + 33)})
        for begin, end in itertools.pairwise(borders):  # the parts of documents in this row
            ids = torch.tensor(val.tokens(begin, end).astype(np.int64))
            with torch.no_grad():
                logits = network(ids[None, :-1])[0] if len(ids) > 1 else torch.empty(0, 320)
            loss += float(F.cross_entropy(logits, ids[1:], reduction="sum")) if len(ids) > 1 else 0.0
            right += int((logits.argmax(-1) == ids[1:]).sum())
            targets += len(ids) - 1
            size += sum(len(tokenizer.token_bytes[i]) for i in ids[1:])
    assert size == len("".join(TEXTS[9:]).encode())
    return {"loss": loss / targets, "accuracy": right / targets, "bits_per_byte": loss / math.log(2) / size}


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_the_report_is_that_of_a_plain_forward_pass_for_any_batch(trained, rows) -> None:
    shards = Path(trained.trainer.datamodule.folder)
    expected = by_hand(trained.folder, shards)
    result = score(trained.folder, f"batch_sequences={rows}")
    for name, value in expected.items():
        assert result[name] == pytest.approx(value, abs=1e-5)
    val = TokenShards.open(shards, "val")
    assert (result["targets"], result["documents"]) == (val.n_tokens - val.n_documents, 3)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))


def test_other_weights_have_another_result(trained, tmp_path) -> None:
    other = fit(Path(trained.trainer.datamodule.folder), "seed=1", "optimizer.lr=1e-2", "callbacks.samples=null")
    assert abs(score(other.folder)["loss"] - score(trained.folder)["loss"]) > 1e-4


def test_training_reported_the_same_at_its_end(trained) -> None:
    result = score(trained.folder)
    for name in ("loss", "accuracy", "bits_per_byte"):
        assert trained.summary[f"val/{name}"] == pytest.approx(result[name], abs=1e-5)
    assert metrics(trained.folder, "val/loss")[-1][1] == pytest.approx(result["loss"], abs=1e-5)


@pytest.mark.parametrize("word", ["compile=eager", "trainer.activation_checkpointing=1"])
def test_a_network_that_was_wrapped_in_training_is_read_without_its_wrappers(trained, word) -> None:
    shards = Path(trained.trainer.datamodule.folder)
    run = fit(shards, word, "optimizer.lr=1e-2", "callbacks.samples=null")
    assert score(run.folder)["loss"] == pytest.approx(score(trained.folder)["loss"], abs=1e-5)


def test_the_report_says_what_was_scored_and_lies_beside_the_run(trained) -> None:
    result = score(trained.folder)
    stored = json.loads((trained.folder / "evaluation-val-step-00000006.json").read_text())
    assert stored == result
    checkpoint = Checkpoint(list_checkpoints(trained.folder / "checkpoints")[-1])
    assert (result["step"], result["hash"], result["context"]) == (6, checkpoint.hash, 32)
    assert result["precision"] == "weights float32, compute float32, gradient reduction float32"


def test_a_limit_scores_less_and_is_held_against_no_whole_file(trained) -> None:
    result = score(trained.folder, "batch_sequences=1", "limit_batches=1")
    assert result["targets"] <= 32
    assert (result["documents"], result["gzip_bits_per_byte"], result["limit_batches"]) == (None, None, 1)


@pytest.mark.parametrize("word", ["data.overlap=0.75", "limit_batches=2", "precision=64-true", "data.path=OTHER"])
def test_another_way_of_scoring_has_a_file_of_its_own(trained, tmp_path, word) -> None:
    plain = trained.folder / "evaluation-val-step-00000006.json"
    result = score(trained.folder)
    before, files = plain.read_text(), set(trained.folder.glob("evaluation-*.json"))
    assert result["plain"]
    for _ in range(2):
        other = score(trained.folder, word.replace("OTHER", str(texts(tmp_path / "other", texts=TEXTS[2:]))))
    assert not other["plain"]
    assert plain.read_text() == before
    (added,) = set(trained.folder.glob("evaluation-*.json")) - files
    assert re.fullmatch(r"evaluation-val-step-00000006-[0-9a-f]{8}\.json", added.name)
    assert json.loads(added.read_text()) == other
    assert (other["data_hash"] == result["data_hash"]) == (not word.startswith("data.path"))


@pytest.mark.parametrize("word", ["split=test", "ckpt=step-00000001", "ckpt=nowhere"])
def test_what_is_not_there_is_no_reason_to_score_something_else(trained, word) -> None:
    with pytest.raises(UsageError):
        score(trained.folder, word)


def test_another_tokenizer_is_refused(trained, tmp_path) -> None:
    other = texts(tmp_path / "other", learn_from=["quite another text " * 9])
    with pytest.raises(UsageError, match="do not share a tokenizer: sha256"):
        score(trained.folder, f"data.path={other}")


def test_another_end_of_text_rule_is_refused(trained, tmp_path) -> None:
    other = texts(tmp_path / "other")
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["tokenizer"]["end_of_text"] = "text only"
    write_json(other / "manifest.json", manifest)
    with pytest.raises(UsageError, match="end_of_text bos text eos there, text only here"):
        score(trained.folder, f"data.path={other}")


def test_the_same_tokens_elsewhere_are_taken(trained, tmp_path) -> None:
    other = texts(tmp_path / "other")
    assert score(trained.folder, f"data.path={other}")["loss"] == score(trained.folder)["loss"]


def test_weights_that_give_no_number_are_no_result(trained, monkeypatch) -> None:
    monkeypatch.setattr(GPT, "forward", lambda self, ids, *rest: torch.full((*ids.shape, 320), math.nan))
    with pytest.raises(NonFinite, match="not finite"):
        score(trained.folder)


def test_a_sample_is_written_with_dropout_off_and_leaves_training_alone(tmp_path, monkeypatch) -> None:
    shards = texts(tmp_path / "s")
    words = ("model.dropout=0.5", "trainer.val_every_n_steps=2", "callbacks.samples.max_new_tokens=5")
    modes: list[bool] = []
    forward = GPT.forward

    def noted(self: GPT, *args: Any, **options: Any) -> torch.Tensor:
        modes.append(self.training) if options.get("cache") is not None else None
        return forward(self, *args, **options)

    monkeypatch.setattr(GPT, "forward", noted)
    run = fit(shards, *words)
    sample = next(c for c in run.trainer.callbacks if isinstance(c, Samples))
    assert sample.text.startswith("def ")
    assert len(modes) >= 3
    assert not any(modes)
    silent = fit(shards, *words, "callbacks.samples=null")
    assert metrics(run.folder, "train/loss", "val/loss") == metrics(silent.folder, "train/loss", "val/loss")


def test_generation_refuses_a_tokenizer_that_is_not_the_weights(trained, tmp_path) -> None:
    run, checkpoint = RunFolder(tmp_path), Checkpoint(list_checkpoints(trained.folder / "checkpoints")[-1])
    Tokenizer.load(trained.folder / "tokenizer.json").save(tmp_path / "tokenizer.json")
    assert tokenizer_of(run, checkpoint).fingerprint == checkpoint.state["tokenizer"]["sha256"]
    Tokenizer.train(["quite another text " * 9], 300).save(tmp_path / "tokenizer.json")
    with pytest.raises(UsageError, match=r"tokenizer\.json is not the tokenizer of .*: sha256"):
        tokenizer_of(run, checkpoint)
    checkpoint.state["tokenizer"] = None
    tokenizer_of(run, checkpoint)
    checkpoint.state["tokenizer"] = "os.system"
    with pytest.raises(UsageError, match="tokenizer cannot be that"):
        tokenizer_of(run, checkpoint)
