"""Weights & Biases under this project's own step."""

from collections.abc import Mapping

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class WandbRun(WandbLogger):
    """Its internal step is the update's number, where Lightning's counts calls of `log` and begins at 0 again in every
    start. So a run that is stopped and goes on never steps backwards, and what a killed one repeats, with the same
    digits, falls on the steps that are there already."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.experiment.log({**metrics, "trainer/global_step": step}, step=step)
