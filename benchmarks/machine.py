"""The machine a table was made on, and how busy it was."""

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lmforge.config.machine import BF16_FLAGS, cpu_flags, cpu_model

FLAGS = BF16_FLAGS | {"amx_tile", "amx_int8", "avx512f", "avx2", "avx512_vnni"}
PACKAGES = ("torch", "lightning", "transformers", "litgpt", "tokenizers", "tiktoken", "optuna")


def describe() -> dict[str, Any]:
    """CPU, cores, load and versions."""
    return {
        "cpu": cpu_model(),
        "flags": sorted(FLAGS & cpu_flags()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def head(facts: dict[str, Any]) -> str:
    """Machine, versions, and what one core can do at most."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    limits = ", ".join(f"{value} {name}" for name, value in facts["roofline"].items())
    cpu = f"{facts['cpu']} ({', '.join(facts['flags'])}), {facts['cores']} cores, {facts['gpu'] or 'no GPU'}"
    return f"{cpu}\nPython {facts['python']}, {versions}\none core: {limits}"


def load(facts: dict[str, Any]) -> str:
    """How busy the machine was; with more work than cores, ratios near their goal may fall on either side."""
    busy = max(facts["load"], facts["load_after"]) > facts["cores"]
    return f"load {facts['load']} before, {facts['load_after']} after{'; NOISY: more work than cores' if busy else ''}"


def busy() -> bool:
    """Whether there is more work than cores right now."""
    return os.getloadavg()[0] > len(os.sched_getaffinity(0))


def roofline(size: int = 512, seconds: float = 0.4) -> dict[str, float]:
    """GFLOP/s of one core's square matmuls in float32 and bfloat16, and GB/s of a large copy: best of short rounds."""
    torch.set_num_threads(1)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        found[f"{str(dtype).removeprefix('torch.')}_gflops"] = 2e-9 * size**3 / _best(lambda a=a, b=b: a @ b, seconds)
    source = torch.zeros(1 << 25)
    target = torch.empty_like(source)
    found["copy_gb_per_s"] = 2e-9 * source.nbytes / _best(lambda: target.copy_(source), seconds)
    return {name: round(value, 1) for name, value in found.items()}


def _best(work: Any, seconds: float) -> float:
    best, deadline = float("inf"), time.process_time() + seconds
    while (began := time.process_time()) < deadline:
        work()
        best = min(best, time.process_time() - began)
    return best
