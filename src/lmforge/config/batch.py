"""The world's size, and how one update's global batch is spread over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmforge.config import machine
from lmforge.config.errors import UsageError
from lmforge.config.layout import Layout, read_layout

# micro_sequences=auto: at most so many tokens on a device at once; a CPU is fastest while blocks of logits stay small.
AUTO_MICRO_TOKENS = {"cpu": 2048, "gpu": 16384}


@dataclass(frozen=True)
class BatchPlan:
    """How one update's sequences are spread: sequences = micro x dp x accumulation."""

    sequences: int
    micro: int
    accumulation: int
    layout: Layout
    devices: int
    nodes: int
    context: int

    @property
    def dp(self) -> int:
        """Ranks that read different data; the others read what one of these reads."""
        return self.layout.dp

    @property
    def world(self) -> int:
        """All processes."""
        return self.devices * self.nodes

    def __str__(self) -> str:
        product = _product(self.micro, self.layout, self.devices, self.nodes)
        return f"global batch {self.sequences} = {product} {self.accumulation}"


def world(cfg: Any) -> tuple[int, int]:
    """(devices on each node, nodes); `auto` counts the machine's."""
    trainer = cfg["trainer"]
    devices = trainer["devices"]
    if devices == 0:
        raise UsageError("trainer.devices=0: needs at least 1 device (a list of numbers: trainer.devices=0,1)")
    if devices == "auto":
        count = machine.device_count(trainer["accelerator"])
    else:
        count = devices if isinstance(devices, int) else len(devices)
    return count, trainer["num_nodes"]


def strategy_kind(cfg: Any) -> str:
    """What spreads the work: `single` on one device, whatever was asked for; `auto` is ddp on several."""
    kind = cfg["strategy"]["kind"]
    devices, nodes = world(cfg)
    if devices * nodes == 1:
        return "single"
    return "ddp" if kind == "auto" else kind


def layout_of(cfg: Any) -> Layout:
    """How the processes of a checked config stand to each other."""
    return read_layout(cfg["strategy"], *world(cfg))


def batch_plan(cfg: Any) -> BatchPlan:
    """The batch arithmetic of a checked config. Raises UsageError with the numbers when they do not divide."""
    batch, context = cfg["batch"], cfg["data"]["context"]
    devices, nodes = world(cfg)
    layout = layout_of(cfg)
    sequences = _sequences(batch["tokens"], batch["sequences"], context)
    micro = batch["micro_sequences"]
    if micro == "auto":
        micro = _auto_micro(sequences, layout, context, machine.accelerator(cfg["trainer"]["accelerator"]))
    per_step = layout.dp * micro
    if sequences % per_step:
        low, high = sequences // per_step * per_step, -(-sequences // per_step) * per_step
        near = " or ".join(str(number) for number in (low, high) if number)
        tokens = f" (batch.tokens={batch['tokens']} / context {context})" if batch["tokens"] else ""
        raise UsageError(
            f"global batch {sequences}{tokens} = {_product(micro, layout, devices, nodes)} {sequences / per_step:.4g}: "
            f"does not divide; {near} sequences would, or another batch.micro_sequences"
        )
    return BatchPlan(sequences, micro, sequences // per_step, layout, devices, nodes, context)


def _product(micro: int, layout: Layout, devices: int, nodes: int) -> str:
    """`2 x 2 devices x 1 node x accumulation`, or `2 x dp 2 x accumulation` where some devices share their data"""
    if layout.dp == devices * nodes:
        return f"{micro} x {_count(devices, 'device')} x {_count(nodes, 'node')} x accumulation"
    return f"{micro} x dp {layout.dp} x accumulation"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _sequences(tokens: int | None, sequences: int | None, context: int) -> int:
    if (tokens is None) == (sequences is None):
        given = "both are" if tokens is not None else "neither is"
        raise UsageError(f"batch.tokens={tokens} batch.sequences={sequences}: {given} given; give exactly one")
    if tokens is None:
        return sequences or 0
    if tokens % context:
        low = tokens // context * context
        near = f"{low} or {low + context}" if low else str(context)
        raise UsageError(
            f"batch.tokens={tokens}: {tokens} / data.context {context} = {tokens / context:.4g} sequences; use {near}"
        )
    return tokens // context


def _auto_micro(sequences: int, layout: Layout, context: int, accelerator: str) -> int:
    """The largest divisor of a device's share that holds at most AUTO_MICRO_TOKENS tokens, and leaves a pipeline a
    micro-batch for each stage."""
    most = AUTO_MICRO_TOKENS["cpu" if accelerator == "cpu" else "gpu"]
    if sequences % layout.dp:
        return 1  # the division that fails is reported with this 1 in its arithmetic
    share = sequences // layout.dp
    fits = [n for n in range(1, share // layout.pp + 1) if share % n == 0 and share // n % layout.pp == 0]
    return max((n for n in fits if n * context <= most), default=1)
