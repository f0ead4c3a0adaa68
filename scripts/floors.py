"""Prints the lowest versions that pyproject.toml allows of what it names, as constraints for pip."""

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def floors() -> list[str]:
    extras = PROJECT["optional-dependencies"].values()
    named = [*PROJECT["dependencies"], *(text for extra in extras for text in extra)]
    return [f"{found[1]}=={found[2]}" for text in named if (found := re.match(r"([\w.-]+)>=([\w.]+)", text))]


if __name__ == "__main__":
    print("\n".join(floors()))
