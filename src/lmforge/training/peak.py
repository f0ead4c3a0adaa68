"""The matmul peak of this machine: a GPU's datasheet figure, or a CPU's measured once and kept."""

import json
import math
import re
import time
from pathlib import Path

import torch

from lmforge.config.aside import write_aside
from lmforge.config.machine import cpu_model

# dense bf16/fp16 tensor-core TFLOP/s without sparsity, from NVIDIA's datasheets; SXM unless the name says otherwise,
# and a name that is part of another comes after it
DATASHEET = {
    "B200": 2250,
    "GH200": 989,
    "H200 NVL": 835,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
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
        low = dtype in (torch.bfloat16, torch.float16)
        return datasheet_peak(torch.cuda.get_device_name(device)) if low else None
    if device.type != "cpu":
        return None
    return _cpu_peak(dtype, threads, cache / "matmul_peak.json")


def datasheet_peak(name: str) -> float | None:
    """FLOP/s of the GPU of this name. Only whole words count: an A1000 is no A100."""
    found = (peak for words, peak in DATASHEET.items() if re.search(rf"\b{words}\b", name))
    return next((1e12 * peak for peak in found), None)


def _cpu_peak(dtype: torch.dtype, threads: int, path: Path) -> float:
    key = f"{cpu_model()} {torch.__version__} {dtype} {threads} threads"
    known = _read(path)
    if key not in known:
        known[key] = _measure(dtype, threads)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_aside(path, json.dumps(known, indent=1))
    return known[key]


def _read(path: Path) -> dict[str, float]:
    """What was measured before; a file that cannot be read is measured anew."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {key: value for key, value in pairs if isinstance(value, float) and math.isfinite(value)}


def _measure(dtype: torch.dtype, threads: int, size: int = 512, rounds: int = 12) -> float:
    """The best of some short rounds of square matmuls by CPU time, which other programs on the machine do not
    stretch, times the threads; about 0.2 CPU-seconds."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    best = 0.0
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(4):
            a @ b
        best = max(best, 4 * 2 * size**3 / (time.process_time() - began))
    return best * threads
