"""Places for jobs that run side by side: each has its own GPUs and CPU cores."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lmforge.config import machine
from lmforge.config.errors import UsageError
from lmforge.config.plain import Plain


@dataclass(frozen=True)
class Slot:
    """`cores` empty = all; `gpus` None = as the environment has them."""

    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {} if self.gpus is None else {machine.visible_list()[0]: ",".join(self.gpus)}

    @property
    def title(self) -> str:
        gpus = [f"GPU {','.join(self.gpus)}"] if self.gpus else []
        cores = [f"cores {','.join(map(str, self.cores))}"] if self.cores and not self.gpus else []
        return "".join(f" on {place}" for place in gpus + cores)

    @contextmanager
    def cores_held(self) -> Iterator[None]:
        """A process started meanwhile keeps this slot's cores, and so do its threads and children."""
        if not self.cores or not hasattr(os, "sched_setaffinity"):
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def make_slots(wanted: Any, plains: Sequence[Plain]) -> list[Slot]:
    """`wanted` = sweep.jobs. `auto` gives every job its own GPUs, or on a CPU one job at a time; a number larger than
    that makes jobs share."""
    on_gpu = any(machine.accelerator(plain["trainer"]["accelerator"]) == "gpu" for plain in plains)
    each = _gpus_each(wanted, plains) if on_gpu else None
    names = machine.visible_list()[1] if on_gpu else []
    count = wanted if wanted != "auto" else max(1, len(names) // each) if each else 1
    if count == 1:
        return [Slot()]
    groups = [tuple(names[i : i + each]) for i in range(0, len(names) - each + 1, each)] if each else []
    if on_gpu and not groups:
        raise UsageError(f"sweep.jobs={count}: each job wants {each} GPUs, and this process sees {len(names)}")
    cores = _core_sets(count)
    return [Slot(cores[i], groups[i % len(groups)] if groups else None) for i in range(count)]


def _gpus_each(wanted: Any, plains: Sequence[Plain]) -> int | None:
    """GPUs of one job, the largest; None when jobs name their GPUs themselves, so that they go one by one."""
    typed = [plain["trainer"]["devices"] for plain in plains]
    named = next((devices for devices in typed if not isinstance(devices, int)), None)
    if named is None:
        return max(typed)
    if wanted in ("auto", 1):
        return None
    shown = ",".join(map(str, named)) if isinstance(named, list) else named
    raise UsageError(
        f"trainer.devices={shown} sweep.jobs={wanted}: jobs side by side get GPUs of their own; "
        "give trainer.devices as a number"
    )


def _core_sets(count: int) -> list[tuple[int, ...]]:
    """The cores this process may use, cut into `count` equal parts; with fewer cores than jobs, cores are shared."""
    if not hasattr(os, "sched_getaffinity"):
        return [()] * count
    cores = sorted(os.sched_getaffinity(0))
    if count > len(cores):
        return [(cores[i % len(cores)],) for i in range(count)]
    return [tuple(cores[i * len(cores) // count : (i + 1) * len(cores) // count]) for i in range(count)]
