"""`ps-data`: generates, profiles, splits and converts click logs; writes a first job for them.

ps-data generate data/planted --rows 400000 --test-rows 40000 --files 4 --seed 1
ps-data profile 'data/planted/train/*.tsv' --out data/planted/log1p.toml --transform log1p
ps-data init 'clicks/*.parquet' --label is_click --ignore session_id
ps-data split 'data/planted/train/*.tsv' --out data/split --ratio 9:1 --seed 1
ps-data convert 'data/planted/train/*.tsv' --out data/planted/parquet
"""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ctr_ps.ctr_model.schema import Schema, SchemaError, Transform
from ctr_ps.protos.errors import UsageError, counted
from ctr_ps.protos.runtime.environment import arguments
from ctr_ps.protos.runtime.logs import configure_logs, errors_as_exit_codes, printable
from ctr_ps.protos.runtime.options import command_app
from ctr_ps.ps_worker.data.columns import without_label
from ctr_ps.ps_worker.data.files.content import errors_of_writing, write_text
from ctr_ps.ps_worker.data.files.listing import matching_files, natural_order
from ctr_ps.ps_worker.data.formats import guessed_format, has_named_columns
from ctr_ps.ps_worker.extras.data_tools.convert import convert
from ctr_ps.ps_worker.extras.data_tools.first_job import write_first_job
from ctr_ps.ps_worker.extras.data_tools.generate import (
    MIN_TEST_ROWS,
    NUM_SLOTS,
    ZIPF_EXPONENT,
    generate,
)
from ctr_ps.ps_worker.extras.data_tools.labels import LEAK
from ctr_ps.ps_worker.extras.data_tools.profile import (
    add_row,
    number_table,
    plain_table,
    profile_files,
    profile_table,
    schema_of,
)
from ctr_ps.ps_worker.extras.data_tools.roles import Proposal, propose
from ctr_ps.ps_worker.extras.data_tools.row_split import (
    ROWS_PER_FILE,
    Condition,
    parse_ratio,
    split_rows,
)
from ctr_ps.ps_worker.extras.data_tools.samples import sample_of
from ctr_ps.ps_worker.run.result_tables import output_console

Patterns = Annotated[
    list[str], typer.Argument(help="Files, or patterns with *, ? and ** in quotes.")
]
SchemaName = Annotated[
    str,
    typer.Option("--schema", help="Schema of the columns: 'criteo', or the path of a schema file."),
]
FormatName = Annotated[
    str, typer.Option("--format", help="Format of the files; empty: determined by the suffix.")
]
LabelName = Annotated[
    str,
    typer.Option(
        "--label",
        help="Column with the label, 0 or 1; empty: a column with a usual name, such as click.",
    ),
]
IgnoredNames = Annotated[
    list[str] | None,
    typer.Option("--ignore", help="Columns to leave out, separated by commas; repeatable."),
]
BadRowLimit = Annotated[
    int, typer.Option("--bad-row-limit", min=0, help="Malformed rows to skip before failing.")
]

app = command_app("Generate, profile, split and convert click logs; write a first job for them.")


@app.command("generate")
def generate_command(
    folder: Annotated[Path, typer.Argument(help="Output folder, created if it does not exist.")],
    rows: Annotated[int, typer.Option(min=1, help="Training rows.")] = 400_000,
    test_rows: Annotated[int, typer.Option(min=MIN_TEST_ROWS, help="Test rows.")] = 40_000,
    files: Annotated[int, typer.Option(min=1, help="Files of training rows.")] = 4,
    test_files: Annotated[int, typer.Option(min=1, help="Files of test rows.")] = 2,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the generating model and the rows.")
    ] = 1,
    slots: Annotated[
        int, typer.Option(min=1, help="Number of slots, with 4 to 4,000 values each.")
    ] = NUM_SLOTS,
    zipf: Annotated[
        float, typer.Option(min=0.0, help="Exponent of the Zipf distribution of values.")
    ] = ZIPF_EXPONENT,
) -> None:
    """Generate click logs from a known model, and print the best possible AUC.

    Writes train/part-*.tsv, test/part-*.tsv, schema.toml with the columns, and planted.json with the best
    AUC and log loss to FOLDER. The output is deterministic and replaces that of an earlier call.
    """
    report = generate(
        folder,
        rows=rows,
        test_rows=test_rows,
        files=files,
        test_files=test_files,
        seed=seed,
        num_slots=slots,
        zipf_exponent=zipf,
    )
    typer.echo(
        f"train: {counted(rows, 'row')} in {folder}/train/part-*.tsv ({counted(files, 'file')})"
    )
    typer.echo(
        f"test: {counted(test_rows, 'row')} in {folder}/test/part-*.tsv ({counted(test_files, 'file')})"
    )
    typer.echo(
        f"best possible on the test rows: auc={report.best_auc:.4f} "
        f"logloss={report.best_log_loss:.4f} (click rate {report.click_rate:.4f})"
    )


@app.command("profile")
def profile_command(
    patterns: Patterns,
    schema: SchemaName = "",
    out: Annotated[Path | None, typer.Option(help="Schema file to write, with scaling.")] = None,
    transform: Annotated[
        Transform,
        typer.Option(
            help="Scaling: standardised logarithms (log1p) or numbers (none), minimum to 95th percentile "
            "(min_max), rank among 21 percentiles (quantile)."
        ),
    ] = "log1p",
    missing_indicators: Annotated[
        bool, typer.Option(help="Add an indicator for each column with missing numbers.")
    ] = False,
    label: LabelName = "",
    ignore: IgnoredNames = None,
    format_name: FormatName = "",
    bad_row_limit: BadRowLimit = 1000,
) -> None:
    """Print statistics of the columns of click logs, and write a schema that scales them.

    Reads the files once, in bounded memory; estimates are marked and have their error.
    """
    console = output_console(highlight=True)
    files, proposal = matching_files(patterns), None
    format_name = format_name or guessed_format(files[0]) or ""
    if not schema and all(has_named_columns(path, format_name or None) for path in files):
        sample = sample_of(files, format_name or None)
        proposal = propose(sample, label=label, ignore=_names(ignore), needs_label=False)
        if not proposal.slots and out is None:  # nor a schema to read all rows with
            console.print(f"{counted(sample.num_rows, 'sampled row', ',')}, no slot")
            console.print(number_table([number.profile for number in proposal.numbers]))
            _print_proposal(console, proposal)
            return
        names = proposal.schema()
    elif label or ignore:
        raise UsageError(
            "--label and --ignore are for files with names of columns and no --schema: with one, change its "
            "columns"
        )
    else:
        names = _schema(schema or "criteo")
    read = names if proposal is None or proposal.label is not None else without_label(names)
    profile = profile_files(files, read, format=format_name or None, bad_row_limit=bad_row_limit)
    console.print(profile_table(profile))
    if proposal is not None:
        _print_proposal(console, proposal)
    if out is None:
        return
    found = schema_of(
        replace(profile, schema=names), transform, missing_indicators=missing_indicators
    )
    content = found.to_toml()
    with errors_of_writing(out):
        write_text(out, content)
    typer.echo(f"schema: {out} (transform {transform})")


@app.command("init")
def init_command(
    patterns: Patterns,
    label: LabelName = "",
    ignore: IgnoredNames = None,
    slots: Annotated[
        list[str] | None,
        typer.Option("--slots", help="Columns to take as slots, as 'feat_*'; as --ignore."),
    ] = None,
    numbers: Annotated[
        list[str] | None, typer.Option("--numbers", help="Columns to take as numbers; likewise.")
    ] = None,
    test: Annotated[
        list[str] | None,
        typer.Option(help="Files to evaluate on; repeatable; default: the last of several files."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of schema.toml, job.toml and, later, the model.")
    ] = Path(),
    format_name: FormatName = "",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace both files if they exist.")
    ] = False,
) -> None:
    """Write a schema and a first job for files with column names: Parquet, JSON lines, CSV with a header.

    Samples up to 200,000 rows. Comments in both files explain each choice.
    """
    first = write_first_job(
        patterns,
        out,
        label=label,
        ignore=_names(ignore),
        slots=_names(slots),
        numbers=_names(numbers),
        overwrite=overwrite,
        test=test or [],
        format=format_name or None,
    )
    _print_proposal(output_console(highlight=True), first.proposal)
    typer.echo(f"schema: {first.schema_file}")
    held_out = f"{len(first.test)} to test on" if first.test else "none to test on, so no AUC"
    typer.echo(
        f"job: {first.job_file} ({counted(len(first.train), 'file')} to train on, {held_out})"
    )
    if not first.test:
        split = ["ps-data", "split", *first.train, "--out", "sets"]
        split += ["--format", format_name] if format_name else []
        again = ["ps-data", "init", "sets/train/*", "--test", "sets/validation/*", "--out", "sets"]
        again += ["--label", label] if label else []
        for option, names in (("--ignore", ignore), ("--slots", slots), ("--numbers", numbers)):
            again += [option, ",".join(names)] if names else []
        typer.echo(f"to split the rows for a test: {shlex.join(split)}, then {shlex.join(again)}")
    typer.echo(f"next: ps-worker train {shlex.quote(str(first.job_file))}")


@app.command("split")
def split_command(
    patterns: Patterns,
    out: Annotated[
        Path, typer.Option(help="Output folder for train/, validation/ and, optionally, test/.")
    ],
    ratio: Annotated[
        str, typer.Option(help="Ratio train:validation or train:validation:test; default: 9:1.")
    ] = "",
    by: Annotated[str, typer.Option(help="Column that tells the test set, such as a time.")] = "",
    test: Annotated[str, typer.Option(help="Least value of --by in the test set.")] = "",
    where: Annotated[
        list[str] | None, typer.Option(help="Rows to keep, as 'clicks > 0'; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the assignment.")] = 1,
    rows_per_file: Annotated[int, typer.Option(min=1, help="Maximum rows of a file.")] = (
        ROWS_PER_FILE
    ),
    suffix: Annotated[
        str,
        typer.Option(
            help=(
                "Suffix of the files, such as .tsv.gz or .csv.zst to compress text; empty: suffix of the "
                "format."
            )
        ),
    ] = "",
    format_name: FormatName = "",
) -> None:
    """Split the rows of files into a training, a validation and, optionally, a test set.

    A hash of the seed and the row number, over all files in natural order, chooses the set of a row, so the
    result is deterministic; with --by and --test its value does. Replaces the sets of an earlier call.
    """
    if bool(by) != bool(test):
        raise UsageError("--by and --test belong together: --by event_time --test 2026-11-07")
    sets = split_rows(
        sorted(matching_files(patterns), key=natural_order),
        out,
        ratio=parse_ratio(ratio) if ratio else None,
        seed=seed,
        rows_per_file=rows_per_file,
        suffix=suffix,
        format=format_name or None,
        by=Condition(by, ">=", test) if by else None,
        where=[Condition.parse(each) for each in where or []],
    )
    for each in sets:
        typer.echo(
            f"{each.name}: {counted(each.rows, 'row')} in "
            f"{each.files[0].parent}/part-*{each.files[0].name[10:]} ({counted(len(each.files), 'file')})"
        )


@app.command("convert")
def convert_command(
    patterns: Patterns,
    out: Annotated[Path, typer.Option(help="Output folder; must not have Parquet files.")],
    keys: Annotated[
        bool,
        typer.Option(
            "--keys",
            help="Write hashed keys instead of values: faster to read, but only with this schema.",
        ),
    ] = False,
    schema: SchemaName = "criteo",
    rows_per_file: Annotated[int, typer.Option(min=1, help="Maximum rows of a file.")] = 5_000_000,
    format_name: FormatName = "",
    bad_row_limit: BadRowLimit = 0,
) -> None:
    """Convert click logs to Parquet, which is smaller, faster to read and can be split.

    Columns have the names of the schema. Numbers are unscaled, so the scaling of the schema may change.
    """
    converted = convert(
        matching_files(patterns),
        out,
        _schema(schema),
        keys=keys,
        rows_per_file=rows_per_file,
        format_in=format_name or None,
        bad_row_limit=bad_row_limit,
    )
    typer.echo(
        f"{counted(converted.rows, 'row')} in {out}/part-*.parquet "
        f"({counted(len(converted.files), 'file')}), {counted(converted.bad_rows, 'malformed row')}"
    )


def _print_proposal(console: Console, proposal: Proposal) -> None:
    """Prints column, role and reason, a line each; then why there is no label, and what may leak it."""
    table = plain_table("column", (), "taken as", "because")
    if label := proposal.label:
        add_row(table, label.name, "label", f"0 and 1, {label.click_rate:.2%} are 1")
    taken = {"number": proposal.numbers, "vector": proposal.vectors, "slot": proposal.slots}
    taken |= {"ignored": proposal.ignored}
    for role, columns in taken.items():
        for column in columns:
            add_row(table, column.name, role, column.why)
    console.print(table)
    if proposal.no_label:
        typer.echo(printable(f"no label: {proposal.no_label}"))
    for name in proposal.leaks:
        advice = f"warning: {name!r} {LEAK} It is left out: if it is not, add it to the schema"
        typer.echo(printable(advice))


def _names(options: list[str] | None) -> list[str]:
    return [name for names in options or [] for name in names.split(",")]


def _schema(source: str) -> Schema:
    try:
        return Schema.load(source)
    except SchemaError as error:
        raise UsageError(str(error)) from error


def main() -> None:
    """Entry point of `ps-data`."""
    with errors_as_exit_codes():
        configure_logs()
        app(arguments())


if __name__ == "__main__":
    main()
