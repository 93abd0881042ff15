"""The command `ps-data`: what it prints and the codes it ends with."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ps_worker.data.cli import app, main

runner = CliRunner()


def generate(folder: Path) -> str:
    options = ["--rows", "300", "--test-rows", "100", "--files", "2", "--seed", "3"]
    result = runner.invoke(app, ["generate", str(folder), *options])
    assert result.exit_code == 0
    return result.output


def exit_code_of_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["ps-data", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    return exit_info.value.code


def test_generate_prints_the_best_auc_that_it_stores(tmp_path: Path) -> None:
    output = generate(tmp_path)

    best_auc = json.loads((tmp_path / "planted.json").read_text())["best_auc"]
    assert f"auc={best_auc:.4f}" in output


def test_check_counts_rows_and_clicks(tmp_path: Path) -> None:
    generate(tmp_path)
    lines = [
        line for path in (tmp_path / "train").iterdir() for line in path.read_text().splitlines()
    ]
    clicks = sum(line.startswith("1") for line in lines)

    result = runner.invoke(app, ["check", str(tmp_path / "train" / "*.tsv")])

    assert result.exit_code == 0
    expected = f"2 files, 300 rows, {clicks} clicks ({clicks / 300:.4f}), 0 malformed rows\n"
    assert result.output == expected


def test_check_reads_the_columns_of_a_schema_file(tmp_path: Path) -> None:
    schema, data = tmp_path / "two.toml", tmp_path / "data.tsv"
    schema.write_text('hash_version = 1\nslots = ["a", "b"]\ndense = []\n')
    data.write_text("x\ty\nz\t\nbad\n")

    result = runner.invoke(app, ["check", str(data), "--schema", str(schema)])

    assert result.output == "1 files, 2 rows, no labels, 1 malformed rows\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["check", "absent.tsv"], 6, "ps-data: no file matches 'absent.tsv'"),
        (["check", "x", "--schema", "absent"], 2, "ps-data: no schema 'absent'"),
        (["generate", "x", "--files", "9", "--rows", "8"], 2, "ps-data: cannot spread 8 rows"),
        (["generate", "x", "--rows", "many"], 2, "--rows"),
        (["--help"], 0, "generate"),
    ],
)
def test_command_ends_with_the_code_of_its_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)

    assert exit_code_of_main(monkeypatch, *arguments) == code

    captured = capsys.readouterr()
    assert message in captured.out + captured.err
