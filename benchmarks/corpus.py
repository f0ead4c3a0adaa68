"""Text every machine has, as bytes, so that every contender can read it: sources of the standard library."""

import sysconfig
from functools import cache
from pathlib import Path

import numpy as np

from lmforge.data.shards import write_shards

VOCABULARY = 256
END = np.zeros(1, dtype=np.int64)  # a byte that no source holds


@cache
def texts(megabytes: float) -> list[bytes]:
    """Whole modules in order of their names, at least so many megabytes of them."""
    found, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_bytes().replace(b"\0", b"")
        found.append(text)
        size += len(text)
        if size >= 1e6 * megabytes:
            break
    return found


def byte_shards(folder: Path, megabytes: float) -> Path:
    """Shards of byte tokens, one document a module; every tenth module is for validation."""
    documents = [np.concatenate((np.frombuffer(text, np.uint8).astype(np.int64), END)) for text in texts(megabytes)]
    held_out = documents[9::10] or documents[-1:]
    train = [document for number, document in enumerate(documents) if number % 10 != 9]
    return write_shards(folder, {"train": train, "val": held_out}, vocab_size=VOCABULARY)
