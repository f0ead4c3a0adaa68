"""Pre-flight: does the whole config fit together? Found in milliseconds, before torch is imported."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lmforge.config import machine
from lmforge.config.batch import batch_plan, strategy_kind, world
from lmforge.config.errors import UsageError
from lmforge.config.nearest import did_you_mean, nearest

Plain = dict[str, Any]
Check = Callable[[Plain], list[str] | None]
BYTES_PER_PARAMETER = 12  # a checkpoint: weights and two moments, 4 bytes each
FSDP_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")


def parameter_count(cfg: Any, vocab_default: int = 50304) -> int:
    """About how many parameters the model has: its matrices and embeddings."""
    m = cfg["model"]
    vocab = m["vocab_size"] or cfg["data"].get("vocab_size") or vocab_default
    head = m["head_dim"] or m["d_model"] // m["n_head"]
    attention = m["d_model"] * head * (2 * m["n_head"] + 2 * m["n_kv_head"])
    feed_forward = m["d_model"] * m["d_ff"] * (3 if m["activation"] == "swiglu" else 2)
    tables = vocab * m["d_model"] * (1 if m["tied"] else 2)
    tables += m["context"] * m["d_model"] if m["positions"] == "learned" else 0
    return m["n_layer"] * (attention + feed_forward) + tables


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
    wrong = [key for key in ("d_model", "d_ff") if m[key] % 8]
    if wrong:
        raise UsageError(
            [f"model.{key}={m[key]}: must be a multiple of 8; near: {max(8, round(m[key] / 8) * 8)}" for key in wrong]
        )
    head = m["head_dim"] or m["d_model"] // m["n_head"]
    odd = [f"{key} {value}" for key, value in (("head_dim", head), ("vocab_size", m["vocab_size"] or 0)) if value % 8]
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
    if kind == "fsdp" and word in ("16-mixed", "16-true"):
        problems.append(
            f"strategy=fsdp precision={word}: FSDP2 has no float16 with a scaled loss; "
            f"precision={'|'.join(FSDP_PRECISIONS)} can, or strategy=single|ddp with {word}"
        )
    if problems:
        raise UsageError(problems)


def _check_devices(cfg: Plain) -> None:
    devices = cfg["trainer"]["devices"]
    if isinstance(devices, list) and len(set(devices)) != len(devices):
        raise UsageError(f"trainer.devices={','.join(map(str, devices))}: names a device twice")


def _check_accelerator(cfg: Plain) -> list[str]:
    accelerator = cfg["trainer"]["accelerator"]
    problem = machine.missing_backend(accelerator)
    if problem:
        raise UsageError(f"trainer.accelerator={accelerator}: {problem}")
    word = cfg["precision"]["word"]
    if word in ("16-mixed", "16-true") and machine.accelerator(accelerator) == "cpu":
        return [f"precision={word} on a CPU has no fast path: right for a test, slower than 32-true"]
    return []


def _check_compile(cfg: Plain) -> None:
    on_cpu = machine.accelerator(cfg["trainer"]["accelerator"]) == "cpu"
    if cfg["compile"]["backend"] == "inductor" and on_cpu and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise UsageError(
            "compile=inductor: needs a C++ compiler (g++ or clang++) on a CPU; or compile=off|eager|aot_eager"
        )


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


def _check_data(cfg: Plain) -> None:
    data = cfg["data"]
    problems = []
    if "path" in data and not Path(data["path"]).exists() and not glob.glob(data["path"], recursive=True):
        problems.append(f"data.path={data['path']}: no such file or folder{_near_path(data['path'])}")
    elif data["_target_"].endswith("TokenData") and not Path(data["path"], "manifest.json").is_file():
        problems.append(f"data.path={data['path']}: no manifest.json in it; data=tokens needs a folder of token shards")
    if data.get("tokenizer") and not Path(data["tokenizer"]).is_file():
        problems.append(f"data.tokenizer={data['tokenizer']}: no such file{_near_path(data['tokenizer'])}")
    if data["prefetch"] is not None and data["num_workers"] == 0:
        problems.append(f"data.prefetch={data['prefetch']}: only workers prefetch; set data.num_workers above 0")
    if problems:
        raise UsageError(problems)


def _check_weights(cfg: Plain) -> None:
    weights = cfg["weights"]
    if weights is not None and not Path(weights).exists():
        raise UsageError(f"weights={weights}: no such run, folder or file{_near_path(weights)}")


def _near_path(path: str) -> str:
    parent = Path(path).parent
    names = [item.name for item in parent.iterdir()] if parent.is_dir() else []
    near = nearest(Path(path).name, names)
    return did_you_mean(str(parent / near) if near else None)


def _check_loggers(cfg: Plain) -> None:
    wandb = (cfg["logger"] or {}).get("wandb")
    if not wandb or wandb.get("offline", True):
        return
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    if not os.environ.get("WANDB_API_KEY") and not (netrc.is_file() and "wandb" in netrc.read_text(errors="replace")):
        raise UsageError(
            "logger.wandb.offline=false: needs the environment variable WANDB_API_KEY (or `wandb login`); "
            "logger.wandb.offline=true needs no account"
        )


def _check_folders(cfg: Plain) -> None:
    problems = []
    for key in ("runs", "cache"):
        place = _existing(Path(cfg["paths"][key]))
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            problems.append(f"paths.{key}={cfg['paths'][key]}: {place} is not a folder this user can write to")
    if problems:
        raise UsageError(problems)


def _check_disk(cfg: Plain) -> None:
    needed = parameter_count(cfg) * BYTES_PER_PARAMETER * 1.2
    free = shutil.disk_usage(_existing(Path(cfg["paths"]["runs"]))).free
    if needed > free:
        raise UsageError(
            f"paths.runs={cfg['paths']['runs']}: one checkpoint needs about {needed / 1e9:.3g} GB, "
            f"{free / 1e9:.3g} GB are free"
        )


def _existing(path: Path) -> Path:
    path = path.absolute()
    return path if path.exists() else _existing(path.parent)


DEVICES = ("trainer.devices", "trainer.num_nodes", "trainer.accelerator")

# Each check with the keys it reads. The first table asks the config only and comes out the same on every rank.
CONFIG_CHECKS: tuple[tuple[Check, tuple[str, ...]], ...] = (
    (_check_devices, ("trainer.devices",)),
    (_check_batch, ("batch", "data.context", "model.context", *DEVICES)),
    (_check_heads, ("model",)),
    (_check_multiples, ("model",)),
    (_check_context, ("data.context", "model.context")),
    (_check_strategy, ("strategy", "precision", *DEVICES)),
    (_check_length, ("trainer.max_steps", "trainer.max_epochs")),
    (_check_schedule, ("schedule", "trainer.max_steps")),
)
# These ask the machine; one rank does so for all.
MACHINE_CHECKS: tuple[tuple[Check, tuple[str, ...]], ...] = (
    (_check_accelerator, ("trainer.accelerator", "precision")),
    (_check_compile, ("compile", "trainer.accelerator")),
    (_check_data, ("data",)),
    (_check_weights, ("weights",)),
    (_check_loggers, ("logger",)),
    (_check_folders, ("paths",)),
    (_check_disk, ("paths", "model", "data.vocab_size")),
)
# What the other front doors need of them; all are train's.
NEEDED_BY: dict[str, tuple[Check, ...]] = {
    "evaluate": (_check_devices, _check_strategy, _check_accelerator, _check_data, _check_folders),
    "generate": (_check_accelerator,),
}
