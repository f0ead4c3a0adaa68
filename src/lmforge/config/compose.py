"""Composes the config tree with the typed words and checks every value against the schema."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lmforge.config.errors import UsageError
from lmforge.config.keys import find_key
from lmforge.config.nearest import did_you_mean, nearest_key
from lmforge.config.open_groups import entry_keys, is_open
from lmforge.config.parse import MAY_BE_NULL, Tree, Word
from lmforge.config.plain import Plain, check_schema, flatten, get, literal, put, to_config
from lmforge.config.precision import KEYS, precision_problems, refusal

# Keys of a group that a front door has no use for, though it composes the group.
UNUSED = {
    "prepare": tuple(
        f"data.{key}" for key in ("context", "overlap", "num_workers", "pin_memory", "prefetch", "limit_train_rows")
    )
}


@dataclass
class Composed:
    """A resolved config as plain containers, and the problems by key."""

    plain: Plain
    problems: dict[str, str] = field(default_factory=dict)


def config_folder(name: str, script: Path) -> Path:
    """The configs folder beside the running script, else that of the checkout, else that of the working directory."""
    checkout = Path(__file__).resolve().parents[3]
    places = [script.resolve().parent / "configs", checkout / "configs", Path.cwd() / "configs"]
    for place in places:
        if (place / f"{name}.yaml").is_file():
            return place
    raise UsageError(f"no configs/{name}.yaml beside {script.name}, in {checkout} or in the working directory")


class Composer:
    """Composes one front door's config; equal group choices are composed once."""

    def __init__(self, name: str, tree: Tree) -> None:
        self.name, self.tree = name, tree
        self._bases: dict[tuple[str, ...], DictConfig] = {}
        self._groups: list[str] = []

    def groups(self) -> list[str]:
        """The groups this front door knows, in the order they are composed."""
        import yaml

        if not self._groups:
            entries = yaml.safe_load((self.tree.folder / f"{self.name}.yaml").read_text(encoding="utf-8"))["defaults"]
            self._groups = [next(iter(entry)) for entry in entries if isinstance(entry, dict)]
        return self._groups

    def frozen(self) -> Plain:
        """What was composed so far, references as they stand: all that `thaw` needs to compose the same again when
        the config files have changed."""
        bases = [[list(chosen), OmegaConf.to_container(base)] for chosen, base in self._bases.items()]
        return {"groups": self.groups(), "bases": bases}

    def thaw(self, frozen: Plain) -> None:
        self._groups = list(frozen["groups"])
        for chosen, base in frozen["bases"]:
            self._bases[tuple(chosen)] = OmegaConf.create(base)
            OmegaConf.set_struct(self._bases[tuple(chosen)], True)

    def keys(self) -> list[str]:
        """The dotted keys of the default composition."""
        return [key for key, _ in flatten(OmegaConf.to_container(self.base([])))]

    def base(self, words: Sequence[Word]) -> DictConfig:
        """The tree with its groups chosen and no value set."""
        from hydra import compose, initialize_config_dir
        from hydra.errors import HydraException

        chosen = {word.key: word.value for word in words if word.group}
        overrides = tuple(f"~{key}" if value is None else f"{key}={value}" for key, value in chosen.items())
        if overrides not in self._bases:
            try:
                with initialize_config_dir(str(self.tree.folder), version_base="1.3"):
                    self._bases[overrides] = self._used(compose(self.name, overrides=list(overrides)))
            except (HydraException, OmegaConfBaseException) as error:
                raise UsageError(f"configs/{self.name}.yaml cannot be composed: {error}") from error
        return copy.deepcopy(self._bases[overrides])

    def _used(self, config: DictConfig) -> DictConfig:
        with open_dict(config):
            for key in UNUSED.get(self.name, ()):
                group, _, leaf = key.partition(".")
                if leaf in list(config[group]):
                    del config[group][leaf]
        return config

    def compose(self, words: Sequence[Word], broken_groups: Sequence[str] = ()) -> Composed:
        """Groups, then typed values (the last of a kind wins), then references, then the schema.

        Unknown keys below `broken_groups` are not reported: their group's choice already was.
        """
        groups = self.groups()
        foreign = [word for word in words if word.group and word.key not in groups]
        own = [word for word in words if word not in foreign]
        composed = self._finish(self.base(own), own, broken_groups)
        composed.problems.update({word.key: self._foreign(word, groups) for word in foreign})
        return composed

    def overlay(self, stored: Plain, words: Sequence[Word], broken_groups: Sequence[str] = ()) -> Composed:
        """The typed words on top of a stored config: a typed group takes the place of the whole stored node."""
        config = to_config(stored)
        OmegaConf.set_struct(config, False)
        chosen = [word for word in words if word.group and word.key not in MAY_BE_NULL]
        for word in chosen:
            config[word.key] = OmegaConf.to_container(self.base(chosen)[word.key])
        composed = self._finish(config, words, broken_groups)
        for word in words:
            if word.group and word.key in MAY_BE_NULL and word.value is not None:
                composed.problems[word.key] = f"{word.raw}: presets are for new runs; this one has its stored config"
        return composed

    def raw(self, words: Sequence[Word]) -> DictConfig:
        """Groups and typed values with references as they stand; words that do not fit are left out."""
        config = self.base(words)
        self._apply(config, words, {}, ())
        return config

    def _finish(self, config: DictConfig, words: Sequence[Word], broken_groups: Sequence[str]) -> Composed:
        problems: dict[str, str] = {}
        self._apply(config, words, problems, broken_groups)
        composed = resolve(config)
        composed.problems.update(check_schema(composed.plain, skip=set(composed.problems)))
        if not any(key.startswith(KEYS) for key in composed.problems):
            composed.problems.update(precision_problems(composed.plain.get("precision"), self.tree.folder))
        composed.problems.update(problems)
        return composed

    def _apply(
        self, config: DictConfig, words: Sequence[Word], problems: dict[str, str], broken_groups: Sequence[str]
    ) -> None:
        for word in words:
            if not word.group:
                self._set(config, word, problems, broken_groups)
        _keep_one_batch_word(config, words)

    def _set(self, config: DictConfig, word: Word, problems: dict[str, str], broken: Sequence[str]) -> None:
        tree: Any = OmegaConf.to_container(config)
        missing = object()
        held = get(tree, word.key, missing)
        line = find_key(word.key)
        entry = line is not None and line.kind == "node"
        if held is missing and word.key in entry_keys(word.key) and is_open(tree, word.key):
            OmegaConf.update(config, word.key, literal(word.value), merge=False, force_add=True)
        elif held is missing:
            if word.key.partition(".")[0] not in broken:
                problems[word.key] = self._unknown(word, tree)
        elif word.key.startswith(KEYS):
            if held != word.value:
                problems[word.key] = refusal(word.raw)
        elif word.drop and not entry:
            problems[word.key] = f"{word.raw}: only entries of callbacks and logger can be taken out"
        elif isinstance(held, dict) and not (entry and word.value is None):
            keys = ", ".join(f"{word.key}.{key}" for key in held or ["NAME.KEY"] if key != "_target_")
            problems[word.key] = f"{word.raw}: {word.key} holds several keys; type one of {keys}"
        else:
            OmegaConf.update(config, word.key, literal(word.value), merge=False)

    def _foreign(self, word: Word, groups: Sequence[str]) -> str:
        keys = [key for key in self.keys() if key.startswith(f"{word.key}.")]
        other = f"; type its keys: {', '.join(keys)}" if keys else f"; groups here: {', '.join(groups)}"
        return f"{word.raw}: {word.key} is chosen for training and is no group of configs/{self.name}.yaml{other}"

    def _unknown(self, word: Word, tree: Plain) -> str:
        if word.key in UNUSED.get(self.name, ()):
            return f"{word.raw}: {word.key} says how training reads the shards and does not change them; type it there"
        others = [] if is_open(tree, word.key) else self.tree.choices_with(word.key)
        if others and word.key.partition(".")[0] in self.groups():
            return f"{word.raw}: {word.key} is a key of {', '.join(others)} only; choose one of them with it"
        leaves = [*(key for key, _ in flatten(tree)), *entry_keys(word.key)]
        hint = did_you_mean(nearest_key(word.key, [*self.groups(), *leaves]))
        group = word.key.partition(".")[0]
        near = [key for key in leaves if key.startswith(f"{group}.") and not key.endswith("_target_")]
        listed = f"; keys of {group}: {', '.join(near)}" if near else f"; groups: {', '.join(self.groups())}"
        return f"{word.raw}: unknown key {word.key}{hint}{listed}"


def _keep_one_batch_word(config: DictConfig, words: Sequence[Word]) -> None:
    """Typing one of batch.tokens and batch.sequences unsets the other, which came from a file."""
    typed = {word.key for word in words if word.value is not None}
    for key, other in (("batch.tokens", "batch.sequences"), ("batch.sequences", "batch.tokens")):
        if key in typed and other not in typed and "batch" in config:
            OmegaConf.update(config, other, None)


def resolve(config: DictConfig) -> Composed:
    """Follows every reference; one that leads nowhere is a problem of its own key."""
    composed = Composed({})
    _resolve_into(config, "", composed)
    return composed


def _resolve_into(config: DictConfig, prefix: str, composed: Composed) -> None:
    if not config and prefix:
        put(composed.plain, prefix.rstrip("."), {})
    for key in map(str, config):
        dotted = f"{prefix}{key}"
        try:
            value = "???" if OmegaConf.is_missing(config, key) else config[key]
        except OmegaConfBaseException as error:
            composed.problems[dotted] = _reference_problem(dotted, str(error))
            value = None
        if isinstance(value, DictConfig):
            _resolve_into(value, f"{dotted}.", composed)
        else:
            put(
                composed.plain,
                dotted,
                OmegaConf.to_container(value, resolve=True) if OmegaConf.is_list(value) else value,
            )


def _reference_problem(key: str, error: str) -> str:
    variable = re.search(r"Environment variable '(\w+)' not found", error)
    if variable:
        return f"{key}: needs the environment variable {variable[1]}, which is not set"
    return f"{key}: its reference leads nowhere: {error.splitlines()[0]}"
