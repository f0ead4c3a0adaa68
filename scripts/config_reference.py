"""Writes docs/config-reference.md from the comments in configs/ and the key table: make config-reference"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from lmforge.config.keys import find_key
from lmforge.config.plain import flatten
from lmforge.config.schema import allowed

ROOT = Path(__file__).resolve().parents[1]
CONFIGS, PAGE = ROOT / "configs", ROOT / "docs" / "config-reference.md"
PRESETS = ("experiment", "debug")  # they set keys of other groups
ON_RESUME = {"free": "taken", "logged": "taken and reported", "refused": "refused"}
HEAD = """\
# Config reference

<!-- Written by `make config-reference` from the comments in configs/ and the key table. Do not edit. -->

Every key of every config file. **Allowed** is what is checked before PyTorch is loaded; **on resume** says what a
changed value does to a stored run. Choose a group's file with `group=choice`, type a key as `group.key=value`.
"""


@dataclass(frozen=True)
class Entry:
    meaning: str
    default: str


def about(file: Path) -> str:
    """The comment at the top of a file, before its first key or blank line."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line != "# @package _global_"]
    head: list[str] = []
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if not line.startswith("#") or (
            head and not after.startswith("#") and re.match(r"(?!defaults|_target_)\w+:", after)
        ):
            break
        head.append(line.removeprefix("# "))
    return " ".join(head)


def comments(file: Path) -> dict[str, str]:
    """Dotted key -> the comment above it."""
    found: dict[str, str] = {}
    path: list[str] = []
    comment = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        key = re.match(r"""( *)["']?([\w.-]+)["']?:""", line)
        if key:
            depth = len(key[1]) // 2
            path = [*path[:depth], key[2]]
            found[".".join(path)] = comment
        comment = line.strip().removeprefix("# ") if line.lstrip().startswith("#") else ""
    return found


def entries(file: Path) -> dict[str, Entry]:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    content.pop("defaults", None)
    meanings = comments(file)
    return {key: Entry(meanings[key], shown(value)) for key, value in flatten(content) if not key.endswith("_target_")}


def shown(value: object) -> str:
    text = yaml.dump(value, default_flow_style=True, width=1000).strip().removesuffix("\n...").strip()
    return "must be given" if value == "???" else f"`{text}`"


def table(prefix: str, files: list[Path], resumable: bool = True) -> Iterator[str]:
    """One row a key; defaults that differ between the files are given for each."""
    held = {file.stem: entries(file) for file in files}
    keys = list(dict.fromkeys(key for found in held.values() for key in found))
    if not keys:
        return
    heads = ["key", "meaning", "allowed", "default", *["on resume"] * resumable]
    yield f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
    for key in keys:
        known = {choice: found[key] for choice, found in held.items() if key in found}
        line = find_key(f"{prefix}{key}")
        assert line is not None, f"{prefix}{key}"
        cells = [f"`{prefix}{key}`", cell(next(iter(known.values())).meaning), cell(allowed(line)), defaults(known)]
        yield f"| {' | '.join([*cells, *[ON_RESUME[line.resume]] * resumable])} |"


def defaults(known: dict[str, Entry]) -> str:
    values = {entry.default for entry in known.values()}
    return values.pop() if len(values) == 1 else "<br>".join(f"{choice}: {e.default}" for choice, e in known.items())


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def section(group: str) -> Iterator[str]:
    files = sorted((CONFIGS / group).glob("*.yaml"))
    yield f"\n## {group}\n"
    for file in files:
        if not file.stem.startswith("_"):
            yield f"- `{group}={file.stem}`: {cell(about(file))}"
    yield ""
    if group not in PRESETS:
        yield from table(f"{group}.", files)


def reference() -> str:
    lines = [HEAD]
    doors = sorted(CONFIGS.glob("*.yaml"), key=lambda file: (file.stem != "train", file.stem))
    for door in doors:
        lines += [f"\n## {door.stem}.yaml\n", f"{cell(about(door))}\n", *table("", [door], door.stem == "train")]
    for group in sorted({file.parent.relative_to(CONFIGS).as_posix() for file in CONFIGS.glob("*/*.yaml")}):
        lines += section(group)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
