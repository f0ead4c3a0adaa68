"""The matmul peak of this machine: a GPU's datasheet figure, or a CPU's measured once and kept."""

import json
import os
import platform
import time
from pathlib import Path

import torch

# dense bf16/fp16 tensor-core TFLOP/s without sparsity, from NVIDIA's datasheets; the SXM part where there are several
DATASHEET = {
    "H200": 989,
    "H100": 989,
    "B200": 2250,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "A10G": 70,
    "V100": 125,
    "T4": 65,
}


def matmul_peak(device: torch.device, dtype: torch.dtype, threads: int, cache: Path) -> float | None:
    """FLOP/s of one process; None when it is not known (a GPU without an entry, or fp32 on one)."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        low = dtype in (torch.bfloat16, torch.float16)
        return next((1e12 * peak for word, peak in DATASHEET.items() if low and word in name), None)
    if device.type != "cpu":
        return None
    return _cpu_peak(dtype, threads, cache / "matmul_peak.json")


def _cpu_peak(dtype: torch.dtype, threads: int, path: Path) -> float:
    key = f"{cpu_model()} {torch.__version__} {dtype} {threads} threads"
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return float(known[key])
    except (OSError, ValueError, KeyError, TypeError):
        known = known if isinstance(locals().get("known"), dict) else {}
    peak = _measure(dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(known | {key: peak}, indent=1), encoding="utf-8")
    aside.replace(path)
    return peak


def _measure(dtype: torch.dtype, size: int = 512, rounds: int = 8) -> float:
    """The best of some short rounds of square matmuls; about 0.2 CPU-seconds."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best = 0.0
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(4):
            a @ b
        best = max(best, 4 * 2 * size**3 / (time.perf_counter() - began))
    return best


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
