"""The way in for every front door: words -> checked config -> run folder -> job -> exit code."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from lmforge.config.aside import write_aside
from lmforge.config.checks import NEEDED_BY, preflight
from lmforge.config.compose import Composer, config_folder
from lmforge.config.connection import typed_by_hand
from lmforge.config.errors import (
    Exit,
    ExitError,
    NonFinite,
    Requeue,
    Terminated,
    UsageError,
    exit_code_of,
    is_refused_by_disk,
)
from lmforge.config.launch import CONFIG_VARIABLE, RUN_VARIABLE, Launch, end_with_parent, note_outcome, read_launch
from lmforge.config.machine import let_idle_threads_sleep
from lmforge.config.parse import Command, Tree, Word, read_command, read_words
from lmforge.config.plain import Plain, dump_yaml, get, to_config
from lmforge.runs.folder import RunFolder
from lmforge.runs.going_on import continue_run, open_run
from lmforge.runs.plan import Plan, compose_train, plan_from_run, plan_train, settle
from lmforge.start import helptext
from lmforge.start.alone import ALONE, plan_alone
from lmforge.start.announced import announced
from lmforge.sweep import start as sweep

OF_RANKS = ("train", "evaluate")  # front doors that an outer launcher may start several times
AGREED = (NonFinite, Requeue, Terminated)  # what every rank raises at the same step
Job = Callable[..., Mapping[str, Any] | None]


def run_front_door(name: str, job: Job, argv: list[str] | None = None) -> None:
    """Runs a front door and ends the process with its exit code (errors.Exit).

    `name` is the config's (configs/<name>.yaml). `job` gets the resolved config, in which every text is literal and
    unknown keys raise, and the run folder: for train locked, and new or to be continued; for those of ALONE None; else
    the one to read.
    """
    sys.exit(int(FrontDoor(name, job, sys.argv if argv is None else argv).run()))


class FrontDoor:
    """One start of one front door."""

    def __init__(self, name: str, job: Job, argv: list[str]) -> None:
        self.name, self.job, self.argv = name, job, argv
        self.launch = Launch()
        self.run_folder: RunFolder | None = None
        self.before: dict[Path, str] | None = None  # files of a run to be continued, as they were before this start

    def run(self) -> int:
        try:
            self.launch, warning = read_launch(by_hand=typed_by_hand(self.argv[1:]))
            if warning:
                print(warning, file=sys.stderr)
            return self._start()
        except KeyboardInterrupt:
            return self._interrupted()
        except SystemExit as ending:
            if isinstance(ending.__context__, KeyboardInterrupt):  # Lightning ends the process itself, with 1
                return self._interrupted()
            raise
        except Exception as error:
            return self._report(error)

    def _start(self) -> int:
        if self.launch.external and self.name not in OF_RANKS:
            raise UsageError(f"this job is one process; start it without {self.launch.name}")
        folder = os.environ.get(RUN_VARIABLE)
        if folder and not self.launch.external and self.name not in ALONE:
            return self._start_frozen(RunFolder(folder))
        if self.name in ALONE and os.environ.get(CONFIG_VARIABLE):
            return self._run_alone(yaml.safe_load(Path(os.environ[CONFIG_VARIABLE]).read_text(encoding="utf-8")))
        command = read_command(self.argv[1:])
        tree = Tree(config_folder(self.name, Path(self.argv[0])))
        composer = Composer(self.name, tree)
        if command.completion or command.info:
            return helptext.hand_to_hydra(self.name, tree, command, self.argv)
        if command.help:
            print(helptext.help_text(self.name, composer))
            return Exit.DONE
        problems = list(command.problems)
        sweeps = command.multirun or (self.name == "train" and sweep.asks_for_sweep(command.words))
        words = read_words(command.words, tree, sweeps, problems)
        broken = [key for key in tree.groups if any(problem.startswith(f"{key}=") for problem in problems)]
        if command.cfg:
            return self._print_config(composer, command, words, broken, problems)
        if self.name in ALONE and not sweeps:
            return self._run_alone(plan_alone(composer, words, broken, problems).plain)
        if sweeps:
            return self._sweep(composer, words, broken, problems)
        return self._start_typed(composer, command, words, broken, problems)

    def _start_frozen(self, run: RunFolder) -> int:
        """A child rank, or a sweep's job: the config is the folder's, nothing is composed again."""
        end_with_parent()
        if self.launch.kind != "child" and len(self.argv) > 1:
            raise UsageError(
                f"{RUN_VARIABLE}={run.path} is set, so typed words have no effect; unset it to start a new run"
            )
        own = os.environ.get(CONFIG_VARIABLE)
        if not own and not run.config_file.is_file():
            raise UsageError(f"{RUN_VARIABLE}={run.path}: holds no config.yaml")
        plain = yaml.safe_load(Path(own).read_text(encoding="utf-8")) if own else run.load_plain()
        if self.launch.kind == "none":
            run.lock()
        return self._run_job(to_config(plain), run)

    def _start_typed(
        self, composer: Composer, command: Command, words: list[Word], broken: list[str], problems: list[str]
    ) -> int:
        if self.name == "train":
            plan = plan_train(composer, words, broken, self.launch, problems)
            sweep.refuse_silence(plan.sweep)
        else:
            train = Composer("train", composer.tree)
            plan = plan_from_run(composer, train, words, broken, self.launch, problems)
        if get(plan.plain, "strategy.process_group_backend") in ("nccl", "mpi"):
            from lmforge.parallel.connect import check_build

            check_build(plan.plain["strategy"]["process_group_backend"])
        if self.launch.kind == "torchrun":
            end_with_parent()  # without its agent, which was killed, a rank would train on unseen and hold the folder
        if self.launch.external:
            plan = self._share(plan, command)
        else:
            self._settle_run(plan, command)
        if plan.run is None or plan.done:
            self._say(plan.done or "nothing to do")
            return Exit.DONE
        return self._run_job(to_config(plan.plain), plan.run)

    def _settle_run(self, plan: Plan, command: Command) -> None:
        """Finds or makes the run folder on the one process that may. Under an outer launcher this is also the one that
        asks the machine, since others could not tell it of a problem of their own."""
        if self.name == "train":
            continue_run(plan)
        if self.launch.external:
            problems, notes = preflight(plan.plain, only=NEEDED_BY.get(self.name))
            if problems:
                raise UsageError(problems)
            plan.notes = list(dict.fromkeys([*plan.notes, *notes]))
        if self.name == "train" and not plan.done:
            files = (plan.run.config_file, plan.run.exit_file) if plan.run else ()
            self.before = {file: file.read_text(encoding="utf-8") for file in files if file.is_file()}
            plan.run = open_run(plan, command.words, self.argv)
        for note in plan.notes:
            self._say(note)

    def _share(self, plan: Plan, command: Command) -> Plan:
        """Rank 0 settles the run for all ranks of an outer launcher, and its problems end them all."""
        from lmforge.parallel.connect import connect_launched
        from lmforge.parallel.control import share_object

        connect_launched(plan.plain, self.launch)
        if self.launch.rank != 0:
            return _received(share_object(None))
        try:
            self._settle_run(plan, command)
        except UsageError as error:
            share_object({"problems": error.problems})
            raise
        folder = str(plan.run.path) if plan.run else None
        share_object({"problems": [], "plain": plan.plain, "folder": folder, "done": plan.done})
        return plan

    def _run_job(self, config: DictConfig, run: RunFolder) -> int:
        self.run_folder = run
        if self.name == "train" and self.launch.rank == 0:
            run.exit_file.unlink(missing_ok=True)
        if self.launch.local_rank == 0:
            note_outcome(None)
        let_idle_threads_sleep()
        try:
            with announced(self.name, config, run):
                self.job(config, run)
            self._note_end(Exit.DONE)
        finally:
            run.unlock()
        return Exit.DONE

    def _note_end(self, code: Exit, agreed: bool = False) -> None:
        """From the first rank, and from any other that fails by itself. A run that was killed has no such note."""
        if self.launch.rank != 0 and not code:
            return
        writes = self.launch.rank == 0 or not agreed  # else a file would be written as often as there are ranks
        if self.name == "train" and self.run_folder is not None and writes:
            self.run_folder.note_end(code)
        else:
            note_outcome(code)

    def _take_back(self) -> None:
        """A start that is refused leaves a run to be continued as it was, and no new run's folder."""
        run = self.run_folder
        if self.before is None or run is None:
            return
        with suppress(OSError):
            for file, text in self.before.items():
                write_aside(file, text)
        if not self.before and not any(run.checkpoints.iterdir()):
            shutil.rmtree(run.path, ignore_errors=True)

    def _run_alone(self, plain: Plain) -> int:
        self.job(to_config(plain))
        return Exit.DONE

    def _print_config(
        self, composer: Composer, command: Command, words: list[Word], broken: list[str], problems: list[str]
    ) -> int:
        """References stay as they stand, unless --resolve asks for values or a stored run gives them."""
        train = self.name == "train"
        composed, run = compose_train(composer, words, broken) if train else (composer.compose(words, broken), None)
        problems += [problem for problem in composed.problems.values() if " must be given: " not in problem]
        if problems:
            raise UsageError(problems)
        if train:
            settle(composed.plain, composer.tree, self.launch, ())
        resolved = command.resolve or run is not None
        print(dump_yaml(composed.plain) if resolved else OmegaConf.to_yaml(composer.raw(words)), end="")
        return Exit.DONE

    def _sweep(self, composer: Composer, words: list[Word], broken: list[str], problems: list[str]) -> int:
        if self.name != "train":
            raise UsageError([*problems, "-m: only train.py runs sweeps"])
        if self.launch.kind != "none":
            raise UsageError([*problems, f"-m: a sweep starts its jobs itself; run it without {self.launch.name}"])
        return sweep.run(composer, words, broken, problems, self.argv)

    def _say(self, line: str) -> None:
        if self.launch.rank == 0:
            print(line, flush=True)

    def _interrupted(self) -> int:
        self._note_end(Exit.INTERRUPTED)
        if self.launch.rank == 0:
            print("interrupted by Ctrl-C", file=sys.stderr)
        return Exit.INTERRUPTED

    def _report(self, error: Exception) -> int:
        """Prints what went wrong and returns the code for whoever started this process. Wrong input found before the
        job began is the same on all ranks, and rank 0 says it."""
        code = exit_code_of(error)
        self._note_end(code, isinstance(error, AGREED))
        if isinstance(error, UsageError):
            self._take_back()
            speaks = self.launch.rank == 0 or self.launch.kind == "hand"  # whose words were typed for itself alone
            if error.problems and (speaks or self.run_folder is not None):
                rank = f"rank {self.launch.rank}: " if self.launch.rank else ""
                print(f"{rank}{helptext.problems_text(self.name, error.problems)}", file=sys.stderr)
        elif isinstance(error, ExitError):
            if self.launch.rank == 0 or not isinstance(error, AGREED):
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
        elif is_refused_by_disk(error):
            print(f"the disk refused a file: {error}{self._how_to_go_on()}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        return self._code_of_rank(code) if isinstance(error, AGREED) else code

    def _how_to_go_on(self) -> str:
        if self.name != "train" or self.run_folder is None:
            return ""
        return (
            f"; what was saved stands. When that is mended, go on with: python train.py resume={self.run_folder.path}"
        )

    def _code_of_rank(self, code: Exit) -> Exit:
        """The code of a stop that all ranks agreed on: only the process that faces the launcher returns it, since a
        launcher that sees a rank fail kills the others. torchrun would start the ranks of a preempted run again at
        once, so they exit 0 there and a wrapper reads the code from the run folder."""
        hidden = {"child": tuple(Exit), "torchrun": (Exit.REQUEUE, Exit.SIGTERM)}
        return Exit.DONE if code in hidden.get(self.launch.kind, ()) else code


def _received(shared: Mapping[str, Any]) -> Plan:
    if shared["problems"]:
        raise UsageError(shared["problems"])
    return Plan(shared["plain"], RunFolder(shared["folder"]) if shared["folder"] else None, done=shared["done"])
