"""Lightning's view of ranks that an outer launcher started."""

from lightning.pytorch.plugins.environments import ClusterEnvironment

from lmforge.config.launch import Launch


class Launched(ClusterEnvironment):
    """Ranks as this program itself has read them from the environment.

    Lightning's own environments would guess the launcher anew, and refuse `srun --ntasks` without --ntasks-per-node.
    """

    def __init__(self, launch: Launch, address: str, port: int):
        super().__init__()
        self.launch, self.address, self.port = launch, address, port

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.address

    @property
    def main_port(self) -> int:
        return self.port

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.launch.world_size

    def set_world_size(self, size: int) -> None:
        """The launcher's number stands."""

    def global_rank(self) -> int:
        return self.launch.rank

    def set_global_rank(self, rank: int) -> None:
        """The launcher's number stands."""

    def local_rank(self) -> int:
        return self.launch.local_rank

    def node_rank(self) -> int:
        return self.launch.rank // self.launch.local_world_size
