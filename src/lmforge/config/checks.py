"""Pre-flight: does the whole config fit together? Found in milliseconds, before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from lmforge.config.batch import batch_plan, strategy_kind, world
from lmforge.config.connection import check_connection, check_init_method, connection, meeting_point
from lmforge.config.errors import UsageError
from lmforge.config.exchange_checks import check_exchange
from lmforge.config.launch import Launch
from lmforge.config.layout_checks import check_layout
from lmforge.config.machine_checks import (
    MACHINE_CHECKS,
    Check,
    Plain,
    check_accelerator,
    check_cache,
    check_data,
    check_folders,
    check_gpus,
    check_hub,
    check_mixture,
    check_out,
)
from lmforge.config.notices import check_notice
from lmforge.config.zero_checks import check_zero

FSDP_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed")


def preflight(
    cfg: Plain, broken: Iterable[str] = (), machine_too: bool = True, only: Sequence[Check] | None = None
) -> tuple[list[str], list[str]]:
    """(problems, notes) of a resolved config, from `only` these checks. A check that reads a key in `broken` is left
    out: its problem is reported already."""
    problems: list[str] = []
    notes: list[str] = []
    for check, reads in (*CONFIG_CHECKS, *(MACHINE_CHECKS if machine_too else ())):
        if _touches(reads, broken) or (only is not None and check not in only):
            continue
        try:
            notes += check(cfg) or []
        except UsageError as error:
            problems += error.problems
        except KeyError as error:
            problems.append(f"the config holds no key {error}")
    return list(dict.fromkeys(problems)), notes


def _touches(reads: tuple[str, ...], broken: Iterable[str]) -> bool:
    return any(key == part or key.startswith(f"{part}.") for key in broken for part in reads)


def _check_batch(cfg: Plain) -> None:
    batch_plan(cfg)


def _check_heads(cfg: Plain) -> None:
    m, problems = cfg["model"], []
    if "n_head" not in m:  # a network of another kind
        return
    if m["n_head"] % m["n_kv_head"]:
        problems.append(f"model.n_kv_head={m['n_kv_head']}: must divide model.n_head={m['n_head']}")
    if m["head_dim"] is None and m["d_model"] % m["n_head"]:
        near = [n for n in range(1, m["d_model"] + 1) if m["d_model"] % n == 0]
        fits = ", ".join(str(n) for n in sorted(near, key=lambda n: abs(n - m["n_head"]))[:4])
        problems.append(f"model.n_head={m['n_head']}: must divide model.d_model={m['d_model']}; near: {fits}")
    elif m["positions"] == "rope" and (head := m["head_dim"] or m["d_model"] // m["n_head"]) % 2:
        problems.append(f"model.positions=rope: needs an even head_dim, but {_head_text(m)} = {head}")
    if problems:
        raise UsageError(problems)


def _head_text(m: Plain) -> str:
    return "model.head_dim" if m["head_dim"] else f"model.d_model {m['d_model']} / model.n_head {m['n_head']}"


def _check_multiples(cfg: Plain) -> list[str]:
    m = cfg["model"]
    wrong = [key for key in ("d_model", "d_ff") if m.get(key, 0) % 8]
    if wrong:
        raise UsageError(
            [f"model.{key}={m[key]}: must be a multiple of 8; near: {max(8, round(m[key] / 8) * 8)}" for key in wrong]
        )
    head = (m["head_dim"] or m["d_model"] // m["n_head"]) if "n_head" in m else 0
    sizes = {"head_dim": head, "vocab_size": m["vocab_size"] or 0}
    odd = [f"{key} {value}" for key, value in sizes.items() if value % 8]
    return [f"slower on GPUs: model {' and '.join(odd)} not a multiple of 8"] if odd else []


def _check_context(cfg: Plain) -> None:
    if cfg["data"]["context"] > cfg["model"]["context"]:
        raise UsageError(
            f"data.context={cfg['data']['context']}: longer than model.context={cfg['model']['context']}; "
            "type model.context and data.context follows"
        )


def _check_strategy(cfg: Plain) -> None:
    kind, word = strategy_kind(cfg), cfg["precision"]["word"]
    devices, nodes = world(cfg)
    problems = []
    if kind == "single" and devices * nodes > 1:
        problems.append(
            f"strategy=single: one device only, but {devices} devices x {nodes} nodes; choose strategy=ddp or fsdp"
        )
    if kind == "mesh" and word not in FSDP_PRECISIONS:
        problems.append(
            f"strategy=fsdp precision={word}: gradients are cut up and summed in float16, where they overflow; "
            f"precision={'|'.join(FSDP_PRECISIONS)} can, or strategy=single|ddp with {word}"
        )
    if problems:
        raise UsageError(problems)


def _check_devices(cfg: Plain) -> None:
    devices = cfg["trainer"]["devices"]
    if isinstance(devices, list) and len(set(devices)) != len(devices):
        raise UsageError(f"trainer.devices={','.join(map(str, devices))}: names a device twice")


def _check_length(cfg: Plain) -> None:
    trainer = cfg["trainer"]
    if trainer["max_steps"] is None and trainer["max_epochs"] is None:
        raise UsageError("trainer.max_steps=null trainer.max_epochs=null: the run would never end; give at least one")


def _check_schedule(cfg: Plain) -> None:
    """A warm-up counted in steps must end before the run does."""
    steps, warmup = cfg["trainer"]["max_steps"], cfg["schedule"]["warmup"]
    if steps is not None and warmup >= 1 and warmup > steps:
        raise UsageError(
            f"schedule.warmup={warmup}: longer than the run (trainer.max_steps={steps}); "
            "type fewer steps, or a share of the run below 1"
        )


def _check_modes(cfg: Plain) -> None:
    problems = []
    for name, entry in (cfg["callbacks"] or {}).items():
        if entry and "monitor" in entry and "mode" in entry:
            problems += mode_problems(f"callbacks.{name}", "monitor", entry)
    if problems:
        raise UsageError(problems)


def mode_problems(part: str, key: str, entry: Plain) -> list[str]:
    """Which way the metric `entry[key]` gets better is no matter of taste."""
    right = "max" if entry[key] == "val/accuracy" else "min"
    if entry["mode"] == right:
        return []
    return [
        f"{part}.{key}={entry[key]} {part}.mode={entry['mode']}: this metric is better the "
        f"{'higher' if right == 'max' else 'lower'} it is; type {part}.mode={right}"
    ]


def launch_problems(cfg: Plain, launch: Launch, broken: Iterable[str] = ()) -> list[str]:
    """Several machines need a launcher that starts a process on each, and its processes a place to meet."""
    nodes, devices = cfg["trainer"].get("num_nodes", 1), cfg["trainer"].get("devices", 1)
    if launch.external:
        return [] if _touches(("strategy.init_method",), broken) else _meeting_problems(cfg, launch)
    if nodes == 1 or _touches(("trainer.num_nodes", "trainer.devices"), broken):
        return []
    each = devices if isinstance(devices, int) else "DEVICES" if devices == "auto" else len(devices)
    return [
        f"trainer.num_nodes={nodes}: this process was started alone; start it on every machine: "
        f"torchrun --nnodes={nodes} --nproc-per-node={each} --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT train.py "
        f"..., or srun --nodes={nodes} --ntasks-per-node={each} python train.py ...; or trainer.num_nodes=1"
    ]


def _meeting_problems(cfg: Plain, launch: Launch) -> list[str]:
    try:
        check_init_method(cfg)
        meeting_point(connection(cfg).init_method, launch, os.environ)
    except UsageError as error:
        return error.problems
    return []


DEVICES = ("trainer.devices", "trainer.num_nodes", "trainer.accelerator")

# Each check with the keys it reads. These ask the config only and come out the same on every rank.
CONFIG_CHECKS: tuple[tuple[Check, tuple[str, ...]], ...] = (
    (_check_devices, ("trainer.devices",)),
    (_check_batch, ("batch", "strategy", "data.context", "model.context", *DEVICES)),
    (_check_heads, ("model",)),
    (_check_multiples, ("model",)),
    (_check_context, ("data.context", "model.context")),
    (_check_modes, ("callbacks",)),
    (check_notice, ("callbacks",)),
    (_check_strategy, ("strategy", "precision", *DEVICES)),
    (check_init_method, ("strategy.init_method",)),
    (check_connection, ("strategy.process_group_backend", "trainer.accelerator")),
    (check_layout, ("strategy", "precision", "model", "data.context", *DEVICES)),
    (check_zero, ("strategy", "precision", "optimizer", "compile", *DEVICES)),
    (check_exchange, ("strategy", "precision", "callbacks", "trainer")),
    (_check_length, ("trainer.max_steps", "trainer.max_epochs")),
    (_check_schedule, ("schedule", "trainer.max_steps")),
)
# What the other front doors need of them; all are train's.
NEEDED_BY: dict[str, tuple[Check, ...]] = {
    "evaluate": (
        _check_devices,
        _check_strategy,
        check_init_method,
        check_connection,
        check_layout,
        check_zero,
        check_accelerator,
        check_gpus,
        check_data,
        check_mixture,
        check_hub,
        check_folders,
    ),
    "generate": (check_accelerator,),
    "export": (check_out,),
    "runs": (),
    "soak": (check_cache,),
    "prepare": (check_data, check_mixture, check_hub, check_cache),
}
