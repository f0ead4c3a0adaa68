"""What a call of the benchmarks asks for."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """`quick` shrinks every row until all of them take less than a minute; its figures mean nothing."""

    quick: bool
    folder: Path  # scratch space, removed at the end

    def pick(self, whole: T, quick: T) -> T:
        return quick if self.quick else whole
