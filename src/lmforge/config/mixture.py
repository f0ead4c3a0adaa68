"""A mixture's arithmetic and its checks: weights as exact shares, before anything heavy is imported."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Any

from lmforge.config.errors import UsageError
from lmforge.config.plain import Plain
from lmforge.config.schema import SAFE_NAME
from lmforge.config.streaming import on_the_hub

FINEST = 10_000  # shares are whole numbers of at most so many rows


def cycle_counts(weights: Mapping[str, float]) -> dict[str, int]:
    """How many rows of each source stand in one cycle of the mixture, sorted by name.

    The shares are exact: 0.7 and 0.3 give 7 and 3 of 10. Weights that would need a cycle of more than `FINEST` rows are
    rounded to that many, by largest remainder. Raises UsageError for a source that gets no row at all.
    """
    exact = {name: Fraction(str(weights[name])) for name in sorted(weights)}
    total = sum(exact.values())
    shares = {name: weight / total for name, weight in exact.items()}
    cycle = lcm(*(share.denominator for share in shares.values()))
    if cycle > FINEST:
        cycle = FINEST
    counts = {name: int(share * cycle) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: counts[name] - shares[name] * cycle)
    for name in by_remainder[: cycle - sum(counts.values())]:
        counts[name] += 1
    if none := [name for name, count in counts.items() if count == 0]:
        raise UsageError(
            f"data.sources.{none[0]}.weight={weights[none[0]]:g}: less than one row in {FINEST}; "
            "leave the source out or give it more"
        )
    return counts


def switched_on(sources: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entries of a mixture that are not null, sorted by name."""
    return {name: entry for name, entry in sorted((sources or {}).items()) if entry is not None}


def check_mixture(cfg: Plain) -> list[str]:
    """Every source has one place and a weight, and the run an end that is counted in steps. Notes the shares."""
    if "sources" not in cfg["data"]:
        return []
    sources = switched_on(cfg["data"]["sources"])
    if not sources:
        raise UsageError(
            "data.sources: a mixture needs sources; type data.sources.NAME.path=PLACE data.sources.NAME.weight=NUMBER "
            "for each"
        )
    problems = [problem for name, entry in sources.items() for problem in _entry_problems(name, entry)]
    epochs = cfg.get("trainer", {}).get("max_epochs")
    if epochs is not None:
        problems.append(
            f"trainer.max_epochs={epochs}: the sources of a mixture end at different times, so "
            "it has no epochs; trainer.max_epochs=null and trainer.max_steps=NUMBER"
        )
    if problems:
        raise UsageError(problems)
    return [_shares_line({name: entry["weight"] for name, entry in sources.items()})]


def _entry_problems(source: str, entry: Plain) -> list[str]:
    key, problems = f"data.sources.{source}", []
    if not re.fullmatch(SAFE_NAME, source):
        problems.append(f"{key}: not a name for a source; letters, digits, '_' and '-' are allowed")
    if entry.get("weight") is None:
        problems.append(f"{key}.weight must be given: a number above 0")
    path, name = entry.get("path"), entry.get("name")
    if (path is None) == (name is None):
        problems.append(
            f"{key}.path must be given: text (a file, a folder or a glob) or a folder of token shards; or {key}.name, "
            "a data set of the Hub" + ("; not both" if path is not None else "")
        )
    elif path is not None and not Path(path).exists() and not glob.glob(path, recursive=True):
        problems.append(f"{key}.path={path}: no such file or folder")
    elif name is not None and not Path(name).exists() and not on_the_hub(name):
        problems.append(f"{key}.name={name}: no such file or folder")
    return problems + [f"{key}.{word}={entry[word]}: {why}" for word, why in _without_effect(entry).items()]


def _without_effect(entry: Plain) -> dict[str, str]:
    """Keys of an entry that nothing would read, each with why."""
    if entry.get("path") is None:
        return {}
    found: dict[str, str] = {
        word: "only a data set has one, of name=" for word in ("config", "split", "revision") if word in entry
    }
    if Path(entry["path"], "manifest.json").is_file():
        found |= {word: "token shards are read already" for word in ("text_key", "on_bad") if word in entry}
    return found


def _shares_line(weights: Mapping[str, float]) -> str:
    counts = cycle_counts(weights)
    cycle = sum(counts.values())
    listed = ", ".join(f"{name} {count / cycle:.4g}" for name, count in counts.items())
    total = sum(weights.values())
    return f"mixture     {listed} of the tokens" + (f" (weights divided by {total:g})" if abs(total - 1) > 1e-9 else "")
