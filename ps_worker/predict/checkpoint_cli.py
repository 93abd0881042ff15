"""`ps-ckpt`: inspects, verifies, exports, imports and compacts checkpoints.

ps-ckpt inspect output/demo/model
ps-ckpt verify s3://models/clicks/epoch-3
ps-ckpt export output/demo/model exported
ps-ckpt export output/demo/model vectors --values 'data/train/*' --slot ad --format word2vec
ps-ckpt nearest output/demo/model --slot ad --value 684
ps-ckpt export output/demo/model served --kind inference
ps-ckpt import output/demo/model begun vectors/embedding.ad.parquet --table embedding
ps-ckpt compact output/demo/model/step-900 compacted

A folder of checkpoints stands for its latest one. Exit codes are those of protos/errors.py.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from ctr_ps.protos.errors import CheckpointError, UsageError
from ctr_ps.protos.runtime.environment import arguments
from ctr_ps.protos.runtime.logs import errors_as_exit_codes, printable
from ctr_ps.protos.runtime.options import command_app
from ctr_ps.protos.store import InferenceDtype, InferenceSettings
from ctr_ps.ps_server.checkpoint.files.manifest import PUBLISHED
from ctr_ps.ps_server.checkpoint.inspection import (
    QUANTILES,
    TableReport,
    inspect_block,
    inspect_table,
    verify_all,
)
from ctr_ps.ps_server.checkpoint.publish import write_best
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.rewrite import compact as compact_checkpoint
from ctr_ps.ps_server.checkpoint.rewrite import export_inference, export_table
from ctr_ps.ps_server.checkpoint.storage.folders import folder_at
from ctr_ps.ps_worker.checkpoints.attachments import job_of_checkpoint
from ctr_ps.ps_worker.checkpoints.notices import Channel
from ctr_ps.ps_worker.data.files.listing import matching_files
from ctr_ps.ps_worker.predict import value_vectors
from ctr_ps.ps_worker.predict.vector_files import VectorFormat
from ctr_ps.ps_worker.run.result_tables import output_console

app = command_app("Inspect, verify, export, import and compact checkpoints.")

Url = Annotated[
    str,
    typer.Argument(
        help="Path or URL of a checkpoint, or of a folder of checkpoints: its latest one."
    ),
]


@app.command()
def inspect(
    url: Url,
    top: Annotated[
        int, typer.Option(min=0, help="Number of keys with the most shows to list.")
    ] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show rows, bytes, norms, shows and clicks of each table."""
    checkpoint = Checkpoint.open(url)
    tables = [inspect_table(checkpoint, name, top) for name in sorted(checkpoint.tables)]
    blocks = [inspect_block(checkpoint, name) for name in sorted(checkpoint.blocks)]
    if as_json:
        reports = {
            "tables": [asdict(table) for table in tables],
            "blocks": [asdict(block) for block in blocks],
        }
        typer.echo(json.dumps({**_summary(checkpoint), **reports}))
        return
    _show_summary(checkpoint)
    _show_tables(tables, is_delta=checkpoint.base is not None)
    rows = [[each.block, each.length, each.size_bytes, f"{each.norm:.6g}"] for each in blocks]
    _print_table(("dense block", "elements", "bytes", "norm"), rows)


@app.command()
def verify(
    url: Url,
    is_all: Annotated[
        bool,
        typer.Option("--all", help="Verify every checkpoint in the folder, with one line each."),
    ] = False,
) -> None:
    """Verify all checksums of a checkpoint; exit code 5 if a file is damaged."""
    if is_all:
        damaged = []
        for name, kind, problem in verify_all(url):
            typer.echo(printable(f"{name} {kind or '-'} {problem or 'whole'}"))
            if problem:
                damaged.append(name)
        if damaged:
            raise CheckpointError(
                f"{url} has damaged or incomplete checkpoints: {', '.join(damaged)}"
            )
        return
    checkpoint = Checkpoint.open(url)
    checkpoint.verify()
    summary = _summary(checkpoint)
    typer.echo(
        f"whole: {checkpoint.url} files={summary['chain_files']} bytes={summary['chain_bytes']} "
        f"digest={checkpoint.digest_of_files()}"
    )


@app.command()
def publish(
    folder: Annotated[str, typer.Argument(help="Path or URL of a folder of checkpoints.")],
    name: Annotated[str, typer.Argument(help="Name of the checkpoint in it.")],
) -> None:
    """Have readers of a folder take this checkpoint, until its run publishes another one."""
    checkpoint = Checkpoint.open(folder_at(folder).child(name).url)
    write_best(folder, name, PUBLISHED)
    typer.echo(f"published: {checkpoint.url}")
    with suppress(CheckpointError):  # it is of no job
        if url := job_of_checkpoint(checkpoint).publish.notify:
            Channel(url).tell(name)


@app.command()
def compact(
    url: Url, to: Annotated[str, typer.Argument(help="Path or URL of the new checkpoint.")]
) -> None:
    """Rewrite a delta and its chain as one full checkpoint."""
    compact_checkpoint(Checkpoint.open(url), to)
    compacted = Checkpoint.open(to)
    rows = sum(map(compacted.manifest.num_rows, compacted.tables))
    typer.echo(f"{compacted.url} rows={rows}")


@app.command()
def export(
    url: Url,
    to: Annotated[str, typer.Argument(help="Folder or URL for the files, one per table.")],
    kind: Annotated[
        Literal["tables", "inference"],
        typer.Option(help="tables: files for other programs; inference: an inference checkpoint."),
    ] = "tables",
    file_format: Annotated[
        VectorFormat,
        typer.Option("--format", help="Format of the files; npy and word2vec only with --values."),
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
            "--values and --slot belong together: give data files with --values, and their slot with --slot"
        )
    checkpoint = Checkpoint.open(url)
    for name in table or []:
        if name not in checkpoint.tables:
            known = ", ".join(sorted(checkpoint.tables))
            raise UsageError(f"--table: {checkpoint.url} has no table {name!r}, only {known}")
    if values:
        if state:
            raise UsageError("--values writes vectors by value, and so no state: leave out --state")
        exported = value_vectors.export_values(
            checkpoint,
            folder_at(to),
            matching_files(values),
            slot=slot,
            kind=file_format,
            tables=table or [],
            format=values_format or None,
            bad_row_limit=bad_row_limit,
        )
        _print_values(exported, folder_at(to).url)
        return
    if file_format != "parquet":
        raise UsageError(f"--format {file_format} needs --values and --slot")
    folder = folder_at(to)
    folder.make()
    for name in table or sorted(checkpoint.tables):
        typer.echo(f"{folder.url}/{export_table(checkpoint, name, folder, with_state=state)}")


@app.command()
def nearest(
    url: Url,
    slot: Annotated[str, typer.Option(help="Slot of the value.")],
    value: Annotated[str, typer.Option(help="Value, as text in the data.")],
    table: Annotated[str, typer.Option(help="Table; default: the widest.")] = "",
    values: Annotated[
        list[str] | None, typer.Option(help="Data files with values; default: those of training.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of values to list.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the values of a slot with the vectors nearest to that of a value, by cosine."""
    checkpoint = Checkpoint.open(url)
    found = value_vectors.nearest(checkpoint, slot, value, table=table, files=values or (), top=top)
    if as_json:
        typer.echo(json.dumps([{"value": text, "cosine": cosine} for text, cosine in found]))
    else:
        _print_table(("value", "cosine"), [[text, f"{cosine:.4f}"] for text, cosine in found])


@app.command("import")
def import_(
    url: Url,
    to: Annotated[str, typer.Argument(help="Path or URL of the new checkpoint.")],
    files: Annotated[
        list[str], typer.Argument(help="Vectors: NAME.parquet, NAME.npy or NAME.txt (word2vec).")
    ],
    table: Annotated[str, typer.Option(help="Table to import the vectors into.")],
    slot: Annotated[str, typer.Option(help="Slot of the values, for files without keys.")] = "",
) -> None:
    """Copy a checkpoint, with rows set to vectors from files, such as those of `export --values`."""
    written = value_vectors.import_vectors(Checkpoint.open(url), to, files, table=table, slot=slot)
    typer.echo(f"{folder_at(to).url} vectors={written}")


def _summary(checkpoint: Checkpoint) -> dict[str, object]:
    """Returns figures of a checkpoint: `files` and `bytes` are its own, `chain_*` those of its chain."""
    manifest = checkpoint.manifest
    chain_sizes = [size for link in checkpoint.chain for size in link.manifest.sizes]
    return {
        "checkpoint": checkpoint.url,
        "kind": manifest.kind,
        "chain": [link.name for link in checkpoint.chain],
        "created": datetime.fromtimestamp(manifest.created, UTC).isoformat(timespec="seconds"),
        "version": manifest.version,
        "digest": manifest.model_digest,
        "files": len(manifest.sizes),
        "bytes": sum(manifest.sizes),
        "chain_files": len(chain_sizes),
        "chain_bytes": sum(chain_sizes),
        "attachments": list(manifest.attachments),
        "workers": {worker: progress.step for worker, progress in manifest.workers.items()},
    }


def _show_summary(checkpoint: Checkpoint) -> None:
    summary = _summary(checkpoint)
    chain_files, chain_bytes = summary.pop("chain_files"), summary.pop("chain_bytes")
    if checkpoint.base is None:
        del summary["chain"]
    else:
        del summary["digest"]  # empty; `verify` computes it
        summary["chain"] = " <- ".join(link.name for link in checkpoint.chain)
        summary["files"] = f"{summary['files']} of the delta, {chain_files} of the chain"
        summary["bytes"] = f"{summary['bytes']} of the delta, {chain_bytes} of the chain"
    for name, value in summary.items():
        typer.echo(printable(f"{name:<12} {value}"))


def _show_tables(tables: Sequence[TableReport], *, is_delta: bool) -> None:
    """Prints figures of tables; of a delta, the rows of the model and those of the delta."""
    names = [f"{quantile:.0%}" for quantile in QUANTILES]
    sizes = ("rows", "rows of delta", "bytes of delta") if is_delta else ("rows", "bytes")
    columns = ("table", "dim", *sizes, "candidates")
    quantities = [f"{what} {' '.join(names)}" for what in ("norm", "show", "click")]
    _print_table(
        [*columns, *quantities],
        [
            [each.table, each.dim, each.rows, *([each.own_rows] if is_delta else [])]
            + [each.size_bytes, each.candidates]
            + [
                " ".join(f"{value:.4g}" for value in values) or "-"
                for values in (each.norms, each.show, each.click)
            ]
            for each in tables
        ],
    )
    for each in tables:
        if each.top:
            rows = [
                [top.key, f"{top.show:g}", f"{top.click:g}", f"{top.score:g}"] for top in each.top
            ]
            _print_table((f"key of {each.table}", "show", "click", "score"), rows)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(columns):
        header = Text(printable(name))
        table.add_column(header, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(each))) for each in row))
    console = output_console()
    console.print()
    console.print(table)


def _print_values(exported: value_vectors.ExportedValues, url: str) -> None:
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
                f"--min-score is {settings.min_score:g}, but table {name!r} keeps no statistics and so no "
                "scores: omit the option"
            )
    written, left_out = export_inference(checkpoint, to, settings)
    omitted = f" left_out={left_out}" if settings.min_score else ""
    typer.echo(f"{folder_at(to).url} rows={written}{omitted}")


def main() -> None:
    """Entry point of `ps-ckpt`."""
    with errors_as_exit_codes():
        app(arguments())


if __name__ == "__main__":
    main()
