"""metrics.csv: one header, rows of equal length, each step once."""

import csv
from pathlib import Path

import pytest

from lmforge.runs.rows import cut_rows, read_rows
from lmforge.training.csvlog import CSVLog


def write(folder: Path, *rows: tuple[int, dict[str, float]], flush_each: bool = False) -> Path:
    log = CSVLog(folder)
    for step, values in rows:
        log.log_metrics(values, step=step)
        if flush_each:
            log.save()
    log.finalize("success")
    return folder / "metrics.csv"


def table(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_rows_of_four_epochs_with_a_metric_from_the_third_on(tmp_path) -> None:
    write(tmp_path, (1, {"loss": 4.0}), (2, {"loss": 3.0}))
    path = write(tmp_path, (3, {"loss": 2.0, "late": 0.5}), (4, {"loss": 1.0, "late": 0.25}))
    assert table(path) == [
        ["step", "loss", "late"],
        ["1", "4.0", ""],
        ["2", "3.0", ""],
        ["3", "2.0", "0.5"],
        ["4", "1.0", "0.25"],
    ]


@pytest.mark.parametrize("flush_each", [False, True])
def test_values_of_one_step_join_its_row(tmp_path, flush_each) -> None:
    rows = ((1, {"a": 1.0}), (1, {"b": 2.0}), (2, {"a": 3.0}), (2, {"b": 4.0}), (2, {"c": 5.0}))
    path = write(tmp_path, *rows, flush_each=flush_each)
    assert table(path) == [["step", "a", "b", "c"], ["1", "1.0", "2.0", ""], ["2", "3.0", "4.0", "5.0"]]


def test_a_new_process_joins_the_row_of_the_step_it_goes_on_from(tmp_path) -> None:
    write(tmp_path, (1, {"a": 1.0}), (2, {"a": 2.0}))
    path = write(tmp_path, (2, {"b": 3.0}), (3, {"a": 4.0}))
    assert table(path) == [["step", "a", "b"], ["1", "1.0", ""], ["2", "2.0", "3.0"], ["3", "4.0", ""]]


def test_numbers_keep_every_digit(tmp_path) -> None:
    values = [0.1 + 0.2, 1e-300, 2.0**53 + 1, float("nan"), float("inf")]
    path = write(tmp_path, *((step, {"x": value}) for step, value in enumerate(values)))
    assert [repr(float(row["x"])) for row in read_rows(path)] == [repr(value) for value in values]


@pytest.mark.parametrize("torn", ["3,2.", "3", '3,"2', "3,2.0,1"])
def test_a_torn_last_line_is_left_out_and_does_not_spoil_the_next(tmp_path, torn) -> None:
    path = write(tmp_path, (1, {"a": 1.0, "b": 1.0}), (2, {"a": 2.0, "b": 1.0}))
    with path.open("a") as file:
        file.write(torn)
    assert [row["step"] for row in read_rows(path)] == ["1", "2"]
    write(tmp_path, (3, {"a": 9.0, "b": 1.0}))
    assert table(path)[-2:] == [["2", "2.0", "1.0"], ["3", "9.0", "1.0"]]


def test_cutting_drops_what_came_after_a_step(tmp_path) -> None:
    path = write(tmp_path, (1, {"a": 1.0}), (2, {"a": 2.0}), (3, {"a": 3.0, "b": 1.0}))
    cut_rows(path, 2)
    assert table(path) == [["step", "a", "b"], ["1", "1.0", ""], ["2", "2.0", ""]]
    write(tmp_path, (3, {"a": 9.0}))
    assert table(path)[-1] == ["3", "9.0", ""]


def test_cutting_everything_leaves_a_log_that_goes_on(tmp_path) -> None:
    path = write(tmp_path, (5, {"a": 1.0}))
    cut_rows(path, 0)
    assert read_rows(path) == []
    write(tmp_path, (1, {"b": 2.0}))
    assert table(path) == [["step", "b"], ["1", "2.0"]]


def test_no_file_is_no_rows_and_nothing_to_cut(tmp_path) -> None:
    cut_rows(tmp_path / "metrics.csv", 3)
    assert read_rows(tmp_path / "metrics.csv") == []
    assert not (tmp_path / "metrics.csv").exists()
