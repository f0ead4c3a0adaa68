"""The world's size, and how one update's global batch is spread over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmforge.config import machine
from lmforge.config.errors import UsageError

# micro_sequences=auto: at most so many tokens on a device at once; a CPU is fastest while blocks of logits stay small.
AUTO_MICRO_TOKENS = {"cpu": 2048, "gpu": 16384}


@dataclass(frozen=True)
class BatchPlan:
    """How one update's sequences are spread: sequences = micro x world x accumulation."""

    sequences: int
    micro: int
    accumulation: int
    world: int
    devices: int
    nodes: int
    context: int

    @property
    def empty(self) -> int:
        """Places of an update without a sequence: none, unless a run goes on with processes that do not divide it."""
        return self.micro * self.world * self.accumulation - self.sequences

    def __str__(self) -> str:
        product = f"{_product(self.micro, self.devices, self.nodes)} {self.accumulation}"
        return f"global batch {self.sequences} = {product}{f' - {self.empty} empty' if self.empty else ''}"


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
    """The strategy with `auto` decided: single on one device, ddp on several."""
    kind = cfg["strategy"]["kind"]
    devices, nodes = world(cfg)
    if kind != "auto":
        return kind
    return "single" if devices * nodes == 1 else "ddp"


def batch_plan(cfg: Any) -> BatchPlan:
    """The batch arithmetic of a checked config. Raises UsageError with the numbers when they do not divide, but for a
    run that goes on (`resume`): its batch stays, with other micro-batches and places left empty where it must be."""
    batch, context = cfg["batch"], cfg["data"]["context"]
    devices, nodes = world(cfg)
    sequences = _sequences(batch["tokens"], batch["sequences"], context)
    micro = batch["micro_sequences"]
    accelerator = machine.accelerator(cfg["trainer"]["accelerator"])
    if micro == "auto":
        micro = _auto_micro(sequences, devices, nodes, context, accelerator)
    per_step = devices * nodes * micro
    if sequences % per_step and cfg.get("resume"):
        micro, accumulation = _spread(sequences, batch["micro_sequences"], devices * nodes, context, accelerator)
        return BatchPlan(sequences, micro, accumulation, devices * nodes, devices, nodes, context)
    if sequences % per_step:
        low, high = sequences // per_step * per_step, -(-sequences // per_step) * per_step
        near = " or ".join(str(number) for number in (low, high) if number)
        tokens = f" (batch.tokens={batch['tokens']} / context {context})" if batch["tokens"] else ""
        raise UsageError(
            f"global batch {sequences}{tokens} = {_product(micro, devices, nodes)} {sequences / per_step:.4g}: "
            f"does not divide; {near} sequences would, or another batch.micro_sequences"
        )
    return BatchPlan(sequences, micro, sequences // per_step, devices * nodes, devices, nodes, context)


def _product(micro: int, devices: int, nodes: int) -> str:
    """`2 x 2 devices x 1 node x accumulation`"""
    return f"{micro} x {_count(devices, 'device')} x {_count(nodes, 'node')} x accumulation"


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


def _auto_micro(sequences: int, devices: int, nodes: int, context: int, accelerator: str) -> int:
    """The largest divisor of a device's share that holds at most AUTO_MICRO_TOKENS tokens."""
    most = _auto_tokens(accelerator)
    if sequences % (devices * nodes):
        return 1  # the division that fails is reported with this 1 in its arithmetic
    share = sequences // (devices * nodes)
    return max((n for n in range(1, share + 1) if share % n == 0 and n * context <= most), default=1)


def _spread(sequences: int, micro: int | str, ranks: int, context: int, accelerator: str) -> tuple[int, int]:
    """(micro, accumulation) of the fewest micro-batches, none larger than `micro`, that hold the largest share of
    sequences which do not divide by the ranks."""
    most = max(1, _auto_tokens(accelerator) // context) if micro == "auto" else int(micro)
    share = -(-sequences // ranks)
    accumulation = -(-share // most)
    return -(-share // accumulation), accumulation


def _auto_tokens(accelerator: str) -> int:
    return AUTO_MICRO_TOKENS["cpu" if accelerator == "cpu" else "gpu"]
