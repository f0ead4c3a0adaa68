"""`metrics.csv`: one row a step, one header, also when a metric first appears late or the run is resumed."""

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lmforge.runs.rows import read_rows, write_rows


class CSVLog(Logger):
    """Rows of `step,<metric>,...`, numbers in full precision, empty where a metric was not measured.

    Rank 0 writes; values logged for the same step join its row.
    """

    def __init__(self, folder: str | Path):
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        self.header: list[str] = []
        self.row: dict[str, str] = {}
        self.last: dict[str, str] = {}  # the row written last, which more values of its step still join

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return self.path.parent.name

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The resolved config already lies beside the file as `config.yaml`."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.row and self.row["step"] != str(step):
            self._flush()
        self.row |= {"step": str(step)} | {name: repr(float(value)) for name, value in metrics.items()}

    @rank_zero_only
    def save(self) -> None:
        self._flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._flush()

    def _flush(self) -> None:
        if not self.row:
            return
        rows: list[dict[str, str]] | None = None
        if not self.header and self.path.exists():
            rows = read_rows(self.path)
            self.header, self.last = (list(rows[0]), rows[-1]) if rows else ([], {})
        row, self.row = self.row, {}
        again = self.last.get("step") == row["step"]
        if again:
            row = {name: value for name, value in self.last.items() if value} | row
        new = [name for name in row if name not in self.header]
        self.last = row
        if again or new or rows is not None:  # an older file may end in a torn line
            self.header += new
            rows = read_rows(self.path) if rows is None else rows
            write_rows(self.path, self.header, [*(rows[:-1] if again else rows), row])
            return
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.header, restval="", lineterminator="\n").writerow(row)
