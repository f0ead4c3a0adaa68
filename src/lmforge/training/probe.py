"""What `lmforge soak` needs to see of a run, and the one fault that only the run itself can have."""

import hashlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lmforge.data.windows import Window

ORDER = "spoil"  # while a file of this name lies in the folder of probes, updates after a save border are spoilt
SPOILT = 3  # so many in a row


def row_hash(row: Tensor) -> str:
    return hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest()


class Probe(pl.Callback):
    """Writes `<run>/probe/rank-00000.txt`: a line an update, its step and a hash of every row that went into it.

    Under the order of a file `<run>/probe/spoil` the first updates after each `every_n_steps` get a loss that is not
    a number.
    """

    def __init__(self, every_n_steps: int):
        self.every = every_n_steps
        self.hook: Any = None
        self.spoils = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.folder = Path(trainer.default_root_dir) / "probe"
        self.folder.mkdir(exist_ok=True)
        self.file = self.folder / f"rank-{trainer.global_rank:05d}.txt"

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        done = trainer.global_step % self.every
        if done == 0:  # a burst has to be over by the next save, which would keep its skipped updates
            self.spoils = (self.folder / ORDER).exists()
        if self.spoils and done < SPOILT:
            first = next(module for module in pl_module.modules() if isinstance(module, nn.Embedding))
            self.hook = first.register_forward_hook(lambda module, given, output: output * torch.nan)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Window, batch_idx: int
    ) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        rows = [row_hash(row) for micro in batch["micro_batches"] for row in micro["input_ids"].cpu()]
        with self.file.open("a") as file:
            file.write(f"{trainer.global_step} {' '.join(rows)}\n")
