"""What this machine has, asked of the system rather than of torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# CPU instructions that multiply bfloat16.
BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})
# What an accelerator needs besides its hardware.
PACKAGES = {"tpu": "torch_xla", "hpu": "lightning_habana"}
# Where the drivers show the GPUs.
NVIDIA = Path("/proc/driver/nvidia/gpus")
AMD = Path("/sys/class/kfd/kfd/topology/nodes")
DEVICES = Path("/dev")
WSL_DRIVER = Path("/usr/lib/wsl/lib/libcuda.so.1")
# Names of NVIDIA GPUs before the generation (Ampere) that multiplies bfloat16 in hardware.
WITHOUT_BF16 = re.compile(r"Tesla|Quadro|TITAN|\bGTX\b|\bRTX 20[678]0|\bMX[1-4]\d\d\b|\b(?:[VPMK]|GV)\d+|\bT\d+", re.I)
# The list in any of these leaves only some GPUs to a process.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def gpu_count() -> int:
    """NVIDIA or AMD GPUs that the system's drivers show and the environment leaves visible."""
    return visible_gpus(_driver_gpus(), os.environ)


def gpu_limit() -> int | None:
    """Most GPUs a process can use, None where the system does not tell how many there are (WSL2)."""
    return None if _behind_windows() else gpu_count()


def visible_gpus(found: int, environ: Mapping[str, str]) -> int:
    """How many of `found` GPUs the environment leaves. As in CUDA a list ends at its first number that is not there."""
    for name in VISIBLE:
        if name in environ:
            found = min(found, _listed(environ[name], found))
    return found


def visible_list() -> tuple[str, list[str]]:
    """The variable that picks GPUs for a process, and the names of those this one may use."""
    for name in VISIBLE:
        if name in os.environ:
            return name, [part.strip() for part in os.environ[name].split(",")][: gpu_count()]
    return VISIBLE[0], [str(number) for number in range(gpu_count())]


def _listed(text: str, found: int) -> int:
    names = [part.strip() for part in text.split(",")]
    there = [name.startswith(("GPU-", "MIG-")) or (name.isdigit() and int(name) < found) for name in names]
    return there.index(False) if False in there else len(there)


def _driver_gpus() -> int:
    if NVIDIA.is_dir():
        return len(list(NVIDIA.iterdir()))
    if AMD.is_dir():
        return sum("simd_count 0" not in (node / "properties").read_text() for node in AMD.iterdir())
    in_sandbox = len(list(DEVICES.glob("nvidia[0-9]*")))
    return in_sandbox or int(_behind_windows() and WSL_DRIVER.exists())


def _behind_windows() -> bool:
    """WSL2 reaches any GPU through this one device."""
    return (DEVICES / "dxg").exists()


def gpus_have_bf16() -> bool:
    """False when a GPU's name is one of a generation without bfloat16; a name that cannot be read counts as with it."""
    return not any(WITHOUT_BF16.search(name) for name in _gpu_names())


def _gpu_names() -> list[str]:
    names = []
    for file in NVIDIA.glob("*/information"):
        try:
            names += re.findall(r"^Model:\s*(.+)$", file.read_text(errors="replace"), re.MULTILINE)
        except OSError:
            continue
    return names


def torch_has_gpu_build() -> bool:
    """False when the installed torch is a CPU build; read from its version, not imported."""
    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def missing_backend(accelerator: str) -> str | None:
    """What stands between this machine, or this program, and an accelerator; None when nothing does."""
    package = PACKAGES.get(accelerator)
    if package and find_spec(package) is None:
        return f"needs the package {package}, which is not installed; only cpu and gpu (or cuda) are implemented"
    if accelerator not in ("auto", "cpu", "gpu", "cuda"):
        return "only cpu and gpu (or cuda) are implemented"
    return _missing_gpu() if accelerator in ("gpu", "cuda") else None


def _missing_gpu() -> str | None:
    if not torch_has_gpu_build():
        return f"the installed package torch {_torch_version()} is a CPU build; install a CUDA or ROCm build of torch"
    if gpu_count() or (_behind_windows() and visible_gpus(1, os.environ)):
        return None
    hidden = [f"{name}={os.environ[name]}" for name in VISIBLE if name in os.environ]
    if hidden and _driver_gpus():
        return f"{' '.join(hidden)} hides every GPU"
    return "no GPU driver is loaded (neither /proc/driver/nvidia nor AMD's kfd)"


def accelerator(word: str) -> str:
    """`auto` decided: gpu where a GPU and a torch build for it are present, else cpu."""
    if word != "auto":
        return "gpu" if word == "cuda" else word
    return "gpu" if gpu_count() and torch_has_gpu_build() else "cpu"


def device_count(word: str) -> int:
    """Devices that `trainer.devices=auto` stands for."""
    return max(1, gpu_count()) if accelerator(word) == "gpu" else 1


@cache
def cpu_flags() -> frozenset[str]:
    """The CPU's instruction set words as Linux lists them; empty elsewhere."""
    return frozenset(_cpu_fact("flags", "Features").split())


def _cpu_fact(*names: str) -> str:
    """The first line of /proc/cpuinfo that begins with one of `names`, without the name; '' where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    line = next((line for line in text.splitlines() if line.startswith(names)), "")
    return line.partition(":")[2].strip()


AUTO_PRECISIONS = ("bf16-mixed", "32-true")  # what `auto` can stand for


def resolve_precision(word: str, accelerator_word: str, flags: frozenset[str] | None = None) -> str:
    """`auto` decided: bf16-mixed on GPUs or on a CPU that multiply bfloat16 in hardware, else 32-true.

    With AMX tiles or avx512_bf16 a small network's step takes about 0.6 of its float32 time; without, bf16 is slower.
    """
    if word != "auto":
        return word
    if accelerator(accelerator_word) == "gpu":
        fast = gpus_have_bf16()
    else:
        fast = not (cpu_flags() if flags is None else flags).isdisjoint(BF16_FLAGS)
    return "bf16-mixed" if fast else "32-true"


def thread_share(processes: int) -> int:
    """CPU threads for each of a node's processes: the cores this process may use, divided among them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, processes))


def cpu_model() -> str:
    """The CPU's name as Linux or the platform gives it."""
    return _cpu_fact("model name") or platform.processor() or platform.machine()


def let_idle_threads_sleep() -> None:
    """OpenMP's threads spin long at every barrier by default: on busy cores a small network's step then costs twice the
    CPU time. A short spin before they sleep keeps the speed on free cores (where sleeping at once loses a third of it).
    GNU's runtime reads this once, when torch is imported; what is set already stays."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1500")


def _torch_version() -> str:
    return importlib.metadata.version("torch") if find_spec("torch") else "(none)"
