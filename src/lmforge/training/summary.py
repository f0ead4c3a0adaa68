"""What a run amounted to: `summary.json` for programs and a table for people."""

import math
import shlex
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import SimpleProfiler
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lmforge.data.module import TokenWindows
from lmforge.runs.folder import RunFolder, list_checkpoints
from lmforge.tasks.update import UpdateTask
from lmforge.training.checkpoint import write_json
from lmforge.training.early_stopping import EarlyStop
from lmforge.training.matmul_share import MatmulShare
from lmforge.training.progress import clock, human
from lmforge.training.resources import cpu_seconds, peak_memory_bytes
from lmforge.training.samples import Samples
from lmforge.training.throughput import Throughput


def summarise(trainer: pl.Trainer, task: UpdateTask, data: TokenWindows, reason: str) -> dict[str, Any]:
    """The numbers of a finished run by their stable names; None where a number is not known."""
    speed = _callback(trainer, Throughput)
    used = speed.resources if speed else None
    if (early := _callback(trainer, EarlyStop)) and early.stopped:
        reason = "early_stopping"
    flops = task.network.flops_per_token(data.context)  # type: ignore[operator]
    finite = {name: value for name, value in task.latest.items() if math.isfinite(value)}
    warnings = speed.warnings(trainer) if speed else []
    matmuls = _callback(trainer, MatmulShare)
    warnings += [matmuls.warning] if matmuls.warning else []
    if lost := sorted(set(task.latest) - set(finite)):
        warnings.append(f"not finite in the last validation: {', '.join(lost)}")
    return {
        **{f"val/{name}": finite.get(f"val/{name}") for name in ("bits_per_byte", "loss", "perplexity", "accuracy")},
        **{name: value for name, value in finite.items() if name.count("/") == 2},  # of each source of a mixture
        "gzip_bits_per_byte": data.manifest.get("gzip_bits_per_byte"),
        "xz_bits_per_byte": data.manifest.get("xz_bits_per_byte"),
        "steps": trainer.global_step,
        "epochs": data.epochs(trainer.global_step),
        **data.by_source(trainer.global_step),
        "tokens": task.tokens,
        "skipped": task.skipped,
        "parameters": task.parameter_count,
        "tokens_per_second": speed.tokens_per_second if speed else None,
        "mfu": speed.utilisation(flops) if speed else None,
        "data_wait_share": speed.data_wait_share if speed else None,
        "matmul_dtype_share": matmuls.share,
        "peak_memory_bytes": used.memory if used else peak_memory_bytes(trainer.strategy.root_device),
        "cpu_seconds": used.cpu_now() if used else cpu_seconds(),
        "context": data.context,
        "stride": data.stride,
        "reason": reason,
        "early_stopping_waited": early.waited if early and early.patience is not None else None,
        "warnings": warnings,
    }


def finish(trainer: pl.Trainer, summary: dict[str, Any], run: RunFolder) -> None:
    """Write `summary.json` and print the table; rank 0 only."""
    write_json(run.summary_file, summary)
    samples = _callback(trainer, Samples)
    console = Console(highlight=False, width=None)
    console.print(_table(summary))
    if samples is not None and samples.text:
        console.print(Panel(Text(samples.text), title="a sample", title_align="left", border_style="dim"))
    for warning in summary["warnings"]:
        console.print(f"[yellow]warning:[/] {escape(warning)}")
    console.print(f"run folder  {run.path}", soft_wrap=True, markup=False)
    for profile in sorted(run.path.glob("*-profile*.txt")) if isinstance(trainer.profiler, SimpleProfiler) else ():  # type: ignore[attr-defined]
        console.print(f"profile     {profile}", soft_wrap=True, markup=False)
    for newest in list_checkpoints(run.checkpoints)[-1:]:
        console.print(f"checkpoint  {newest}\n", soft_wrap=True, markup=False)
    console.print("next")
    for command, what in next_commands(run.path):
        console.print(f"  {escape(command)}   [dim]# {what}[/]", soft_wrap=True)


def next_commands(folder: Path) -> list[tuple[str, str]]:
    run = shlex.quote(str(folder))
    return [
        (f"python evaluate.py run={run}", "score the best checkpoint"),
        (f"lmforge generate run={run} prompt='import '", "let it write"),
        (
            "python train.py strategy=fsdp precision=bf16-mixed trainer.devices=2",
            "sharded over two processes; add your own words",
        ),
        ("python train.py --help", "everything that can be changed"),
    ]


def _table(summary: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2))
    ours, gzip, xz = (summary[key] for key in ("val/bits_per_byte", "gzip_bits_per_byte", "xz_bits_per_byte"))
    if ours is not None:
        table.add_row("bits per byte on unseen files", f"[bold]{ours:.3f}[/]{_against(ours, xz)}")
        table.add_row("  scored with", f"context {summary['context']}, stride {summary['stride']}")
    if gzip is not None and xz is not None:
        table.add_row("  gzip -9, xz -9 on the same files", f"{gzip:.3f}, {xz:.3f}")
    if summary["val/loss"] is not None:
        loss, perplexity, accuracy = (summary[f"val/{name}"] for name in ("loss", "perplexity", "accuracy"))
        table.add_row("loss, perplexity, accuracy", f"{loss:.4f}, {perplexity:.2f}, {accuracy:.1%}")
    table.add_row("steps, tokens", f"{summary['steps']}, {human(summary['tokens'])} (ended by {summary['reason']})")
    for name, share in _shares(summary).items():
        table.add_row(f"  of which {name}", f"{share:.2%}, read {summary[f'data/{name}/epochs']:.2f} times")
    if summary["skipped"]:
        table.add_row("updates skipped, not finite", str(summary["skipped"]))
    speed, mfu, wait = (summary[key] for key in ("tokens_per_second", "mfu", "data_wait_share"))
    table.add_row("tokens per second", human(speed) if speed else "n/a")
    table.add_row("model FLOPs utilisation", f"{mfu:.1%}" if mfu else "n/a")
    table.add_row("waiting for data", f"{wait:.2%}" if wait is not None else "n/a")
    table.add_row("peak memory", f"{summary['peak_memory_bytes'] / 2**20:.0f} MiB")
    table.add_row("CPU time", clock(summary["cpu_seconds"]))
    return table


def _shares(summary: dict[str, Any]) -> dict[str, float]:
    """The share of the tokens that each source of a mixture has given."""
    return {key.split("/")[1]: value for key, value in summary.items() if key.endswith("/share")}


def _against(ours: float, xz: float | None) -> str:
    if xz is None:
        return ""
    share = 1 - ours / xz
    return f"  ({share:.1%} below xz)" if share > 0 else f"  ({-share:.1%} above xz)"


def _callback(trainer: pl.Trainer, kind: type) -> Any:
    return next((callback for callback in trainer.callbacks if isinstance(callback, kind)), None)  # type: ignore[attr-defined]
