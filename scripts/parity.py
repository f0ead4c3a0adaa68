"""`make parity`: every strategy beside one process, on real ranks of this machine; a table and reports/parity.json.

Twenty updates at the same global batch, in 64-bit numbers (DeepSpeed in 32). A row fails when its loss or gradient norm
leaves the one process's by more than the row allows. Bytes are what a rank hands to collectives in one update, in and
out of the backward pass: the sum that is reduced, the whole that is gathered or scattered, the message that is sent.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jobs import train_on
from rich.console import Console
from rich.table import Table

from lmforge.data.shards import write_shards
from lmforge.tasks.update import UpdateTask
from tiny import compose, metrics, new_run, train

ROOT = Path(__file__).resolve().parents[1]
COMMON = [
    *("batch.sequences=8", "batch.micro_sequences=2", "trainer.max_steps=20"),
    *("trainer.val_every_n_steps=null", "model.n_layer=4", "model.n_head=4", "model.n_kv_head=2"),
    *("model.tied=true", "model.d_model=64", "model.d_ff=128"),
]
PROFILED = 5  # the update whose messages are counted
TIGHT = 1e-9


@dataclass(frozen=True)
class Case:
    word: str
    world: int
    words: str = ""
    tolerance: float | None = TIGHT  # None: lossy by design, its loss is shown only
    needs: str | None = None  # a package that may not be there
    bits: int = 64


CASES = [
    Case("ddp", 2),
    Case("fsdp", 2),
    Case("shard_grad_op", 2),
    Case("hsdp", 4, "strategy.shard=2"),
    Case("tensor", 2),
    Case("tensor", 4),
    Case("context", 2),
    Case("pipeline", 2),
    Case("pipeline", 2, "strategy.virtual_stages=2"),
    Case("3d", 8, "batch.micro_sequences=1"),
    Case("local_sgd", 2, "strategy.sync_every=1"),
    Case("ddp_bf16", 2, tolerance=None),
    Case("ddp_fp16", 2, tolerance=None),
    Case("ddp_powersgd", 2, "strategy.start_step=0", tolerance=None),
    Case("deepspeed", 2, tolerance=1e-4, needs="deepspeed", bits=32),
]


@dataclass(frozen=True)
class Result:
    word: str
    layout: str
    ranks: int
    loss: float  # largest relative difference from one process
    gradient_norm: float
    tolerance: float | None
    parameters: int  # that the rank with the most of them holds
    share: float  # of all
    bytes: int  # of the rank that hands over most

    @property
    def passed(self) -> bool:
        return self.tolerance is None or max(self.loss, self.gradient_norm) <= self.tolerance


def note_values(folder: str) -> None:
    """Runs on a rank: profile one update and leave in a file how many values it handed over."""
    step = UpdateTask.training_step

    def profiled(task: UpdateTask, window: Any, batch_index: int) -> None:
        watching = task.global_step + 1 == PROFILED
        with torch.profiler.profile(record_shapes=True) if watching else nullcontext() as profile:
            step(task, window, batch_index)
        if profile is not None:
            values = sum(map(handed_over, profile.events() or ()))
            Path(folder, f"values-{task.global_rank}").write_text(str(values))

    UpdateTask.training_step = profiled  # type: ignore[method-assign, assignment]


def handed_over(event: Any) -> int:
    """Values of one collective. gloo scatters by reducing the whole, so its event of that name stands for both."""
    if event.name not in ("c10d::_allgather_base_", "gloo:all_reduce", "gloo:send"):
        return 0
    return max((int(np.prod(shape)) for shape in event.input_shapes if shape), default=0)


@dataclass(frozen=True)
class Note:
    """`note_values` with its folder, as something that reaches the ranks."""

    folder: str

    def __call__(self) -> None:
        note_values(self.folder)


def run(case: Case, shards: Path, expected: list[tuple[float, ...]]) -> Result:
    words = (f"strategy={case.word}", f"trainer.devices={case.world}", f"precision={case.bits}-true")
    plain = compose(shards, *COMMON, *words, *case.words.split())
    folder = new_run(plain).path
    facts = train_on(case.world, plain, folder, Note(str(folder)))
    rows = metrics(folder, "train/loss", "train/grad_norm")
    assert [row[0] for row in rows] == [row[0] for row in expected], "a step is missing or stands twice"
    loss, norm = (max(abs(a[i] / b[i] - 1.0) for a, b in zip(rows, expected, strict=True)) for i in (1, 2))
    held = max(sum(mine for mine, _ in rank["parameters"].values()) for rank in facts)
    values = max(int(file.read_text()) for file in folder.glob("values-*"))
    sent = facts[0]["summary"].get("comm_bytes_per_step") or values * case.bits // 8
    layout = ", ".join([str(facts[0]["plan"]), *case.words.split()])
    return Result(case.word, layout, case.world, loss, norm, case.tolerance, held, held / facts[0]["whole"], sent)


def table(results: list[Result]) -> Table:
    title = "20 updates beside one process, the same global batch; largest relative difference"
    made = Table(title=title, title_justify="left")
    for name in ("strategy", "layout", "ranks", "loss", "gradient", "weights a rank", "bytes a step", ""):
        made.add_column(name, justify="left" if name in ("strategy", "layout", "") else "right")
    for r in results:
        verdict = ("[green]equal[/]" if r.tolerance else "lossy") if r.passed else "[red]FAILS[/]"
        held = f"{r.parameters / 1e3:.1f}k ({r.share:.0%})"
        numbers = (f"{r.loss:.1e}", f"{r.gradient_norm:.1e}", held, f"{r.bytes / 1e6:.2f} MB")
        made.add_row(r.word, r.layout, str(r.ranks), *numbers, verdict)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="strategies; all when none is given")
    words = parser.parse_args().words
    if unknown := sorted(set(words) - {case.word for case in CASES}):
        parser.error(f"{', '.join(unknown)}: no row; rows: {', '.join(dict.fromkeys(case.word for case in CASES))}")
    report = ROOT / "reports" / "parity.json"
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        shards, console = text(Path(scratch)), Console(stderr=True)
        expected = {bits: alone(shards, bits) for bits in (64, 32)}
        for case in CASES:
            if words and case.word not in words:
                continue
            if case.needs and find_spec(case.needs) is None:
                console.print(f"{case.word}: left out, the package {case.needs} is not installed")
                continue
            console.print(f"{case.word} {case.words} on {case.world} ranks")
            with quiet():
                results.append(run(case, shards, expected[case.bits]))
    report.parent.mkdir(exist_ok=True)
    report.write_text(json.dumps([asdict(r) | {"passed": r.passed} for r in results], indent=1) + "\n")
    Console(width=None if sys.stdout.isatty() else 130).print(table(results))
    print(f"as JSON in {report}")
    return int(not all(r.passed for r in results))


def text(folder: Path) -> Path:
    """Shards of random documents of many lengths."""
    numbers = np.random.default_rng(0)
    documents = [numbers.integers(2, 60, size=int(length)) for length in numbers.integers(5, 60, size=120)]
    return write_shards(folder / "shards", {"train": documents[:100], "val": documents[100:]}, vocab_size=60)


def alone(shards: Path, bits: int) -> list[tuple[float, ...]]:
    plain = compose(shards, *COMMON, f"precision={bits}-true")
    folder = new_run(plain).path
    with quiet():
        train(plain, folder)
    return metrics(folder, "train/loss", "train/grad_norm")


@contextmanager
def quiet() -> Iterator[None]:
    """The runs' own words go nowhere, those of their processes too."""
    kept = [os.dup(number) for number in (1, 2)]
    with open(os.devnull, "w") as nowhere:
        for number in (1, 2):
            os.dup2(nowhere.fileno(), number)
        try:
            yield
        finally:
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)


if __name__ == "__main__":
    sys.exit(main())
