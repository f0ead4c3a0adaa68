"""Memory does not grow with the corpus. Peaks are those of processes of their own, workers included."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lmforge.data.shards import TokenShards
from texts import jsonl, prepared, texts_of

MB = 1024  # of what getrusage counts in
READ = """
import resource, sys
from texts import read_text
from lmforge.data.documents import Report
from lmforge.data.sources import text_source
print(sum(1 for _ in text_source(sys.argv[1]).read(Report())))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
PREPARE = """
import resource, sys
from pathlib import Path
from texts import prepared
if __name__ == "__main__":
    prepared(sys.argv[1], Path(sys.argv[2]), workers=int(sys.argv[3]))
    print(max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
"""


def _run(code, folder, *arguments):
    (folder / "script.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, str(folder / "script.py"), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


def _many(path, megabytes):
    """Short documents that all differ."""
    rng = np.random.default_rng(0)
    words = np.array([f"w{i}" for i in range(20_000)])
    with path.open("w") as file:
        while file.tell() < megabytes * 1e6:
            file.write(json.dumps({"text": " ".join(words[rng.integers(0, 20_000, 300)])}) + "\n")
    return path


def test_reading_holds_one_document(tmp_path):
    small, large = (_many(tmp_path / f"{size}.jsonl", size) for size in (0.001, 15))
    (few, peak), (many, larger_peak) = _run(READ, tmp_path, small), _run(READ, tmp_path, large)
    assert (few, many) == (1, pytest.approx(8_000, rel=0.1))
    assert larger_peak - peak < 5 * MB


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_preparing_a_large_corpus_needs_no_more_than_a_small_one(tmp_path, cache, workers):
    small, large = (_many(tmp_path / f"{size}.jsonl", size) for size in (4, 60))
    (peak,), (larger_peak,) = (_run(PREPARE, tmp_path, path, cache, workers) for path in (small, large))
    assert larger_peak - peak < 20 * MB


@pytest.mark.slow
def test_one_huge_record_needs_little_memory(tmp_path, cache):
    rng = np.random.default_rng(0)
    words = np.array([f"w{i}" for i in range(50_000)])
    huge = " ".join(words[rng.integers(0, 50_000, 3_600_000)])
    assert len(huge) > 20_000_000
    paths = {name: tmp_path / f"{name}.jsonl" for name in ("small", "large")}
    for name, text in (("small", "tiny"), ("large", huge)):
        jsonl(paths[name], ["a short one", text, "another short one"])
    (peak,), (larger_peak,) = (_run(PREPARE, tmp_path, path, cache, 1) for path in paths.values())
    assert larger_peak - peak < 300 * MB
    folder = prepared(paths["large"], cache)
    texts = texts_of(folder)["train"]
    assert huge in texts

    (tmp_path / "files").mkdir()
    for name, text in (("a", "a short one"), ("b", huge), ("c", "another short one")):
        (tmp_path / "files" / f"{name}.txt").write_text(text)
    from_txt = prepared(tmp_path / "files", cache, tokenizer=str(folder / "tokenizer.json"))
    lengths = [np.diff(TokenShards.open(one, "train").offsets).max() for one in (folder, from_txt)]
    assert lengths[0] == lengths[1] > 5_000_000
