"""`ps-data`: makes click logs with a known truth, and checks those that you have.

ps-data generate data/planted --rows 400000 --test-rows 40000 --files 4 --seed 1
ps-data check 'data/planted/train/*.tsv'
"""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from ctr_model.schema import Schema, SchemaError
from protos.errors import CtrPsError, UsageError
from ps_worker.data.files import matching_files
from ps_worker.data.generate import MIN_TEST_ROWS, generate
from ps_worker.data.queue_dataset import QueueDataset

app = typer.Typer(
    name="ps-data",
    help="Click logs in Criteo's layout: makes them with a known truth, and checks them.",
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
) -> None:
    """Write click logs with a planted truth, and tell the best AUC that a model can reach.

    FOLDER gets train/part-*.tsv, test/part-*.tsv and planted.json, which holds the best AUC and
    log loss. The same options give the same bytes. What an earlier call wrote is replaced.
    """
    report = generate(
        folder, rows=rows, test_rows=test_rows, files=files, test_files=test_files, seed=seed
    )
    typer.echo(f"train: {rows} rows in {folder}/train/part-*.tsv ({files} files)")
    typer.echo(f"test: {test_rows} rows in {folder}/test/part-*.tsv ({test_files} files)")
    typer.echo(
        f"the best there is on the test rows: auc={report.best_auc:.4f} "
        f"logloss={report.best_log_loss:.4f} (click rate {report.click_rate:.4f})"
    )


@app.command("check")
def check_command(
    patterns: Annotated[
        list[str], typer.Argument(help="Files, or patterns with *, ? and ** in quotes.")
    ],
    schema: Annotated[
        str, typer.Option(help="The columns: 'criteo', or the path of a schema file.")
    ] = "criteo",
    format_name: Annotated[
        str, typer.Option("--format", help="Format of the files; empty: their names tell.")
    ] = "",
    bad_row_limit: Annotated[
        int, typer.Option(min=0, help="Malformed rows to pass over before giving up.")
    ] = 1000,
) -> None:
    """Read click logs as training would, and tell how many rows and clicks there are.

    The first malformed rows are shown with file, line and fault.
    """
    try:
        columns = Schema.load(schema)
    except SchemaError as error:
        raise UsageError(str(error)) from error
    paths = matching_files(patterns)
    dataset = QueueDataset(
        columns, batch_size=4096, format=format_name or None, bad_row_limit=bad_row_limit
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
