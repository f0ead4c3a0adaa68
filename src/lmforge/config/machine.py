"""What this machine has, asked of the system rather than of torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# CPU instructions that multiply bfloat16.
BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})
# What an accelerator needs besides its hardware.
PACKAGES = {"tpu": "torch_xla", "hpu": "lightning_habana"}


def gpu_count() -> int:
    """NVIDIA or AMD GPUs that the system's drivers show."""
    nvidia = Path("/proc/driver/nvidia/gpus")
    if nvidia.is_dir():
        return len(list(nvidia.iterdir()))
    nodes = Path("/sys/class/kfd/kfd/topology/nodes")
    if not nodes.is_dir():
        return 0
    return sum("simd_count 0" not in (node / "properties").read_text() for node in nodes.iterdir())


def torch_has_gpu_build() -> bool:
    """False when the installed torch is a CPU build; read from its version, not imported."""
    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def missing_backend(accelerator: str) -> str | None:
    """What stands between this machine and an accelerator, or None."""
    if accelerator in ("gpu", "cuda"):
        if not torch_has_gpu_build():
            return (
                f"the installed package torch {_torch_version()} is a CPU build; install a CUDA or ROCm build of torch"
            )
        return None if gpu_count() else "no GPU driver is loaded (neither /proc/driver/nvidia nor AMD's kfd)"
    if accelerator == "mps" and (platform.system(), platform.machine()) != ("Darwin", "arm64"):
        return "needs macOS on Apple silicon"
    package = PACKAGES.get(accelerator)
    if package and find_spec(package) is None:
        return f"needs the package {package}, which is not installed"
    return None


def accelerator(word: str) -> str:
    """`auto` decided: gpu where a GPU and a torch build for it are present, mps on Apple silicon, else cpu."""
    if word != "auto":
        return "gpu" if word == "cuda" else word
    if gpu_count() and torch_has_gpu_build():
        return "gpu"
    return "mps" if missing_backend("mps") is None else "cpu"


def device_count(word: str) -> int:
    """Devices that `trainer.devices=auto` stands for."""
    return max(1, gpu_count()) if accelerator(word) == "gpu" else 1


@cache
def cpu_flags() -> frozenset[str]:
    """The CPU's instruction set words as Linux lists them; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())


def resolve_precision(word: str, accelerator_word: str, flags: frozenset[str] | None = None) -> str:
    """`auto` decided: bf16-mixed on a GPU or on a CPU that multiplies bfloat16 in hardware, else 32-true.

    With AMX tiles or avx512_bf16 a small network's step takes about 0.6 of its float32 time; without, bf16 is slower.
    """
    if word != "auto":
        return word
    kind = accelerator(accelerator_word)
    flags = cpu_flags() if flags is None else flags
    fast = kind in ("gpu", "tpu", "hpu") or (kind == "cpu" and not flags.isdisjoint(BF16_FLAGS))
    return "bf16-mixed" if fast else "32-true"


def let_idle_threads_sleep() -> None:
    """OpenMP's threads spin at every barrier by default: on busy cores a small network's step then costs twice the CPU
    time. Asleep they cost a few per cent. Read once, when torch is imported; a value that is set already stays."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _torch_version() -> str:
    return importlib.metadata.version("torch") if find_spec("torch") else "(none)"
