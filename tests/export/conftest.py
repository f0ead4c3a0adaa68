"""Small tied runs with a tokenizer, each trained once for all tests of exports."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fits import Fit, fit
from lmforge.data.shards import write_shards
from lmforge.data.tokenizer import Tokenizer

TEXTS = [f"def f{n}(x):\n    return x + {n}\n\n\ndef g{n}(y):\n    return f{n}(y)\n" * 3 for n in range(12)]


@dataclass
class Runs:
    """`runs[precision]` is the folder of a run in that precision on `shards`."""

    shards: Path
    root: Path
    made: dict[str, Fit] = field(default_factory=dict)

    def __getitem__(self, precision: str) -> Path:
        if precision not in self.made:
            words = ("optimizer.lr=1e-2", "callbacks.samples=null", "trainer.max_steps=3", "model.tied=true")
            self.made[precision] = fit(self.shards, *words, f"precision={precision}", f"paths.root={self.root}")
        return self.made[precision].folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    tokenizer = Tokenizer.train(TEXTS, 300)
    documents = [tokenizer.document(ids) for ids in tokenizer.encode_many(TEXTS)]
    split = {"train": documents[:9], "val": documents[9:]}
    root = tmp_path_factory.mktemp("exports")
    return Runs(write_shards(root / "shards", split, tokenizer.size, tokenizer), root)
