"""Giving memory back that is held for reuse."""

import ctypes
from typing import Any

import lightning.pytorch as pl
import torch


class FreeMemory(pl.Callback):
    """Every so many steps gives the device's unused memory back to the system; 0 never does.

    Peak memory is in the run's summary, whether this is on or not.
    """

    def __init__(self, empty_cache_every_n_steps: int):
        self.every = empty_cache_every_n_steps

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if self.every and trainer.global_step % self.every == 0:
            give_back(trainer.strategy.root_device)


def give_back(device: torch.device) -> None:
    """CUDA's allocator drops its cached blocks. On a CPU glibc returns free pages, also those it was told to keep;
    another C library has no such call and nothing happens."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return
    trim(0)
