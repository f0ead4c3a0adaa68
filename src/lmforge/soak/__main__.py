"""`make faults`: every fault once, on one training of two processes; a table and reports/faults.json."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lmforge.config.errors import ExitError
from lmforge.soak import report
from lmforge.soak.command import begin, ended_by_sigterm, finish
from lmforge.soak.faults import FAULTS
from lmforge.soak.play import NOT_DONE, Play
from lmforge.soak.verdicts import Verdict

GAP, SAVE_EVERY, TRIES = 30, 20, 3  # steps between two faults and between two saves; how often one is tried
HANG_SECONDS = 120.0
MEMORY, HANDLES = 20.0, 8  # limits, as in configs/soak.yaml
OUT = Path("reports/faults.json")


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="lmforge-faults-"))
    steps = (GAP + 2 * SAVE_EVERY) * len(FAULTS)
    report.say(f"{len(FAULTS)} faults, one after the other, on a training of {steps} steps on two processes")
    try:
        with ended_by_sigterm():
            _every_fault(folder, steps)
    except ExitError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0


def _every_fault(folder: Path, steps: int) -> None:
    found = begin(folder, "", steps, SAVE_EVERY, HANG_SECONDS)
    play = Play(found.setup, "faults")
    found.plays.append(play)
    play.run(each(play))
    found.compare(play)
    judged = [verdict for verdict in found.verdicts(MEMORY, HANDLES) if verdict.passed is not None]
    finish(found, [all_proven(play), *judged], OUT, {})


def each(play: Play) -> Iterator[tuple[str, int]]:
    """Every fault, again where its moment could not be proven."""
    for name in FAULTS:
        for _ in range(TRIES):
            yield name, GAP
            if play.strikes and play.strikes[-1].fault == name and (play.strikes[-1].moment or play.strikes[-1].note):
                break


def all_proven(play: Play) -> Verdict:
    """Or impossible on this machine, which the table says."""
    done = {strike.fault for strike in play.strikes if strike.moment or strike.note.startswith(NOT_DONE)}
    return Verdict("moments proven", f"{len(done)} of {len(FAULTS)}", "all", done == set(FAULTS))


if __name__ == "__main__":
    sys.exit(main())
