"""The command `ps-data`: output and exit codes."""

import json
import re
import shlex
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.extras.data_tools.cli import app, main

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


def counted_in(*arguments: object) -> str:
    """Returns the line of `ps-data profile` that counts rows."""
    result = runner.invoke(app, ["profile", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()[0]


def test_profile_counts_rows_and_clicks(tmp_path: Path) -> None:
    generate(tmp_path)
    lines = [
        line for path in (tmp_path / "train").iterdir() for line in path.read_text().splitlines()
    ]
    clicks = sum(line.startswith("1") for line in lines)

    counted = counted_in(tmp_path / "train" / "*.tsv")

    assert counted == f"300 rows, click rate {clicks / 300:.4f}, 0 malformed rows"


def test_profile_reads_the_columns_of_a_schema_file(tmp_path: Path) -> None:
    schema, data = tmp_path / "two.toml", tmp_path / "data.tsv"
    schema.write_text('hash_version = 1\nslots = ["a", "b"]\ndense = []\n')
    data.write_text("x\ty\nz\t\nbad\n")

    assert counted_in(data, "--schema", schema) == "2 rows, no labels, 1 malformed row"


def test_generate_takes_slots_and_an_exponent(tmp_path: Path) -> None:
    options = ["--rows", "300", "--test-rows", "100", "--slots", "4", "--zipf", "1.5"]
    assert runner.invoke(app, ["generate", str(tmp_path), *options]).exit_code == 0

    schema = Schema.load(tmp_path / "schema.toml")

    lines = (tmp_path / "train" / "part-000.tsv").read_text().splitlines()
    assert len(schema.slots) == 4
    assert {line.count("\t") for line in lines} == {13 + 4}


def test_profile_prints_tables_and_writes_a_schema(tmp_path: Path) -> None:
    generate(tmp_path)
    files, out = str(tmp_path / "train" / "*.tsv"), tmp_path / "min_max.toml"

    options = ["--out", str(out), "--transform", "min_max", "--missing-indicators"]
    result = runner.invoke(app, ["profile", files, *options])

    assert result.exit_code == 0
    assert "300 rows, click rate" in result.output
    lines = {line.split(" ")[0]: line for line in result.output.splitlines()}
    assert {f"I{n}" for n in range(1, 14)} | {f"C{n}" for n in range(1, 27)} <= lines.keys()
    assert f"schema: {out} (transform min_max)" in result.output
    schema = Schema.load(out)
    assert {column.transform for column in schema.dense} == {"min_max"}
    assert schema.num_dense > 13
    assert counted_in(files, "--schema", out).startswith("300 rows")


def test_profile_takes_the_columns_of_a_schema(tmp_path: Path) -> None:
    (tmp_path / "data.tsv").write_text("1\t5\tx\ty\n")
    schema = Schema(dense=(DenseColumn(name="age"),), slots=("user", "item"))
    (tmp_path / "two.toml").write_text(schema.to_toml())
    out, data = str(tmp_path / "out.toml"), str(tmp_path / "data.tsv")

    options = ["--out", out, "--schema", str(tmp_path / "two.toml")]
    result = runner.invoke(app, ["profile", data, *options])

    assert result.exit_code == 0
    assert Schema.load(out).features == schema.features


def test_split_deals_all_rows_and_tells_how_many(tmp_path: Path) -> None:
    generate(tmp_path)
    out = tmp_path / "out"

    options = ["--out", str(out), "--ratio", "8:1:1", "--seed", "3", "--suffix", ".tsv.gz"]
    result = runner.invoke(app, ["split", str(tmp_path / "train" / "*.tsv"), *options])

    assert result.exit_code == 0
    counts = [line.split(" ")[1] for line in result.output.splitlines()]
    assert sum(map(int, counts)) == 300
    assert counted_in(out / "*" / "part-*.tsv.gz").startswith("300 rows")


@pytest.mark.parametrize("options", [[], ["--keys"]])
def test_convert_writes_parquet_that_other_commands_read(
    tmp_path: Path, options: list[str]
) -> None:
    generate(tmp_path)
    files, out = str(tmp_path / "train" / "*.tsv"), tmp_path / "parquet"

    result = runner.invoke(app, ["convert", files, "--out", str(out), *options])

    assert result.output == f"300 rows in {out}/part-*.parquet (1 file), 0 malformed rows\n"
    of_criteo = ("--schema", "criteo")
    assert counted_in(out / "*.parquet", *of_criteo) == counted_in(files, *of_criteo)
    if not options:
        of_text, of_parquet = (
            runner.invoke(app, ["profile", each, "--schema", "criteo"]).output
            for each in (files, str(out / "*.parquet"))
        )
        assert of_parquet == of_text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["profile", "absent.tsv"], 6, "error: no file matches 'absent.tsv'"),
        (["profile", "x.tsv", "--schema", "absent"], 2, "error: no schema 'absent'"),
        (["generate", "x", "--files", "9", "--rows", "8"], 2, "error: cannot distribute 8 rows"),
        (["generate", "x", "--rows", "many"], 2, "--rows"),
        (["profile", "x.tsv", "--label", "click"], 2, "--label and --ignore are for files with"),
        (
            ["profile", "x.tsv", "--out", "absent/s.toml"],
            6,
            "cannot write to 'absent/s.toml': No such",
        ),
        (["profile", "x.tsv", "--transform", "sqrt"], 2, "sqrt"),
        (
            ["split", "x.tsv", "--out", "sets", "--ratio", "9"],
            2,
            "ratio is '9', expected two or three",
        ),
        (["split", "x.tsv", "--out", "sets"], 6, "would be empty"),
        (["convert", "x.tsv", "--out", "x.tsv"], 6, "cannot write to 'x.tsv'"),
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
    Path("x.tsv").write_text("1" + "\t" * 39 + "\n")

    assert exit_code_of_main(monkeypatch, *arguments) == code

    captured = capsys.readouterr()
    assert message in captured.out + captured.err


def test_profile_of_named_columns_needs_no_schema(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows = [f"{number % 2},user {number % 7},{number / 3:.2f}" for number in range(300)]
    path.write_text("\n".join(["click,who,price", *rows]) + "\n")

    result = runner.invoke(app, ["profile", str(path), "--out", str(tmp_path / "found.toml")])

    assert result.exit_code == 0, result.output
    assert "300 rows, click rate 0.5000" in result.output
    assert "user 0 14.33%" in result.output
    for name, role in (("click", "label"), ("who", "slot"), ("price", "number")):
        assert any(line.split()[:2] == [name, role] for line in result.output.splitlines())
    schema = Schema.load(tmp_path / "found.toml")
    assert (schema.label, schema.slots) == ("click", ("who",))


def test_profile_without_a_clear_label_takes_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows = [f"{n % 2},{n % 3 % 2},user {n % 7}" for n in range(300)]
    path.write_text("\n".join(["click,label,who", *rows]) + "\n")
    out = tmp_path / "found.toml"

    result = runner.invoke(app, ["profile", str(path), "--out", str(out)])

    assert result.exit_code == 0, result.output
    assert "300 rows, no labels" in result.output
    assert "no label: the label may be 'click' or 'label': choose by --label NAME" in result.output
    assert Schema.load(out) == Schema(dense=(), slots=("who",))

    result = runner.invoke(app, ["profile", str(path), "--out", str(out), "--label", "click"])

    assert "300 rows, click rate 0.5000" in result.output
    assert Schema.load(out) == Schema(dense=(), slots=("who",), label="click")


def test_profile_of_numbers_alone_writes_no_schema(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    columns = {"price": [n / 7 for n in range(300)], "clicked": [n % 2 for n in range(300)]}
    pq.write_table(pa.table(columns), path)

    result = runner.invoke(app, ["profile", str(path)])

    assert result.exit_code == 0, result.output
    assert "300 sampled rows, no slot" in result.output
    assert ["price", "0.00%", "0"] in [line.split()[:3] for line in result.output.splitlines()]
    refused = runner.invoke(app, ["profile", str(path), "--out", str(tmp_path / "x.toml")])
    assert isinstance(refused.exception, UsageError)
    assert "no column can be a slot" in str(refused.exception)


@pytest.mark.parametrize("command", ["init", "profile"])
def test_columns_that_predict_the_label_are_named(tmp_path: Path, command: str) -> None:
    path = tmp_path / "rows.csv"
    rows = [f"{n % 2},{n % 2 * n},user {n % 7}" for n in range(300)]
    path.write_text("\n".join(["click,dwell s,who", *rows]) + "\n")
    options = ["--out", str(tmp_path / "first")] if command == "init" else []

    result = runner.invoke(app, [command, str(path), *options])

    assert result.exit_code == 0, result.output
    assert "warning: 'dwell s' predicts the label almost perfectly" in result.output
    assert "It is left out" in result.output
    if options:
        schema = (tmp_path / "first/schema.toml").read_text()
        assert '#   "dwell s": predicts the label almost perfectly' in schema
        assert schema.count("almost perfectly") == 1
        assert Schema.load(tmp_path / "first/schema.toml").features == ("who",)


def test_commands_that_init_names_for_a_test_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my rows.txt").write_text("bought,who,x\n" + "0,a,1\n1,b,2\n1,a,1\n0,b,2\n" * 100)
    options = ["--format", "csv", "--label", "bought", "--ignore", "x"]

    result = runner.invoke(app, ["init", "my rows.txt", *options])

    assert result.exit_code == 0, result.output
    assert "left out by `ignore`" in result.output
    assert "none to test on, so no AUC" in result.output
    assert result.output.endswith("next: ps-worker train job.toml\n")
    (commands,) = re.findall(r"for a test: ps-data (.*), then ps-data (.*)", result.output)
    for command in commands:
        made = runner.invoke(app, shlex.split(command))
        assert made.exit_code == 0, made.output
    assert [path.name for path in Path("sets/train").iterdir()] == ["part-00000.csv"]
    schema = Schema.load("sets/schema.toml")
    assert (schema.label, schema.features) == ("bought", ("who",))
