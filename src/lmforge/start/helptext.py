"""What the front doors say: help, problems, and the parts of it that Hydra says itself."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass

from lmforge.config.compose import Composer
from lmforge.config.errors import HINT, Exit
from lmforge.config.parse import Command, Tree


@dataclass(frozen=True)
class Help:
    """What `--help` says of a front door: how it is typed, what it does, its common words."""

    command: str
    about: str
    words: str


HELP = {
    "train": Help(
        "python train.py",
        "Trains a language model. With nothing typed: a small GPT on the standard library's sources, offline.",
        """\
  name=nano  seed=1                      name of the run's folder; start of every random stream
  trainer.max_steps=400                  length in optimizer updates (or trainer.max_epochs=2)
  trainer.devices=2                      processes or GPUs (a list picks some: 0,1)
  batch.tokens=2048                      tokens in one update, over all devices
  optimizer.lr=1e-3                      peak learning rate
  callbacks.checkpoint.every_n_steps=50  how often to save
  resume=auto | resume=FOLDER            continue a run exactly
  weights=FOLDER                         start a new run from a run's weights
  strategy=fsdp precision=bf16-mixed     how to spread the work, and in which numbers
  -m optimizer.lr=1e-3,3e-4 seed=0,1     a sweep: a run for each combination of the values
  sweep=optuna sweep.trials=20 'optimizer.lr=tag(log, interval(1e-4, 1e-2))'   a search (docs/sweeps.md)""",
    ),
    "evaluate": Help(
        "python evaluate.py",
        "Scores a trained run: loss, perplexity, bits per byte, next-token accuracy.",
        """\
  run=latest | run=FOLDER      the run (or export, with data=...) to score
  ckpt=best | last | PATH      which of its checkpoints
  split=val | test | train     on what
  data=text data.path=FILE     or on other text""",
    ),
    "generate": Help(
        "lmforge generate",
        "Continues a text with a trained run or an export.",
        """\
  run=latest | run=FOLDER      the run to speak with
  prompt=def f(a, b):          the text to continue, typed plainly (quoted for the shell)
  temperature=0 top_k=50       how to draw; also top_p, seed, stop
  max_new_tokens=128           how much""",
    ),
    "export": Help(
        "lmforge export",
        "Writes a run's weights, config and tokenizer into a folder that needs nothing else.",
        """\
  run=latest | run=FOLDER      the run to export
  ckpt=best | last | PATH      which of its checkpoints
  dtype=keep | bfloat16        the numbers its weights are stored in
  out=FOLDER                   where to; the run's own folder when not given""",
    ),
    "runs": Help(
        "lmforge runs",
        "Lists all runs with their state, metric and disk use, and deletes those no longer wanted.",
        """\
  name=default                 only the runs of this name
  sort=time | metric | disk    which come first
  delete=NAME/ID               show what would go
  delete=NAME/ID yes=true      delete it""",
    ),
    "soak": Help(
        "lmforge soak",
        "Trains over and over under injected faults, and says pass or fail.",
        """\
  hours=72                     how long faults are injected
  words='strategy=fsdp'        more words of train.py for the training
  limits.hang_seconds=300      no step for so long is a hang; also memory_mb_per_hour, handles
  report=FILE                  where the JSON goes""",
    ),
    "prepare": Help(
        "lmforge prepare",
        "Turns text into token shards, on all cores; after a kill the same words go on.",
        """\
  data=text data.path=FOLDER   a file, a folder or a glob: .txt .md .jsonl .csv .tsv (also .gz, .zst), .parquet
  data.text_key=content        the key or column that holds the text
  data.on_bad=lenient          leave rows out that cannot be read, and count them (strict: stop at the first)
  data.vocab_size=32000        size of the vocabulary to train, or data.tokenizer=FILE
  workers=8                    processes; the result is the same for any number
  paths.cache=FOLDER           where the shards go""",
    ),
}


def help_text(name: str, composer: Composer) -> str:
    """Usage, groups with their choices, and the common words. Reads file names only."""
    known, groups = HELP[name], composer.groups()
    width = max(map(len, groups))
    listed = "\n".join(f"  {group:<{width}} = {' | '.join(composer.tree.groups[group])}" for group in groups)
    return f"""\
{known.about}

Usage: {known.command} [key=value ...]

Common words
{known.words}

Groups (each is a folder of configs/, with every key explained in its file)
{listed}

Flags
  --cfg job [--resolve]   print the config and stop
  --info defaults-tree    print how it was put together
  -m                      run a sweep: several values for a word, separated by commas; resume=auto goes on with it
  -sc install=bash        tab completion: eval "$({known.command} -sc install=bash)"
  --help                  this text"""


def problems_text(name: str, problems: Sequence[str]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    listed = "\n".join(f"  {problem}" for problem in problems)
    command = HELP[name].command if name in HELP else name
    return f"{command}: {count}\n{listed}\n({command} {HINT}"


def hand_to_hydra(name: str, tree: Tree, command: Command, argv: list[str]) -> int:
    """Tab completion and --info are Hydra's own; no job runs, and nothing is written."""
    import hydra

    if command.info:
        groups = [word for word in command.words if word.partition("=")[0] in tree.groups]
        argv = [argv[0], "--info", command.info, *groups]
    before, sys.argv = sys.argv, argv
    said, completes = io.StringIO(), any(word.startswith("query=") for word in argv)
    try:
        with redirect_stdout(said) if completes else nullcontext():
            hydra.main(version_base="1.3", config_path=str(tree.folder), config_name=name)(_no_job)()
    finally:
        sys.argv = before
    if completes:
        print(*(word for word in said.getvalue().split() if "=_" not in word))  # a file that is a part of others
    return Exit.DONE


def _no_job(config: object) -> None:
    """Hydra wants a function to decorate; with --info and completion it is never called."""
