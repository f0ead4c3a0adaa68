"""What ranks that train apart have to tell each other when they meet, which others do at every step."""

from typing import TYPE_CHECKING

from lmforge.parallel.local_sgd import Rounds

if TYPE_CHECKING:
    from lmforge.tasks.update import UpdateTask


class Round:
    """This rank's updates since the ranks last met, and the meeting.

    Until then `task.agreed` and the task's counts are this rank's own; afterwards they are those of all ranks.
    """

    def __init__(self, rounds: Rounds):
        self.rounds = rounds
        self.steps = self.targets = self.skipped = 0

    def ends(self, task: "UpdateTask", finite: bool) -> bool:
        """Whether the update just done was the last of its round. Then all have met, and have the same weights."""
        self.steps += 1
        self.targets += task.agreed.targets
        self.skipped += not finite
        if task.global_step % self.rounds.every and task.global_step != task.total_steps:
            return False
        task.agreed = task.agree(self.targets)
        task.tokens += task.agreed.targets - self.targets
        self.rounds.meet()
        task.failures = max(task.control.gather(task.failures))
        task.skipped += sum(task.control.gather(self.skipped)) - self.skipped
        self.steps = self.targets = self.skipped = 0
        return True
