from pathlib import Path

import pytest

from texts import some_text


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of 30 little text files."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02d}.txt").write_text(some_text(i))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"
