"""Reads the command line: flags, and `key=value` words whose text and list values are typed plainly."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmforge.config.errors import UsageError
from lmforge.config.keys import find_key
from lmforge.config.nearest import did_you_mean, nearest
from lmforge.config.schema import Key, allowed
from lmforge.config.space import Space, read_space

FLAGS = {
    "-h": "help", "--help": "help", "-c": "cfg", "--cfg": "cfg", "--resolve": "resolve", "-i": "info", "--info": "info",
    "-m": "multirun", "--multirun": "multirun", "-sc": "completion", "--shell-completion": "completion",
}  # fmt: skip
MAY_BE_NULL = ("experiment", "debug")
QUOTED = re.compile(r"""(["']).*\1""", re.DOTALL)


@dataclass
class Command:
    """The command line taken apart. `words` are left as typed."""

    help: bool = False
    cfg: bool = False
    resolve: bool = False
    info: str | None = None
    multirun: bool = False
    completion: bool = False
    words: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Word:
    """One typed word. Several values make it a sweep; `drop` stands for `~key`. With a `space` the values are its ends,
    or all of them when it is a range(...)."""

    key: str
    values: tuple[Any, ...]
    raw: str
    group: bool = False
    drop: bool = False
    space: Space | None = None

    @property
    def value(self) -> Any:
        return self.values[0]

    @property
    def swept(self) -> bool:
        return len(self.values) > 1

    def single(self, value: Any) -> Word:
        literal = isinstance(value, str) and (QUOTED.fullmatch(value) or value == "null" or value.startswith("choice("))
        text = quoted(value) if literal and not self.group else shown(value)
        return Word(self.key, (value,), f"{self.key}={text}", self.group, self.drop)


class Tree:
    """The configs folder: `groups` maps each group to the words that can be chosen for it. A file whose name begins
    with `_` is no such word but a part that others include."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.groups: dict[str, list[str]] = {}
        for file in sorted(folder.glob("*/**/[!_]*.yaml")):
            group = file.parent.relative_to(folder).as_posix()
            self.groups.setdefault(group, []).append(file.stem)

    def choices_with(self, key: str) -> list[str]:
        """The `group=choice` words whose file holds the dotted key."""
        import yaml

        group, _, rest = key.partition(".")
        found = []
        for choice in self.groups.get(group, []):
            node = yaml.safe_load((self.folder / group / f"{choice}.yaml").read_text(encoding="utf-8"))
            if _holds(node, rest.split(".")):
                found.append(f"{group}={choice}")
        return found


def _holds(node: Any, path: Sequence[str]) -> bool:
    """Whether nested containers have the path, or would take it: an empty one inside is there to be filled."""
    for depth, part in enumerate(path):
        if depth and node == {}:
            return True
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


def read_command(argv: Sequence[str]) -> Command:
    """Splits flags from words. Only `--cfg job` is known of Hydra's --cfg family; unknown flags become problems."""
    command = Command()
    tokens = iter(argv)
    for token in tokens:
        if not token.startswith("-"):
            command.words.append(token)
            continue
        _read_flag(command, token, tokens)
    return command


def _read_flag(command: Command, token: str, rest: Iterator[str]) -> None:
    flag, has_value, value = token.partition("=")
    name = FLAGS.get(flag)
    if name is None:
        hint = did_you_mean(nearest(flag, FLAGS))
        command.problems.append(f"{token}: unknown flag{hint}; settings are typed as key=value, without dashes")
    elif name == "cfg":
        asked = value if has_value else next(rest, "")
        command.cfg = True
        if asked != "job":
            command.problems.append(f"--cfg {asked}: only `--cfg job` exists (add --resolve to fill in references)")
    elif name == "info":
        command.info = value or "all"
    elif name == "completion":
        command.completion = True
    else:
        setattr(command, name, True)


def read_words(tokens: Sequence[str], tree: Tree, multirun: bool, problems: list[str]) -> list[Word]:
    """Reads every word, adding what is wrong to `problems` and leaving those words out."""
    words = [_read_word(token, tree, multirun, problems) for token in tokens]
    return [word for word in words if word is not None]


def _read_word(token: str, tree: Tree, multirun: bool, problems: list[str]) -> Word | None:
    drop = token.startswith("~")
    body = token.lstrip("+~")
    key, equals, text = body.partition("=")
    if drop:
        return Word(key, (None,), token, drop=True)
    if not equals or not key or key.strip() != key:
        problems.append(_no_value(token, key.strip(), tree))
        return None
    if key.startswith("hydra.") or key == "hydra":
        problems.append(f"{token}: Hydra's own settings are fixed; run folders are named by name=, sweeps run with -m")
        return None
    if key in tree.groups:
        return _read_group(key, text, token, tree, multirun, problems)
    return _read_value(key, text, token, multirun, problems)


def _no_value(token: str, key: str, tree: Tree) -> str:
    if key in tree.groups:
        return f"{token}: has no value; write {key}={'|'.join(tree.groups[key])}"
    return f"{token}: not of the form key=value (no blanks around '='; quote a value that holds blanks)"


def _read_group(key: str, text: str, token: str, tree: Tree, multirun: bool, problems: list[str]) -> Word | None:
    choices = tree.groups[key]
    listed = re.sub(r"^choice\((.*)\)$", r"\1", text.strip())
    typed = [part.strip() for part in listed.split(",")] if multirun else [text.strip()]
    values: list[str | None] = []
    for choice in typed:
        if choice in choices:
            values.append(choice)
        elif key in MAY_BE_NULL and choice == "null":
            values.append(None)
        elif re.sub(r"^choice\(", "", choice).split(",")[0] in choices:
            problems.append(f"{token}: {key} takes one choice; several are a sweep: add -m")
        else:
            hint = did_you_mean(nearest(choice, choices))
            problems.append(f"{key}={choice}: no such {key}{hint}; choices: {', '.join(choices)}")
    return Word(key, tuple(values), token, group=True) if len(values) == len(typed) else None


def _read_value(key: str, text: str, token: str, multirun: bool, problems: list[str]) -> Word | None:
    known = find_key(key)
    try:
        if known is not None and known.kind in ("text", "path", "name"):
            return Word(key, tuple(_read_text(known, key, text, multirun)), token)
        values, space = _read_typed(known, key, text, token, multirun)
    except UsageError as error:
        problems += error.problems
        return None
    if space is not None and not multirun:
        problems.append(f"{token}: a search space, not a value; to search it add sweep=optuna")
    elif len(values) > 1 and not multirun:
        problems.append(f"{token}: {key} takes one value; several are a sweep: add -m")
    else:
        return Word(key, tuple(values), token, space=space)
    return None


def _read_text(known: Key, key: str, text: str, multirun: bool) -> list[Any]:
    """Text is taken literally, commas and all. Quotes around the whole are taken off; with -m, choice(...) sweeps, and
    so do commas in names and in text of a fixed set, which cannot hold one."""
    if text == "null" and known.nullable:
        return [None]
    in_quotes = QUOTED.fullmatch(text)
    if in_quotes or (multirun and text.startswith("choice(")):
        parsed = _hydra_value(known, key, text)
        if parsed is not None:
            return [None if value is None and known.nullable else shown(value) for value in parsed[0]]
        if not in_quotes:
            raise UsageError(f'{key}={text}: its values cannot be read; quote each one: \'{key}=choice("A","B")\'')
    if multirun and (known.words or known.kind == "name"):
        parts = [part.strip() for part in text.split(",")]
        return [None if part == "null" and known.nullable else part for part in parts]
    if known.kind == "path":
        text = os.path.expanduser(re.sub(r"\\([\\()\[\]{}:=, \t])", r"\1", text))
    return [text]


def _read_typed(known: Key | None, key: str, text: str, token: str, multirun: bool) -> tuple[list[Any], Space | None]:
    """The values, and the space they stand for. Raises UsageError when the text is none of Hydra's grammar."""
    bare_list = "," in text and re.match(r"\s*(\[|\w+\()", text) is None
    if known is not None and bare_list and (known.many == "always" or (known.many == "also" and not multirun)):
        text = f"[{text}]"
    try:
        parsed = _hydra_value(known, key, text)
    except UsageError as error:
        raise UsageError(f"{token}: {error}") from error
    if parsed is None:
        wanted = f"; allowed: {allowed(known)}" if known else ""
        raise UsageError(f"{token}: the value cannot be read{wanted}; plain text form: '{key}=\"...\"'")
    return parsed


def _hydra_value(known: Key | None, key: str, text: str) -> tuple[list[Any], Space | None] | None:
    """The values Hydra's grammar reads from `key=text`: several for a sweep, the ends of an interval, and the space of
    an interval or a range. None when it cannot."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Glob, IntervalSweep
    from hydra.errors import HydraException

    listed = re.sub(r"^choice\((.*\bnull\b.*)\)$", r"\1", text, flags=re.DOTALL)  # Hydra's choice() takes no null
    try:
        override = OverridesParser.create().parse_override(f"{key}={listed}")
        if isinstance(override._value, Glob):
            return None
        if not override.is_sweep_override():
            return [_clean(override.value())], None
        endless = isinstance(override._value, IntervalSweep)
        values = [] if endless else [_clean(value) for value in override.sweep_iterator()]
    except (HydraException, ValueError):
        return None
    space = read_space(override._value, values, known)
    return ([space.low, space.high] if endless and space else values), space


def _clean(value: Any) -> Any:
    """A value of Hydra's parser without the quotes it keeps."""
    from hydra.core.override_parser.types import QuotedString

    if isinstance(value, QuotedString):
        return value.text
    return [_clean(item) for item in value] if isinstance(value, list) else value


def quoted(text: str) -> str:
    """The text in quotes, in which it is read as it stands."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"


def shown(value: Any) -> str:
    """A value as it is typed."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(shown(item) for item in value)
    return str(value)
