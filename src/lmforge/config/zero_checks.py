"""What strategy=deepspeed cannot be combined with, and what can be typed instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lmforge.config.batch import strategy_kind
from lmforge.config.errors import UsageError

Plain = dict[str, Any]
PRECISIONS = ("32-true", "bf16-mixed")


def check_zero(cfg: Plain) -> None:
    """Raises UsageError with all that does not fit. On one process nothing is cut and everything fits."""
    if strategy_kind(cfg) == "deepspeed" and (problems := list(_problems(cfg))):
        raise UsageError(problems)


def _problems(cfg: Plain) -> Iterator[str]:
    if "ckpt" in cfg:
        yield "strategy=deepspeed: cuts what only training holds; strategy=ddp|fsdp score"
        return
    word, stage = cfg["precision"]["word"], cfg["strategy"]["stage"]
    optimizer = cfg["optimizer"]["_target_"].rpartition(".")[2]
    if word not in PRECISIONS:
        near = "32-true" if word.startswith("64") else "bf16-mixed"
        yield (
            f"strategy=deepspeed precision={word}: it keeps weights to update in float32; precision={near} can, "
            f"or strategy=fsdp with {word}"
        )
    if optimizer != "adamw":
        yield (
            f"strategy=deepspeed optimizer={optimizer}: it updates flat stretches of all parameters together; "
            f"optimizer=adamw can, or strategy=fsdp with {optimizer}"
        )
    if stage == 3 and cfg["compile"]["backend"] is not None:
        yield (
            f"strategy.stage=3 compile={cfg['compile']['backend']}: weights come and go inside every block; "
            "strategy.stage=1|2 can, or compile=off, or strategy=fsdp"
        )
