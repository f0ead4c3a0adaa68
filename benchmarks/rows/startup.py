"""CPU time of a whole process up to its first optimizer step."""

from statistics import median

from benchmarks import processes
from benchmarks.contest import Ratio
from benchmarks.report import Row, not_run, verdict
from benchmarks.settings import Settings

WHAT, GOAL = "process to first step, CPU time", "<= 1.25x bare torch, core-only environment; below Trainer"
MOST = 1.25


def rows(settings: Settings) -> list[Row]:
    core, peers = processes.environment("core"), processes.environment("bench")
    if core is None:
        return [not_run(WHAT, GOAL, "no .venv-core; `make bench` makes it")]
    start = ["-m", "benchmarks.starts"]
    commands = {"bare": [core, *start, "bare"], "LMForge": [core, *start, "lmforge"]}
    commands["bare again"] = commands["bare"]
    if settings.quick:
        commands["LMForge"] += ["data=text", f"data.path={processes.ROOT / 'README.md'}", "data.vocab_size=300"]
    if peers:
        commands["Trainer"] = [peers, *start, "trainer"]
    folder = settings.folder / "startup"
    for command in settings.pick(list(commands.values()), []):  # fills disk caches, and LMForge's own of prepared data
        processes.run(command, folder)
    used: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(settings.pick(5, 1)):
        for name in list(commands)[:: 1 if number % 2 == 0 else -1]:
            used[name].append(processes.run(commands[name], folder).seconds)
    over = {name: Ratio.of(used["LMForge"], used[name]) for name in used if name != "LMForge"}
    again = Ratio.of(used["bare again"], used["bare"]).best
    peer = f"\n{over['Trainer']}x transformers' Trainer" if peers else "\nno Trainer: no .venv-bench"
    reached = over["bare"].best <= MOST and (not peers or over["Trainer"].best < 1)
    seconds = ", ".join(f"{name} {min(times):.2f} s" for name, times in used.items() if name != "bare again")
    measured = f"{over['bare']}x bare torch{peer}\n{seconds}; A/A {again:.3f}"
    facts = {"seconds": used, "median": {name: median(times) for name, times in used.items()}, "again": again}
    return [Row(WHAT, GOAL, measured, verdict(reached, again), facts)]
