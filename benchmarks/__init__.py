"""Side-by-side speed: one table, and the same numbers in reports/bench.json. `python -m benchmarks --help`."""
