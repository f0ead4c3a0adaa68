"""What the image installs before the source is copied: writes requirements.txt and pins.txt into the working folder.

`python requirements.py EXTRAS` reads pyproject.toml and constraints.txt there. In a base image with a torch of its own
everything that is there is pinned to the version it has: a vendor builds these packages for each other.
"""

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path


def requirements(project: dict, extras: list[str]) -> Iterator[str]:
    """The dependencies and those of the extras; an extra may name others of the project's own."""
    yield from project["dependencies"]
    for extra in extras:
        for text in project["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{re.escape(project['name'])}\[(.*)\]", text)
            yield from requirements({**project, "dependencies": []}, own[1].split(",")) if own else [text]


def installed() -> dict[str, str]:
    return {normal(found.metadata["Name"]): found.version for found in importlib.metadata.distributions()}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(constraints: str, here: dict[str, str]) -> list[str]:
    ours = dict(line.split("==") for line in constraints.splitlines() if line and not line.startswith("#"))
    kept = here if "torch" in here else {}
    named = [f"{name}=={kept.get(normal(name), version)}" for name, version in ours.items()]
    return [*named, *(f"{name}=={kept[name]}" for name in kept if name not in map(normal, ours))]


if __name__ == "__main__":
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    wanted = requirements(project, [extra for extra in sys.argv[1].split(",") if extra])
    Path("requirements.txt").write_text("\n".join(dict.fromkeys(wanted)) + "\n")
    Path("pins.txt").write_text("\n".join(pins(Path("constraints.txt").read_text(), installed())) + "\n")
