"""The Lightning strategy for several processes: it launches and connects them; the plan shards the network."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lmforge.config.connection import Connection
from lmforge.parallel.connect import connect, first_exchange
from lmforge.parallel.unmet import Meeting
from lmforge.parallel.watch import Watch


class _Launcher(_SubprocessScriptLauncher):
    """Lightning's own observer looks every 5 s and then kills this process too, whatever it is saving or about to say;
    the watch takes its place."""

    watch: Watch

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            first = self.cluster_environment.node_rank() * self.num_processes
            for local_rank, process in enumerate(self.procs, 1):
                self.watch.add(first + local_rank, process.pid, process)
        return function(*args, **kwargs)


class MeshStrategy(DDPStrategy):
    """Lightning's launcher, ranks and process group, without its own wrapping of the module.

    `Plan.apply` has already replicated or sharded the network in `configure_model`, so nothing is wrapped, moved,
    converted or broadcast here, and training, validation and test run on the very same objects.
    """

    def __init__(self, how: Connection, **kwargs: Any):
        super().__init__(**kwargs)
        self.how = how
        self.watch = Watch()

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = _Launcher(self.cluster_environment, self.num_processes, self.num_nodes)
        self._launcher.watch = self.watch

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        place = self.cluster_environment
        assert place is not None
        meeting = Meeting(place.main_address, place.main_port, self.global_rank, self.world_size, self.how.seconds)
        connect(self.how, meeting)
        first_exchange(self.how, meeting, self.root_device)

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)

    def teardown(self) -> None:
        """Lightning would move everything to the CPU first, which fails where an error left weights half gathered, and
        may find no room there."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.watch.done = True
