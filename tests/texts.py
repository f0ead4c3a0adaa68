"""Small corpora, and what became of them once they were prepared."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lmforge.data.corpora import text_shards
from lmforge.data.documents import Document, Report
from lmforge.data.shards import TokenShards, read_manifest
from lmforge.data.sources import stdlib_source, text_source
from lmforge.data.tokenizer import Tokenizer

WORDS = [f"word{i}" for i in range(500)]
NODE = {"text_key": "text", "on_bad": "strict", "vocab_size": 300, "tokenizer": None}


def some_text(seed: Any, n: int = 60) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=n)) + "\n"


def jsonl(path: Path, texts: Iterable[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def prepared(path: str | Path, cache: Path, **changed: Any) -> Path:
    """The shard folder of data=text; `changed` are keys of the data node, or workers and make."""
    how = {key: changed.pop(key) for key in ("workers", "make") if key in changed}
    return text_shards({**NODE, "path": str(path), **changed}, cache=cache, **how)


def names_of(folder: Path) -> dict[str, list[str]]:
    return json.loads((folder / "documents.json").read_text())


def texts_of(folder: Path) -> dict[str, list[str]]:
    """The text of every document by split, decoded from the shards, marks checked."""
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    found = {}
    for split in read_manifest(folder)["splits"]:
        shards = TokenShards.open(folder, split)
        documents = [shards.document(i) for i in range(shards.n_documents)]
        assert all((d[0], d[-1]) == (tokenizer.bos, tokenizer.eos) for d in documents)
        found[split] = [tokenizer.decode(d) for d in documents]
    return found


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_text(path: str | Path, report: Report | None = None, key: str = "text") -> list[Document]:
    """The documents of data=text as the reader gives them; strict unless `report` is lenient."""
    return list(text_source(str(path), key).read(report or Report()))


def stdlib_documents(root: Path | None = None, report: Report | None = None) -> list[Document]:
    return list(stdlib_source(root).read(report or Report(lenient=True)))
