"""`ps-ckpt`: inspects, verifies, compares, exports, imports and compacts checkpoints.

ps-ckpt export output/demo/model exported --format parquet
ps-ckpt export output/demo/model vectors --values 'data/train/*' --slot ad --format word2vec
ps-ckpt export output/demo/model served --kind inference
ps-ckpt import output/demo/model begun vectors/embedding.ad.parquet --table embedding

The other commands are in `ps_server.checkpoint.tools.cli`: they read checkpoints alone.
"""

from typing import Annotated, Literal, cast, get_args

import typer

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.store import InferenceDtype, InferenceSettings
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.storage.folders import folder_at
from ctr_ps.ps_server.checkpoint.tools.cli import Url, app, main
from ctr_ps.ps_server.checkpoint.tools.export import ExportFormat, export_inference, export_table
from ctr_ps.ps_worker.data.files.listing import matching_files
from ctr_ps.ps_worker.predict.value_vectors import ExportedValues, export_values, import_vectors
from ctr_ps.ps_worker.predict.vector_files import VectorFormat

__all__ = ["app", "main"]


@app.command()
def export(
    url: Url,
    to: Annotated[str, typer.Argument(help="Folder or URL for the files, one per table.")],
    kind: Annotated[
        Literal["tables", "inference"],
        typer.Option(help="tables: files for other programs; inference: an inference checkpoint."),
    ] = "tables",
    file_format: Annotated[
        Literal["parquet", "text", "npy", "word2vec"],
        typer.Option(
            "--format",
            help="File format; by key: parquet or text; by value: parquet, npy or word2vec.",
        ),
    ] = "parquet",
    table: Annotated[
        list[str] | None, typer.Option(help="Only this table; repeatable; default: all.")
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            help="Data files, or patterns in quotes: export the vectors of the values of --slot in these "
            "files; repeatable."
        ),
    ] = None,
    slot: Annotated[str, typer.Option(help="Slot of the values.")] = "",
    values_format: Annotated[
        str, typer.Option(help="Format of the data files; empty: determined by the suffix.")
    ] = "",
    bad_row_limit: Annotated[
        int, typer.Option(min=0, help="Malformed rows of the data files to skip before failing.")
    ] = 1000,
    state: Annotated[
        bool, typer.Option("--state", help="Include optimizer state; only for --kind tables.")
    ] = False,
    dtype: Annotated[
        InferenceDtype, typer.Option(help="Dtype of the weights; only for --kind inference.")
    ] = "float32",
    min_score: Annotated[
        float, typer.Option(min=0, help="Omit rows with a lower score; only for --kind inference.")
    ] = 0.0,
) -> None:
    """Export tables, by key or by value, for other programs, or an inference checkpoint."""
    if kind == "inference":
        if table or state or values or slot or file_format != "parquet":
            raise UsageError("--table, --state, --values, --slot and --format need --kind tables")
        _export_inference(url, to, InferenceSettings(dtype=dtype, min_score=min_score))
        return
    if dtype != "float32" or min_score:
        raise UsageError("--dtype and --min-score need --kind inference")
    if bool(values) != bool(slot):
        raise UsageError(
            "--values and --slot belong together: name data files, and the slot in them"
        )
    checkpoint = Checkpoint.open(url)
    for name in table or []:
        if name not in checkpoint.tables:
            known = ", ".join(sorted(checkpoint.tables))
            raise UsageError(f"--table: {checkpoint.url} has no table {name!r}, only {known}")
    if values:
        if state or file_format not in get_args(VectorFormat):
            raise UsageError(
                f"--values writes vectors by value, as {', '.join(get_args(VectorFormat))}, without --state"
            )
        exported = export_values(
            checkpoint,
            folder_at(to),
            matching_files(values),
            slot=slot,
            kind=cast("VectorFormat", file_format),
            tables=table or [],
            format=values_format or None,
            bad_row_limit=bad_row_limit,
        )
        _print_values(exported, folder_at(to).url)
        return
    if file_format not in get_args(ExportFormat):
        raise UsageError(
            f"--format {file_format} needs --values and --slot; without them choose "
            f"{' or '.join(get_args(ExportFormat))}"
        )
    folder = folder_at(to)
    folder.make()
    for name in table or sorted(checkpoint.tables):
        format_of_file = cast("ExportFormat", file_format)
        file = export_table(checkpoint, name, folder, format_of_file, with_state=state)
        typer.echo(f"{folder.url}/{file}")


@app.command("import")
def import_(
    url: Url,
    to: Annotated[str, typer.Argument(help="Path or URL of the new checkpoint.")],
    files: Annotated[
        list[str], typer.Argument(help="Vectors: NAME.parquet, NAME.npy or NAME.txt (word2vec).")
    ],
    table: Annotated[str, typer.Option(help="Table to set the rows of.")],
    slot: Annotated[str, typer.Option(help="Slot of the values, for files without keys.")] = "",
) -> None:
    """Copy a checkpoint, with rows set to vectors from files, such as those of `export --values`."""
    written = import_vectors(Checkpoint.open(url), to, files, table=table, slot=slot)
    typer.echo(f"{folder_at(to).url} vectors={written}")


def _print_values(exported: ExportedValues, url: str) -> None:
    typer.echo(
        f"rows={exported.rows} malformed={exported.bad_rows} values={exported.distinct} "
        f"collisions={exported.collisions}"
    )
    for each in exported.tables:
        files = " ".join(f"{url}/{file}" for file in each.files)
        typer.echo(
            f"{files} written={each.written} without_row={each.without_row} left_out={each.left_out}"
        )


def _export_inference(url: str, to: str, settings: InferenceSettings) -> None:
    checkpoint = Checkpoint.open(url)
    for name in checkpoint.tables:
        files = checkpoint.manifest.files_of_table(name)
        if settings.min_score and not files[0].statistics_width:
            raise UsageError(
                f"--min-score {settings.min_score:g}: table {name!r} keeps no statistics, so its rows have "
                f"no scores: omit the option"
            )
    rows = export_inference(checkpoint, to, settings)
    left_out = f" left_out={rows.left_out}" if settings.min_score else ""
    typer.echo(f"{folder_at(to).url} rows={rows.written}{left_out}")


if __name__ == "__main__":
    main()
