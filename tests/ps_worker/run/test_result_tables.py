"""Results for people: figures in lines, lists of them in tables."""

import io
from dataclasses import replace

from rich.console import Console

from ctr_ps.ps_worker.run.result_tables import result_tables
from ctr_ps.ps_worker.run.training_job.train_job import Summary

SUMMARY = Summary(
    auc=0.7421,
    log_loss=0.4417123,
    examples=1_234_567,
    examples_per_s=81_234.5,
    staleness={"mean": 1.25, "largest": 4},
    tables={
        "embedding": {"rows": 120_000, "size_bytes": 9_000_000},
        "[wide]": {"rows": 7, "size_bytes": 80},
    },
    checkpoint="output/model/epoch-2",
    passes=[
        {"epoch": 1, "log_loss": 0.5, "auc": None},
        {"epoch": 2, "log_loss": 0.45, "auc": 0.71},
    ],
)


def lines_of(summary: Summary) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    console.print(result_tables(summary.as_json()))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def cells_of(summary: Summary) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines_of(summary)
    ]


def test_figures_are_lines_of_name_and_value() -> None:
    cells = cells_of(SUMMARY)

    assert ["auc", "0.7421"] in cells
    assert ["log loss", "0.44171"] in cells
    assert ["examples", "1,234,567"] in cells
    assert ["examples/s", "81,234"] in cells
    assert ["staleness", "mean 1.25, largest 4"] in cells
    assert ["checkpoint", "output/model/epoch-2"] in cells
    assert ["stopped early", "no"] in cells


def test_lists_of_figures_are_tables() -> None:
    lines, cells = lines_of(SUMMARY), cells_of(SUMMARY)

    tables = lines.index("tables")
    assert cells[tables + 1 : tables + 4] == [
        ["rows", "size bytes"],
        ["embedding", "120,000", "9,000,000"],
        ["[wide]", "7", "80"],
    ]
    passes = lines.index("passes")
    assert cells[passes + 1 : passes + 4] == [
        ["epoch", "log loss", "auc"],
        ["1", "0.5", "-"],
        ["2", "0.45", "0.71"],
    ]


def test_values_of_data_say_nothing_to_a_terminal() -> None:
    tables = {"\x1b[2J\u202e": {"rows": 1}}

    cells = cells_of(replace(SUMMARY, tables=tables))

    assert [r"\x1b[2J\u202e", "1"] in cells


def test_what_is_empty_is_left_out() -> None:
    text = "\n".join(lines_of(replace(SUMMARY, auc=None, passes=(), tables=None, staleness={})))

    for name in ("auc", "passes", "tables", "staleness", "accuracy", "validations", "None", "{"):
        assert name not in text


def test_figures_by_slot_value_are_one_table() -> None:
    values = {"key": "18446744073709551615", "examples": 12, "auc": 0.75}
    sliced = replace(SUMMARY, slices={"site": [values, {**values, "key": "7"}], "device": [values]})

    lines, cells = lines_of(sliced), cells_of(sliced)

    start = lines.index("slices")
    assert cells[start + 1 : start + 5] == [
        ["key", "examples", "auc"],
        ["site", "18446744073709551615", "12", "0.75"],
        ["site", "7", "12", "0.75"],
        ["device", "18446744073709551615", "12", "0.75"],
    ]
