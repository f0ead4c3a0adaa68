"""What tests of the front doors share (door.py), and a training that needs no torch."""

import pytest
from fake import Sweep

from door import compose, composer, door, plain_environment, tree

__all__ = ["compose", "composer", "door", "plain_environment", "sweep", "tree"]


@pytest.fixture
def sweep(tmp_path) -> Sweep:
    return Sweep(tmp_path)
