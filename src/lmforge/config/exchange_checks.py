"""Can gradients be compressed, or ranks train apart, in a run like this?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lmforge.config.batch import strategy_kind
from lmforge.config.errors import UsageError

Plain = dict[str, Any]


def check_exchange(cfg: Plain) -> list[str]:
    """Notes on what was asked for; raises UsageError with all that cannot be."""
    kind, strategy = strategy_kind(cfg), cfg["strategy"]
    problems = [*_compression(cfg)] if kind == "ddp" else [*_rounds(cfg)] if kind == "local_sgd" else []
    if problems:
        raise UsageError(problems)
    if kind == "ddp" and strategy["kind"] == "local_sgd":
        return [
            "strategy=local_sgd strategy.sync_every=1: ranks meet at every step, which is ddp: gradients are averaged"
        ]
    return []


def _compression(cfg: Plain) -> Iterator[str]:
    word, weights = cfg["strategy"].get("compress", "none"), cfg["precision"]["weights"]
    if word in ("fp16", "bf16") and weights in ("float16", "bfloat16"):
        yield (
            f"strategy.compress={word} precision={cfg['precision']['word']}: gradients have 16 bits already; "
            "use strategy=ddp, or ddp_powersgd"
        )


def _rounds(cfg: Plain) -> Iterator[str]:
    every, precision = cfg["strategy"]["sync_every"], cfg["precision"]
    for key, steps in _intervals(cfg):
        if steps is not None and steps % every:
            low, high = steps // every * every, -(-steps // every) * every
            near = " or ".join(str(number) for number in (low, high) if number)
            yield (
                f"{key}={steps}: must be a multiple of strategy.sync_every={every}, for ranks know of each other only "
                f"where they meet; near: {near}"
            )
    if precision["scaler"]:
        yield f"strategy=local_sgd precision={precision['word']}: each rank would scale its loss apart; use bf16-mixed"


def _intervals(cfg: Plain) -> Iterator[tuple[str, int | None]]:
    for key in ("log_every_n_steps", "val_every_n_steps"):
        yield f"trainer.{key}", cfg["trainer"].get(key)
    for name, entry in (cfg.get("callbacks") or {}).items():
        yield f"callbacks.{name}.every_n_steps", (entry or {}).get("every_n_steps")
