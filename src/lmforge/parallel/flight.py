"""What this process's collectives are doing, as torch's flight recorder has noted it for gloo and NCCL alike."""

import json
from typing import Any

from torch._C import _distributed_c10d as c10d

Entry = dict[str, Any]
# NCCL has a recorder of its own, which a torch for CPUs lacks; all else is in the first.
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def recorded() -> list[Entry]:
    """The last collectives of this process, oldest first; empty where torch records none (TORCH_FR_BUFFER_SIZE=0).

    May be asked from any thread while another hangs in a collective.
    """
    dumps = [getattr(c10d, name) for name in RECORDERS if hasattr(c10d, name)]
    entries = [entry for dump in dumps for entry in json.loads(dump(True, False) or "{}").get("entries", [])]
    own = [entry for entry in entries if not entry.get("is_p2p")]
    return sorted(own, key=lambda entry: entry["time_created_ns"])


def waits_in(entries: list[Entry]) -> str | None:
    """The oldest collective that waits for other ranks, `gloo:all_reduce number 57 of 1234 values`; None when none
    does.

    NCCL's have only been handed to the GPU until they are `started`, and what they wait for may be this rank's own.
    """
    for entry in entries:
        name = entry["profiling_name"]
        if not entry["retired"] and (entry["state"] == "started" or not name.startswith("nccl")):
            size = sum(_product(shape) for shape in entry["input_sizes"])
            return f"{name} number {entry['collective_seq_id']} of {size} values"
    return None


def reached(entries: list[Entry]) -> dict[str, int]:
    """How many collectives of each process group this rank has entered, gloo's and NCCL's of one group apart: each
    backend counts its own."""
    groups = [f"{entry['profiling_name'].partition(':')[0]} {entry['process_group'][0]}" for entry in entries]
    return {group: entry["collective_seq_id"] for group, entry in zip(groups, entries, strict=True)}


def _product(shape: list[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
