"""`ps-data`: makes click logs with a known truth, and looks into, deals out and converts those that you have.

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

_FILE_WIDTH = 200  # characters a line of a table that goes to a file or a pipe

Patterns = Annotated[
    list[str], typer.Argument(help="Files, or patterns with *, ? and ** in quotes.")
]
SchemaName = Annotated[
    str,
    typer.Option("--schema", help="The columns: 'criteo', or the path of a schema file."),
]
FormatName = Annotated[
    str, typer.Option("--format", help="Format of the files; empty: their names tell.")
]
BadRowLimit = Annotated[
    int,
    typer.Option("--bad-row-limit", min=0, help="Malformed rows to pass over before giving up."),
]

app = typer.Typer(
    name="ps-data",
    help="Click logs: makes them with a known truth, checks, describes, deals out and converts them.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command("generate")
def generate_command(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if it is not there.")],
    rows: Annotated[int, typer.Option(min=1, help="Rows to train on.")] = 400_000,
    test_rows: Annotated[int, typer.Option(min=MIN_TEST_ROWS, help="Rows to test on.")] = 40_000,
    files: Annotated[int, typer.Option(min=1, help="Files of rows to train on.")] = 4,
    test_files: Annotated[int, typer.Option(min=1, help="Files of rows to test on.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of the truth and the rows.")] = 1,
    slots: Annotated[int, typer.Option(min=1, help="Slots, of 4 to 4,000 values.")] = NUM_SLOTS,
    zipf: Annotated[
        float, typer.Option(min=0.0, help="Exponent of Zipf's law, by which values are drawn.")
    ] = ZIPF_EXPONENT,
) -> None:
    """Write click logs with a planted truth, and tell the best AUC that a model can reach.

    FOLDER gets train/part-*.tsv, test/part-*.tsv, schema.toml with the columns, and planted.json, which holds
    the best AUC and log loss. The same options give the same bytes. What an earlier call wrote is replaced.
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
        f"the best there is on the test rows: auc={report.best_auc:.4f} "
        f"logloss={report.best_log_loss:.4f} (click rate {report.click_rate:.4f})"
    )


@app.command("check")
def check_command(
    patterns: Patterns,
    schema: SchemaName = "criteo",
    format_name: FormatName = "",
    bad_row_limit: BadRowLimit = 1000,
) -> None:
    """Read click logs as training would, and tell how many rows and clicks there are.

    The first malformed rows are shown with file, line and fault.
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
            help="In place of a schema: numbers=13,slots=26 for columns I1, ..., I13 and C1, ..., C26."
        ),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Schema file to write, with scaling for these columns.")
    ] = None,
    transform: Annotated[
        Transform,
        typer.Option(
            help="In that file: standardised numbers or their logarithms, from the minimum to the 95th "
            "percentile, or ranks among 21 percentiles."
        ),
    ] = "log1p",
    missing_indicators: Annotated[
        bool, typer.Option(help="In that file: one more input for columns with missing numbers.")
    ] = False,
    format_name: FormatName = "",
    bad_row_limit: BadRowLimit = 1000,
) -> None:
    """Describe the columns of click logs, and write a schema that scales them.

    One pass in bounded memory; what is estimated is marked, with its error.
    """
    if schema and columns:
        raise UsageError(
            f"--schema {schema} and --columns {columns} both name the columns: leave one out"
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
    out: Annotated[Path, typer.Option(help="Folder for train/, validation/ and maybe test/.")],
    ratio: Annotated[
        str, typer.Option(help="Of train to validation, or to validation and test.")
    ] = "9:1",
    seed: Annotated[int, typer.Option(min=0, help="Another one deals otherwise.")] = 1,
    rows_per_file: Annotated[int, typer.Option(min=1, help="The most rows of a file.")] = (
        ROWS_PER_FILE
    ),
    suffix: Annotated[
        str, typer.Option(help="Of the files: .tsv, or .tsv.gz or .tsv.zst to compress them.")
    ] = ".tsv",
) -> None:
    """Deal the rows of text files to a training and a validation set.

    A row goes by a hash of the seed and its number over all files, sorted by name, so the same call gives the
    same sets. They replace those of an earlier call, once they are whole.
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
    out: Annotated[Path, typer.Option(help="Folder for part-*.parquet; has none yet.")],
    keys: Annotated[
        bool,
        typer.Option(
            "--keys", help="Keys in place of values: quicker to read, tied to the schema."
        ),
    ] = False,
    schema: SchemaName = "criteo",
    rows_per_file: Annotated[int, typer.Option(min=1, help="The most rows of a file.")] = 5_000_000,
    format_name: FormatName = "",
    bad_row_limit: BadRowLimit = 0,
) -> None:
    """Write click logs as Parquet, which is smaller, read faster, and read in splits.

    Columns have the names of the schema; numbers are not scaled, so that another schema may do so.
    """
    from ps_worker.data.tools.convert import convert  # loads Parquet, which no other command needs

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
        raise UsageError(f"columns is {columns!r}, expected a text such as numbers=13,slots=26")
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
