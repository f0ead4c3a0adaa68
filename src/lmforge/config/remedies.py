"""What to type when memory ran out: words that fit the very config, those that cost least first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmforge.config import machine
from lmforge.config.batch import BatchPlan, batch_plan, strategy_kind


@dataclass(frozen=True)
class Remedy:
    """Words to type, and what they do. `resumes`: the same run can go on with them; else it takes a new one."""

    words: str
    effect: str
    resumes: bool = True


def remedies(cfg: dict[str, Any]) -> list[Remedy]:
    """Remedies for a checked plain config; what is on already, or cannot be here, is not among them."""
    plan = batch_plan(cfg)
    return [*_keep_the_run(cfg, plan), *_take_a_new_run(cfg)]


def _keep_the_run(cfg: dict[str, Any], plan: BatchPlan) -> list[Remedy]:
    found, kind = [], strategy_kind(cfg)
    share = plan.sequences // plan.dp
    if smaller := [n for n in range(1, plan.micro // 2 + 1) if share % n == 0]:
        micro = max(smaller)
        effect = f"the same global batch in {share // micro} parts instead of {plan.accumulation}"
        found.append(Remedy(f"batch.micro_sequences={micro}", effect))
    if cfg["trainer"]["activation_checkpointing"] != 1:
        effect = "keeps only each block's input and computes the rest again: about a third more time"
        found.append(Remedy("trainer.activation_checkpointing=1", effect))
    if kind == "ddp":
        effect = f"weights, gradients and optimizer state cut over {plan.world} processes instead of copied"
        found.append(Remedy("strategy=fsdp", effect))
    if kind == "mesh" and not cfg["strategy"]["reshard_after_forward"]:
        found.append(Remedy("strategy.reshard_after_forward=true", "gathered weights are dropped after use"))
    if kind == "single" and (devices := _more_gpus(cfg, plan)):
        effect = "weights, gradients, optimizer state and batch cut over this machine's GPUs"
        found.append(Remedy(f"strategy=fsdp trainer.devices={devices}", effect))
    if cfg["data"].get("num_workers") and machine.accelerator(cfg["trainer"]["accelerator"]) == "cpu":
        found.append(Remedy("data.num_workers=0", "no processes beside the training's own"))
    return found


def _more_gpus(cfg: dict[str, Any], plan: BatchPlan) -> int:
    """The most GPUs of this machine over which the batch divides; 0 when there is no second one."""
    if machine.accelerator(cfg["trainer"]["accelerator"]) != "gpu":
        return 0
    return max((n for n in range(2, machine.gpu_count() + 1) if plan.sequences % (n * plan.micro) == 0), default=0)


def _take_a_new_run(cfg: dict[str, Any]) -> list[Remedy]:
    model, found = cfg["model"], []
    lower = {"64-true": "32-true", "32-true": "bf16-mixed", "bf16-mixed": "bf16-true"}.get(cfg["precision"]["word"])
    if lower:
        halved = {"32-true": "everything", "bf16-mixed": "activations", "bf16-true": "weights and gradients"}[lower]
        found.append(Remedy(f"precision={lower}", f"half the memory for {halved}", resumes=False))
    if (context := cfg["data"]["context"]) % 2 == 0:
        effect = "shorter context: attention and activations shrink with it"
        found.append(Remedy(f"model.context={context // 2}", effect, resumes=False))
    if model["n_layer"] > 1:
        found.append(Remedy(f"model.n_layer={model['n_layer'] // 2}", "a smaller network", resumes=False))
    return found
