"""`ps-data`: generates synthetic click logs; checks, profiles, splits and converts click logs.

ps-data generate data/planted --rows 400000 --test-rows 40000 --files 4 --seed 1
ps-data check 'data/planted/train/*.tsv'
ps-data profile 'data/planted/train/*.tsv' --out data/planted/log1p.toml --transform log1p
ps-data split 'data/planted/train/*.tsv' --out data/split --ratio 9:1 --seed 1
ps-data convert 'data/planted/train/*.tsv' --out data/planted/parquet
"""

import logging
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ctr_model.schema import Schema, SchemaError, Transform
from protos.errors import CtrPsError, DataError, UsageError
from ps_worker.data.files.atomic_file import atomic_file
from ps_worker.data.files.listing import matching_files
from ps_worker.data.queue_dataset import QueueDataset
from ps_worker.data.tools.generate import MIN_TEST_ROWS, generate
from ps_worker.data.tools.planted import NUM_SLOTS, ZIPF_EXPONENT
from ps_worker.data.tools.profile import profile_files, schema_of
from ps_worker.data.tools.profile_table import profile_table
from ps_worker.data.tools.row_split import ROWS_PER_FILE, parse_ratio, split_rows

_FILE_WIDTH = 200  # characters per line of a table written to a file or a pipe

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
BadRowLimit = Annotated[
    int,
    typer.Option("--bad-row-limit", min=0, help="Malformed rows to skip before failing."),
]

app = typer.Typer(
    name="ps-data",
    help="Generate synthetic click logs; check, profile, split and convert click logs.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command("generate")
def generate_command(
    folder: Annotated[Path, typer.Argument(help="Output folder, created if it does not exist.")],
    rows: Annotated[int, typer.Option(min=1, help="Training rows.")] = 400_000,
    test_rows: Annotated[int, typer.Option(min=MIN_TEST_ROWS, help="Test rows.")] = 40_000,
    files: Annotated[int, typer.Option(min=1, help="Files of training rows.")] = 4,
    test_files: Annotated[int, typer.Option(min=1, help="Files of test rows.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the true model and the rows.")] = 1,
    slots: Annotated[
        int, typer.Option(min=1, help="Number of slots, with 4 to 4,000 values each.")
    ] = NUM_SLOTS,
    zipf: Annotated[
        float, typer.Option(min=0.0, help="Exponent of the Zipf distribution of values.")
    ] = ZIPF_EXPONENT,
) -> None:
    """Generate click logs from a known model, and print the best possible AUC.

    FOLDER gets train/part-*.tsv, test/part-*.tsv, schema.toml with the columns, and planted.json with the
    best AUC and log loss. The output is deterministic and replaces that of an earlier call.
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
    typer.echo(f"train: {rows} rows in {folder}/train/part-*.tsv ({files} files)")
    typer.echo(f"test: {test_rows} rows in {folder}/test/part-*.tsv ({test_files} files)")
    typer.echo(
        f"best possible on the test rows: auc={report.best_auc:.4f} "
        f"logloss={report.best_log_loss:.4f} (click rate {report.click_rate:.4f})"
    )


@app.command("check")
def check_command(
    patterns: Patterns,
    schema: SchemaName = "criteo",
    format_name: FormatName = "",
    bad_row_limit: BadRowLimit = 1000,
) -> None:
    """Read click logs like training does, and count rows and clicks.

    The first malformed rows are printed with file, line and fault.
    """
    names = _schema(schema)
    paths = matching_files(patterns)
    dataset = QueueDataset(
        names, batch_size=4096, format=format_name or None, bad_row_limit=bad_row_limit
    )
    dataset.set_filelist(paths)
    clicks, is_labelled = 0, True
    for batch in dataset:
        is_labelled = batch.labels is not None
        clicks += 0 if batch.labels is None else int(batch.labels.sum())
    rate = clicks / max(dataset.rows, 1)
    labels = f"{clicks} clicks ({rate:.4f})" if is_labelled else "no labels"
    typer.echo(
        f"{len(paths)} files, {dataset.rows} rows, {labels}, {dataset.bad_rows} malformed rows"
    )


@app.command("profile")
def profile_command(
    patterns: Patterns,
    schema: SchemaName = "",
    columns: Annotated[
        str,
        typer.Option(
            help="Instead of a schema: numbers=13,slots=26 for columns I1, ..., I13 and C1, ..., C26."
        ),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Schema file to write, with the scaling of these columns.")
    ] = None,
    transform: Annotated[
        Transform,
        typer.Option(
            help="Scaling in that file: standardised numbers (none) or logarithms (log1p), minimum to 95th "
            "percentile (min_max), or ranks among 21 percentiles (quantile)."
        ),
    ] = "log1p",
    missing_indicators: Annotated[
        bool, typer.Option(help="Add an indicator in that file to columns with missing numbers.")
    ] = False,
    format_name: FormatName = "",
    bad_row_limit: BadRowLimit = 1000,
) -> None:
    """Print statistics of the columns of click logs, and write a schema that scales them.

    Takes one pass and bounded memory; estimates are marked, with their error.
    """
    if schema and columns:
        raise UsageError(
            f"--schema {schema} and --columns {columns} both name the columns: omit one of them"
        )
    names = _numbered(columns) if columns else _schema(schema or "criteo")
    profile = profile_files(
        matching_files(patterns), names, format=format_name or None, bad_row_limit=bad_row_limit
    )
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(profile_table(profile))
    if out is None:
        return
    content = schema_of(profile, transform, missing_indicators=missing_indicators).to_toml()
    try:
        with atomic_file(out) as file:
            file.write(content.encode())
    except OSError as error:
        raise DataError(f"cannot write {str(out)!r}: {error.strerror}") from error
    typer.echo(f"schema: {out} (transform {transform})")


@app.command("split")
def split_command(
    patterns: Patterns,
    out: Annotated[
        Path, typer.Option(help="Output folder for train/, validation/ and, optionally, test/.")
    ],
    ratio: Annotated[
        str, typer.Option(help="Ratio train:validation or train:validation:test.")
    ] = "9:1",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the assignment.")] = 1,
    rows_per_file: Annotated[int, typer.Option(min=1, help="Maximum rows of a file.")] = (
        ROWS_PER_FILE
    ),
    suffix: Annotated[
        str, typer.Option(help="Suffix of the files: .tsv, or .tsv.gz or .tsv.zst to compress.")
    ] = ".tsv",
) -> None:
    """Split the rows of text files into a training, a validation and, optionally, a test set.

    The set of a row is determined by a hash of the seed and its number over all files, sorted by name, so the
    result is deterministic. Complete sets replace those of an earlier call.
    """
    sets = split_rows(
        matching_files(patterns),
        out,
        ratio=parse_ratio(ratio),
        seed=seed,
        rows_per_file=rows_per_file,
        suffix=suffix,
    )
    for each in sets:
        typer.echo(
            f"{each.name}: {each.rows} rows in {each.files[0].parent}/part-*{suffix} "
            f"({len(each.files)} files)"
        )


@app.command("convert")
def convert_command(
    patterns: Patterns,
    out: Annotated[Path, typer.Option(help="Output folder, without Parquet files.")],
    keys: Annotated[
        bool,
        typer.Option(
            "--keys", help="Write keys instead of values: faster to read, but bound to the schema."
        ),
    ] = False,
    schema: SchemaName = "criteo",
    rows_per_file: Annotated[int, typer.Option(min=1, help="Maximum rows of a file.")] = 5_000_000,
    format_name: FormatName = "",
    bad_row_limit: BadRowLimit = 0,
) -> None:
    """Convert click logs to Parquet, which is smaller, faster to read and can be split.

    Columns have the names of the schema. Numbers are not scaled, so that schemas with other scaling can read
    the files.
    """
    # Imported late: it needs Parquet, which no other command does.
    from ps_worker.data.tools.convert import convert

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
        f"{converted.rows} rows in {out}/part-*.parquet ({len(converted.files)} files), "
        f"{converted.bad_rows} malformed rows"
    )


def _schema(source: str) -> Schema:
    try:
        return Schema.load(source)
    except SchemaError as error:
        raise UsageError(str(error)) from error


def _numbered(columns: str) -> Schema:
    """Returns the schema of "numbers=13,slots=26"."""
    found = re.fullmatch(r"numbers=(\d+),slots=([1-9]\d*)", columns)
    if found is None:
        raise UsageError(f"columns is {columns!r}, expected the form numbers=13,slots=26")
    return Schema.numbered(int(found[1]), int(found[2]))


def main() -> None:
    """Entry point of `ps-data`."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        app()
    except CtrPsError as error:
        typer.echo(f"ps-data: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
