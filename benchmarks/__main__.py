"""Run the rows and print the table.

python -m benchmarks                      all rows, about ten minutes of CPU time
python -m benchmarks --rows training      some rows
python -m benchmarks --quick              all rows shrunk to under a minute: does everything still run?
"""

import argparse
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import machine, report
from benchmarks.rows import NAMES
from benchmarks.settings import Settings


def main() -> int:
    asked = _arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    facts = machine.describe()
    facts["roofline"] = machine.roofline(seconds=0.05 if asked.quick else 0.4)
    print(f"{machine.head(facts)}\n")
    print("\n".join(report.lines([])))
    rows: list[report.Row] = []
    with tempfile.TemporaryDirectory(prefix="lmforge-bench-", ignore_cleanup_errors=True) as folder:
        for name in asked.rows:
            found = _run(name, Settings(asked.quick, Path(folder)))
            print("\n".join(report.lines(found)[1:]), flush=True)
            rows += found
    facts["load_after"] = round(os.getloadavg()[0], 2)
    print(f"\n{machine.load(facts)}")
    report.write(asked.out, facts, rows)
    print(f"written to {asked.out}")
    return int(any(row.verdict == report.BROKEN for row in rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Speed, side by side.")
    parser.add_argument("--quick", action="store_true", help="shrink every row: a check that all of it runs")
    parser.add_argument("--rows", type=_names, default=NAMES, help=f"comma-separated, of {', '.join(NAMES)}")
    parser.add_argument("--out", type=Path, default=Path("reports/bench.json"), help="where the JSON goes")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(NAMES):
        raise argparse.ArgumentTypeError(f"no row {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    return names


def _run(name: str, settings: Settings) -> list[report.Row]:
    """The rows of one module. One that breaks is said in its place, and the others still run."""
    began = time.monotonic()
    try:
        return importlib.import_module(f"benchmarks.rows.{name}").rows(settings)
    except Exception as error:
        print(f"{name} broke after {time.monotonic() - began:.0f} s: {error}", file=sys.stderr)
        return [report.Row(name, "", f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}", report.BROKEN)]


if __name__ == "__main__":
    sys.exit(main())
