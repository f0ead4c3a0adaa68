"""The part of the pre-flight that asks the machine: hardware, programs, files, room on the disk."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmforge.config import machine
from lmforge.config.errors import UsageError
from lmforge.config.mixture import check_mixture
from lmforge.config.nearest import did_you_mean, nearest
from lmforge.config.optional import check_packages
from lmforge.config.plain import Plain
from lmforge.config.streaming import check_hub

Check = Callable[[Plain], list[str] | None]
BYTES_PER_PARAMETER = 12  # a checkpoint: weights and two moments, 4 bytes each


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


def check_accelerator(cfg: Plain) -> list[str]:
    accelerator = cfg["trainer"]["accelerator"]
    problem = machine.missing_backend(accelerator)
    if problem:
        raise UsageError(f"trainer.accelerator={accelerator}: {problem}")
    word = cfg["precision"]["word"]
    if word in ("16-mixed", "16-true") and machine.accelerator(accelerator) == "cpu":
        return [f"precision={word} on a CPU has no fast path: right for a test, slower than 32-true"]
    return []


def check_gpus(cfg: Plain) -> None:
    """A list picks GPUs, and no more of them than the process can see."""
    devices, accelerator = cfg["trainer"]["devices"], cfg["trainer"]["accelerator"]
    shown = ",".join(map(str, devices)) if isinstance(devices, list) else devices
    if machine.accelerator(accelerator) != "gpu":
        if isinstance(devices, list):
            raise UsageError(f"trainer.devices={shown}: a list picks GPUs; on a CPU give the number of processes")
        return
    limit = None if machine.missing_backend("gpu") else machine.gpu_limit()
    wanted = max(devices) + 1 if isinstance(devices, list) else 0 if devices == "auto" else devices
    if limit is not None and wanted > limit:
        numbers = f" (0 to {limit - 1})" if isinstance(devices, list) else ""
        raise UsageError(f"trainer.devices={shown}: this process sees {limit} GPU{'s'[: limit != 1]}{numbers}")


def check_compile(cfg: Plain) -> None:
    on_cpu = machine.accelerator(cfg["trainer"]["accelerator"]) == "cpu"
    if cfg["compile"]["backend"] == "inductor" and on_cpu and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise UsageError(
            "compile=inductor: needs a C++ compiler (g++ or clang++) on a CPU; or compile=off|eager|aot_eager"
        )


def check_data(cfg: Plain) -> None:
    data = cfg["data"]
    problems = []
    if "path" in data and not Path(data["path"]).exists() and not glob.glob(data["path"], recursive=True):
        problems.append(f"data.path={data['path']}: no such file or folder{_near_path(data['path'])}")
    elif data["_target_"].endswith("TokenData") and not Path(data["path"], "manifest.json").is_file():
        problems.append(f"data.path={data['path']}: no manifest.json in it; data=tokens needs a folder of token shards")
    if data.get("tokenizer") and not Path(data["tokenizer"]).is_file():
        problems.append(f"data.tokenizer={data['tokenizer']}: no such file{_near_path(data['tokenizer'])}")
    if data.get("prefetch") is not None and data["num_workers"] == 0:
        problems.append(f"data.prefetch={data['prefetch']}: only workers prefetch; set data.num_workers above 0")
    if problems:
        raise UsageError(problems)


def check_weights(cfg: Plain) -> None:
    """Weights are read once, when a new run starts."""
    weights = cfg["weights"]
    if weights is not None and cfg["resume"] is None and not Path(weights).exists():
        raise UsageError(f"weights={weights}: no such run, folder or file{_near_path(weights)}")


def _near_path(path: str) -> str:
    parent = Path(path).parent
    names = [item.name for item in parent.iterdir()] if parent.is_dir() else []
    near = nearest(Path(path).name, names)
    return did_you_mean(str(parent / near) if near else None)


def check_loggers(cfg: Plain) -> None:
    wandb = (cfg["logger"] or {}).get("wandb")
    if not wandb or wandb.get("offline", True):
        return
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    if not os.environ.get("WANDB_API_KEY") and not (netrc.is_file() and "wandb" in netrc.read_text(errors="replace")):
        raise UsageError(
            "logger.wandb.offline=false: needs the environment variable WANDB_API_KEY (or `wandb login`); "
            "logger.wandb.offline=true needs no account"
        )


def check_folders(cfg: Plain) -> None:
    _check_writable(cfg, "runs", "cache")


def check_cache(cfg: Plain) -> None:
    _check_writable(cfg, "cache")


def _check_writable(cfg: Plain, *keys: str) -> None:
    problems = []
    for key in keys:
        place = _existing(Path(cfg["paths"][key]))
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            problems.append(f"paths.{key}={cfg['paths'][key]}: {place} is not a folder this user can write to")
    if problems:
        raise UsageError(problems)


def check_disk(cfg: Plain) -> None:
    if "n_head" not in cfg["model"]:  # a network of another kind, whose size only its constructor knows
        return
    needed = parameter_count(cfg) * BYTES_PER_PARAMETER * 1.2
    free = shutil.disk_usage(_existing(Path(cfg["paths"]["runs"]))).free
    if needed > free:
        raise UsageError(
            f"paths.runs={cfg['paths']['runs']}: one checkpoint needs about {needed / 1e9:.3g} GB, "
            f"{free / 1e9:.3g} GB are free"
        )


def check_out(cfg: Plain) -> None:
    """Nothing is overwritten; whether what is there is the very same export shows when its weights are known."""
    if cfg.get("out") is None:
        return
    out = Path(cfg["out"])
    if os.path.lexists(out) and not (out / "config.json").is_file():
        raise UsageError(f"out={out}: is there already; nothing is overwritten, give another folder")
    parent = _existing(out.absolute().parent)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"out={out}: {parent} is not a folder this user can write to")


def _existing(path: Path) -> Path:
    path = path.absolute()
    return path if path.exists() else _existing(path.parent)


# Each check with the keys it reads. One rank asks its machine for all.
MACHINE_CHECKS: tuple[tuple[Check, tuple[str, ...]], ...] = (
    (check_accelerator, ("trainer.accelerator", "precision")),
    (check_gpus, ("trainer.accelerator", "trainer.devices")),
    (check_compile, ("compile", "trainer.accelerator")),
    (check_data, ("data",)),
    (check_mixture, ("data.sources", "trainer.max_epochs")),
    (check_hub, ("data", "trainer.max_epochs", "trainer.max_steps")),
    (check_weights, ("weights", "resume")),
    (check_packages, ("logger", "strategy")),
    (check_loggers, ("logger",)),
    (check_folders, ("paths",)),
    (check_disk, ("paths", "model", "data.vocab_size")),
    (check_out, ("out",)),
)
