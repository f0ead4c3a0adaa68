"""What tests of the front doors share; see door.py."""

from door import compose, composer, door, plain_environment, tree

__all__ = ["compose", "composer", "door", "plain_environment", "tree"]
