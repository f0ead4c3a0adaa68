"""What evaluate.py shows in the terminal: the headline, the hardest and easiest domains, and how sure the model is."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

ENDS = 4  # domains shown at each end
BAR = 16  # characters of the longest bar
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"


def render(result: dict[str, Any]) -> RenderableType:
    parts: list[RenderableType] = [_headline(result)]
    if "domains" in result:
        parts += ["", *_domains(result["domains"])]
    if "calibration" in result:
        parts += ["", *_calibration(result)]
    return Group(*parts)


def _headline(result: dict[str, Any]) -> Table:
    table = _table()
    if "bits_per_byte" in result:
        table.add_row("bits per byte", f"[bold]{result['bits_per_byte']:.4f}[/]{_references(result)}")
    if "loss" in result:
        table.add_row("loss", f"{result['loss']:.4f} nats a token, perplexity {result['perplexity']:.2f}")
        table.add_row("accuracy", f"{result['accuracy']:.2%} of next tokens")
    table.add_row("scored", _scored(result))
    table.add_row("with", f"context {result['context']}, stride {result['stride']}, {result['precision']}")
    table.add_row("weights", f"{escape(result['checkpoint'])} (step {result['step']}, {result['hash']})")
    return table


def _references(result: dict[str, Any]) -> str:
    gzip, xz = result["gzip_bits_per_byte"], result["xz_bits_per_byte"]
    return "" if gzip is None or xz is None else f"  [dim](the same files: gzip -9 {gzip:.3f}, xz -9 {xz:.3f})[/]"


def _scored(result: dict[str, Any]) -> str:
    whole = result["limit_batches"] is None
    what = f"{result['documents']} documents" if whole else f"the first {result['limit_batches']} batches"
    return f"{result['targets']:,} targets of {what} of {result['split']}, {result['data']}"


def _domains(domains: dict[str, dict[str, Any]]) -> Iterator[RenderableType]:
    """Both ends of the order, hardest first; all of them when they are few."""
    key, title = (
        ("bits_per_byte", "bits per byte") if "bits_per_byte" in next(iter(domains.values())) else ("loss",) * 2
    )
    names = list(domains)
    left_out = len(names) - 2 * ENDS
    shown = [*names[:ENDS], *names[-ENDS:]] if left_out > 0 else names
    longest = max(row[key] for row in domains.values())
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading, justify in (
        ("domain", "left"),
        (title, "right"),
        ("", "left"),
        ("accuracy", "right"),
        ("targets", "right"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for number, name in enumerate(shown):
        row = domains[name]
        bar = Text(_bar(row[key] / longest), style="red" if number < len(shown) / 2 else "green")
        table.add_row(Text(name), f"{row[key]:.4f}", bar, f"{row['accuracy']:.1%}", f"{row['targets']:,}")
        if left_out > 0 and number == ENDS - 1:
            table.add_row(f"[dim]... {left_out} more[/]")
    yield f"  [bold]{len(names)} domains[/], the hardest first" if len(names) > 1 else "  [bold]1 domain[/]"
    yield table


def _calibration(result: dict[str, Any]) -> Iterator[RenderableType]:
    calibration = result["calibration"]
    gap = 100 * (calibration["confidence"] - calibration["accuracy"])
    verdict = f"{abs(gap):.1f} points too {'sure' if gap > 0 else 'careful'} on average"
    yield f"  [bold]calibration[/]  expected error (ECE) [bold]{result['ece']:.4f}[/], {verdict}"
    bins = calibration["bins"]
    most = max(entry["targets"] for entry in bins)
    table = _table()
    table.add_row("confidence", _levels([entry["confidence"] for entry in bins]), "from not sure to sure")
    table.add_row(
        "was right", _levels([entry["accuracy"] for entry in bins]), "as high as the line above when calibrated"
    )
    table.add_row("targets", _levels([entry["targets"] / most for entry in bins]), "how many there are of each")
    yield table


def _bar(share: float) -> str:
    """A bar of up to BAR characters in steps of an eighth."""
    whole, part = divmod(round(share * BAR * 8), 8)
    return "█" * whole + _EIGHTHS[part].strip()


def _levels(shares: Sequence[float]) -> str:
    return "".join(_LEVELS[min(7, int(share * 8))] for share in shares)


def _table() -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    return table
