"""The Lightning strategy for several processes: it launches and connects them; the plan shards the network."""

from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy


class MeshStrategy(DDPStrategy):
    """Lightning's launcher, ranks and process group, without its own wrapping of the module.

    `Plan.apply` has already replicated or sharded the network in `configure_model`, so nothing is wrapped, moved,
    converted or broadcast here, and training, validation and test run on the very same objects.
    """

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)

    def teardown(self) -> None:
        super().teardown()
        if dist.is_initialized():
            dist.destroy_process_group()
