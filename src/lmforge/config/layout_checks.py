"""Can this network and batch be spread that way? Every refusal names both numbers and what would fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from lmforge.config.batch import batch_plan, layout_of, strategy_kind
from lmforge.config.errors import UsageError
from lmforge.config.layout import Layout

Plain = dict[str, Any]


def check_layout(cfg: Plain) -> list[str]:
    """Notes on a layout that fits; raises UsageError with all that does not."""
    kind, asked = strategy_kind(cfg), cfg["strategy"]["kind"]
    if kind == "single" and asked not in ("auto", "single"):
        return ["strategy: one process, so nothing is spread; it trains as with strategy=single, to the same numbers"]
    if kind != "mesh":
        return []
    layout = layout_of(cfg)
    problems = [*_divisions(cfg, layout), *_pipeline(cfg, layout), *_precision(cfg, layout)]
    if problems:
        raise UsageError(problems)
    return _alignment(cfg, layout)


def _divisions(cfg: Plain, layout: Layout) -> Iterator[str]:
    """What is cut must divide: (key, its value, what cuts it, into how many parts)."""
    model, context = cfg["model"], cfg["data"]["context"]
    if "n_head" not in model:  # a network of another kind
        yield from _not_known(layout)
        return
    tensor = [(f"model.{key}", model[key]) for key in ("n_head", "n_kv_head", "d_ff", "vocab_size")]
    cuts = [(key, value, "strategy.tp", layout.tp) for key, value in tensor]
    stages = "strategy.pp" + (" x strategy.virtual_stages" if cfg["strategy"]["virtual_stages"] > 1 else "")
    cuts += [("model.n_layer", model["n_layer"], stages, layout.pp * cfg["strategy"]["virtual_stages"])]
    places = "strategy.cp x 2 x strategy.tp" if layout.cp > 1 else "strategy.tp"
    cuts += [("data.context", context, places, (2 * layout.cp if layout.cp > 1 else 1) * layout.tp)]
    for key, value, what, parts in cuts:
        if value is not None and value % parts:
            yield f"{key}={value}: must divide by {what} = {parts}; near: {_near(value, parts)}"


def _not_known(layout: Layout) -> Iterator[str]:
    wide = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp}
    for key, size in wide.items():
        if size > 1:
            yield f"strategy.{key}={size}: known for decoder networks (model=nano ...) alone; strategy=fsdp fits"


def _near(value: int, parts: int) -> str:
    low, high = value // parts * parts, -(-value // parts) * parts
    return " or ".join(str(number) for number in (low, high) if number)


def _pipeline(cfg: Plain, layout: Layout) -> Iterator[str]:
    if layout.pp == 1:
        if cfg["strategy"]["virtual_stages"] > 1:
            yield f"strategy.virtual_stages={cfg['strategy']['virtual_stages']}: needs strategy.pp of at least 2"
        return
    try:
        plan = batch_plan(cfg)
    except UsageError:  # reported by the check of the batch
        return
    interleaved = cfg["strategy"]["virtual_stages"] > 1
    if plan.accumulation < layout.pp or (interleaved and plan.accumulation % layout.pp):
        rule = "a multiple of" if interleaved else "at least"
        yield (
            f"strategy.pp={layout.pp}: a pipeline needs {rule} {layout.pp} micro-batches an update, here {plan}; "
            f"give {layout.pp * plan.dp * plan.micro} sequences, or a smaller batch.micro_sequences"
        )


def _precision(cfg: Plain, layout: Layout) -> Iterator[str]:
    """The fp16 scale would be searched by each stage and each part of a matrix for itself."""
    word = cfg["precision"]["word"]
    if word == "16-mixed" and (layout.tp > 1 or layout.pp > 1):
        yield f"precision={word}: not with strategy.tp or strategy.pp above 1; use bf16-mixed, or strategy=fsdp"


def _alignment(cfg: Plain, layout: Layout) -> list[str]:
    """Sizes of what one rank multiplies; the whole ones are checked elsewhere."""
    model = cfg["model"]
    sizes = {"d_ff": model.get("d_ff"), "vocab_size": model.get("vocab_size")}
    odd = [f"{k} {v} / tp {layout.tp} = {v // layout.tp}" for k, v in _known(sizes) if v // layout.tp % 8]
    return [f"slower on GPUs: {' and '.join(odd)}, not a multiple of 8"] if layout.tp > 1 and odd else []


def _known(sizes: dict[str, int | None]) -> Iterable[tuple[str, int]]:
    return [(name, size) for name, size in sizes.items() if size]
